"""What the runner needs of a vision model.

A model implements `VisionModel`; runner and graphs know nothing else of it. No model decides which
kernel runs: it calls `Ops`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.attention.segments import Segments
from services.common.geometry import Grid
from services.common.model_spec import TowerSpec
from services.common.nn.weights import WeightMap
from services.encoder.operations.ops import Ops


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """What a packed batch's shape alone decides; made before the forward, shared by all blocks.

    Attributes:
        embeddings: `[N, hidden]`, of the positions.
        cos: `[N, head_dim / 2]` float32.
        sin: as `cos`.
        segments: of the attention, by what the model calls them: full, or of windows.
    """

    embeddings: Tensor
    cos: Tensor
    sin: Tensor
    segments: Mapping[str, Segments]


class StaticVisionLayout(Protocol):
    """A layout in static buffers of a CUDA graph: captured once, set before each replay."""

    def rows(self, num_patches: int) -> VisionLayout:
        """The layout of a graph of `num_patches` rows: views of the buffers."""
        ...

    def set(self, grids: Sequence[Grid]) -> None:
        """Enqueues the positions of a batch of at most `max_patches`. Rows behind the batch hold
        undefined values, and no row of the batch reads them.
        """
        ...


class VisionModel(Protocol):
    """Packed patches in, embeddings out. Built on `meta`, filled by `common.nn.weights`."""

    spec: TowerSpec
    ops: Ops
    weight_map: WeightMap

    def __init__(self, spec: TowerSpec, ops: Ops, prefix: str = "") -> None:
        """`prefix`: of its tensors' names in a checkpoint."""
        ...

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """The layout of a batch of images or videos, packed in this order."""
        ...

    def static_layout(self, max_patches: int, max_segments: int) -> StaticVisionLayout:
        """A layout for CUDA graphs.

        Args:
            max_patches: of a batch.
            max_segments: images, or frames of videos, of a batch.
        """
        ...

    def features(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, yielding each feature as soon as its block is done (enqueued, on CUDA).

        Args:
            patches: `[N, channels * temporal * patch * patch]`, scaled to [-1, 1], rows in
                merge-block order; or without the temporal factor where all slices of time are
                equal, as in still images.
            layout: what `layout` returned for the same batch.

        Yields:
            `(feature, [num_tokens, out_hidden])`: DeepStack features from 1 on, in order; feature
            0, the merged output, comes last.
        """
        ...

    def __call__(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """All features: `[features, num_tokens, out_hidden]`."""
        ...
