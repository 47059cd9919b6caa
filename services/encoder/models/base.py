"""What the runner needs of a vision model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.common.model_config import VisionConfig
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


class VisionModel(Protocol):
    """Packed patches in, embeddings out. Built on `meta`, filled by `common.nn.weights`."""

    config: VisionConfig
    weight_map: WeightMap

    def __init__(
        self, config: VisionConfig, attention: AttentionBackend, ops: Ops | None = None
    ) -> None: ...

    def layout(self, grids: Sequence[Grid], *, captured: bool = False) -> VisionLayout:
        """Tables of a batch of images or videos, packed in this order.

        Args:
            grids: of the images.
            captured: the forward will be captured as a CUDA graph; the grids are all equal then.
        """
        ...

    def levels(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
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
