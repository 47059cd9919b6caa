"""What the runner needs of a vision model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.common.model_spec import TowerSpec
from services.common.nn.weights import WeightMap
from services.encoder.attention.base import AttentionBackend
from services.encoder.kernels.ops import Ops

Grid = tuple[int, int, int]  # (t, h, w) in patches before merging


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """What a packed batch's shape alone decides; made before the forward, shared by all blocks.

    Attributes:
        num_patches: N, rows of the batch.
        positions: `[N, hidden]`, the position embeddings.
        cos: `[N, head_dim / 2]` float32.
        sin: as `cos`.
        attention_plan: of the attention backend.
    """

    num_patches: int
    positions: Tensor
    cos: Tensor
    sin: Tensor
    attention_plan: Any


class LastingLayout(Protocol):
    """A layout whose memory stays where it is: captured once, then set anew before each replay."""

    def rows(self, num_patches: int) -> VisionLayout:
        """The layout of a graph of so many rows: views of the memory."""
        ...

    def set(self, grids: Sequence[Grid]) -> None:
        """Enqueues the tables of a batch, the first with `max_patches`; rows behind it get values
        of no meaning, and no row of the batch reads them.
        """
        ...


class VisionModel(Protocol):
    """Packed patches in, embeddings out. Built on `meta`, filled by `common.nn.weights`."""

    config: TowerSpec
    weight_map: WeightMap

    def __init__(
        self, config: TowerSpec, attention: AttentionBackend, ops: Ops | None = None
    ) -> None: ...

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """Tables of a batch of images or videos, packed in this order."""
        ...

    def lasting_layout(self, max_patches: int, max_segments: int) -> "LastingLayout | None":
        """A layout for CUDA graphs; None: the attention backend has no plan for them here.

        Args:
            max_patches: of a batch.
            max_segments: images, or frames of videos, of a batch.
        """
        ...

    def features(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, yielding each level as soon as its block is done (enqueued, on CUDA).

        Args:
            patches: `[N, channels * temporal * patch * patch]`, normalized, rows in merge-block
                order; or without the temporal factor where all slices of time are equal, as in
                still images.
            layout: what `layout` returned for the same batch.

        Yields:
            `(level, [num_tokens, out_hidden])`; level 0, the merged output, comes last.
        """
        ...

    def __call__(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """All levels: `[levels, num_tokens, out_hidden]`."""
        ...


def dtype_named(name: str) -> torch.dtype:
    """`torch.bfloat16` for "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
