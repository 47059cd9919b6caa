"""The tower as CUDA graphs, by number of patches, for any mixture of image sizes.

A small batch's forward is bound by kernel launches, and so is that of a larger one while other
threads prepare images; a replay is one launch per feature, so that a feature leaves the device
while later blocks run. A batch is padded to the next captured number of patches; padding is no
segment of the attention, so no image is affected. Batches beyond the largest graph run eagerly.

All graphs read one input and one static layout, write one output and share one memory pool: one
runs at a time, in the order of one stream. The runner captures at start and replays; a size whose
capture fails runs eagerly.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import launches
from services.common.geometry import Grid
from services.common.nn.dispatch import CapturedCalls
from services.common.process.progress import log_progress

if TYPE_CHECKING:
    from services.encoder.models import VisionTower

MAX_CAPTURED_PATCHES = 12288  # as many as a batch has by default
_MAX_SEGMENTS = 16

Parts = list[tuple[torch.cuda.CUDAGraph, int]]  # each ends with a feature, in the tower's order


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one number of patches, and the kernel calls they hold."""

    parts: Parts
    calls: CapturedCalls


def buckets() -> list[int]:
    """Numbers of patches to capture, close enough that padding costs little."""
    return [*range(256, 4096, 256), *range(4096, MAX_CAPTURED_PATCHES + 1, 512)]


class TowerGraphs:
    """Captures the tower and replays it. All calls are made with one stream as the current one,
    which is not the default one.
    """

    def __init__(self, model: "VisionTower", dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._layout = model.static_layout(MAX_CAPTURED_PATCHES, _MAX_SEGMENTS)
        self._dtype = dtype
        spec = model.spec
        self._patches = torch.zeros(
            MAX_CAPTURED_PATCHES, spec.in_channels * spec.patch_size**2, dtype=dtype, device=device
        )
        max_tokens = MAX_CAPTURED_PATCHES // spec.spatial_merge_size**2
        self._output = torch.empty(
            spec.num_features, max_tokens, spec.out_hidden_size, dtype=dtype, device=device
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Captured] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures these numbers of patches, the largest first; takes about two forwards each.

        A failure is logged and ends the capturing: batches beyond the graphs made run eagerly.
        """
        for done, size in enumerate(sorted(sizes, reverse=True)):
            log_progress("graphs", done, len(sizes))
            try:
                captured = self._capture(size)
                for graph, _ in captured.parts:
                    graph.replay()  # the first replay takes longer
            except Exception as error:
                logging.warning(
                    "no CUDA graph of %d patches, %d sizes captured: %s: %s",
                    size, len(self._captured), type(error).__name__, error,
                )  # fmt: skip
                if not isinstance(error, torch.OutOfMemoryError):
                    return
            else:
                self._captured[size] = captured

    def fits(self, grids: Sequence[Grid]) -> bool:
        """Whether there is a graph for a batch."""
        return self._size(grids) is not None and len(grids) <= _MAX_SEGMENTS

    def replay(self, pixels: Tensor, grids: Sequence[Grid]) -> Iterator[tuple[int, Tensor]]:
        """Enqueues a batch that fits, part after part; yields each part's feature, in new memory.

        Args:
            pixels: flat, as for `Ops.pack_patches`.
        """
        size = self._size(grids)
        assert size is not None
        spec, ops = self._model.spec, self._model.ops
        merge, num_patches = spec.spatial_merge_size, _num_patches(grids)
        patches = self._patches[:num_patches]
        ops.pack_patches(pixels, grids, spec.patch_size, merge, self._dtype, out=patches)
        self._layout.set(grids)
        captured = self._captured[size]
        captured.calls.num_replays += 1
        for graph, feature in captured.parts:
            graph.replay()
            yield feature, self._output[feature, : num_patches // merge**2].clone()

    def _size(self, grids: Sequence[Grid]) -> int | None:
        wanted = _num_patches(grids)
        return min((size for size in self._captured if size >= wanted), default=None)

    def _capture(self, size: int) -> Captured:
        merge, table = self._model.spec.spatial_merge_size, self._model.ops.table
        self._layout.set([(1, merge, size // merge)])
        layout, patches = self._layout.rows(size), self._patches[:size]
        with table.for_graph():
            for _ in self._model.features(patches, layout):  # libraries choose their kernels
                pass
        parts: Parts = []
        features: Iterator[tuple[int, Tensor]] | None = None
        with table.capturing() as calls:
            for _ in range(self._model.spec.num_features):
                with launches.captured_graph(self._pool) as graph:
                    # Tensors that a part hands to the next live in the generator's frame until the
                    # last part is captured.
                    features = features or self._model.features(patches, layout)
                    feature, rows = next(features)
                    self._output[feature, : len(rows)] = rows
                parts.append((graph, feature))
        return Captured(parts, calls)


def _num_patches(grids: Sequence[Grid]) -> int:
    return sum(height * width for _, height, width in grids)
