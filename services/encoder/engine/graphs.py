"""CUDA graphs of the vision tower, one for each of several numbers of patches.

The time of a small batch is the time of its kernel launches; the same is true of larger batches
while other threads preprocess images. A replay needs one launch per feature, so a feature can be
copied to the host while later blocks run. A graph runs batches of any mixture of image sizes: a
batch is padded to the next captured number of patches, and no image attends to the padding. A batch
that is larger than the largest graph runs without a graph.

All graphs read the same embedded patches and the same static layout, write the same output, and
share one memory pool. The patch embedding runs before the graphs, so that still images and pairs of
frames, whose patches differ in size, have the same graphs. Only one graph runs at a time, in the
order of one stream. The runner captures the graphs at start and replays them. A size whose capture
fails runs without a graph.
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

MAX_CAPTURED_PATCHES = 12288  # the default budget of a batch
_MAX_SEGMENTS = 16

# Graphs of the parts of the tower, each with the feature that it ends with, in the tower's order.
Parts = list[tuple[torch.cuda.CUDAGraph, int]]


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one number of patches.

    Attributes:
        parts: graphs of the parts of the tower.
        calls: kernel calls that were captured.
    """

    parts: Parts
    calls: CapturedCalls


def buckets() -> list[int]:
    """Returns the numbers of patches to capture. They are so close that padding costs little."""
    return [*range(256, 4096, 256), *range(4096, MAX_CAPTURED_PATCHES + 1, 512)]


class TowerGraphs:
    """Captures and replays the tower. The current stream must be the same in all calls, and not the
    default stream.

    Args:
        model: vision tower with its weights.
        dtype: data type of patches and embeddings.
        device: device of the model.
    """

    def __init__(self, model: "VisionTower", dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._layout = model.static_layout(MAX_CAPTURED_PATCHES, _MAX_SEGMENTS)
        self._dtype = dtype
        spec = model.spec
        self._embedded = torch.zeros(
            MAX_CAPTURED_PATCHES, spec.hidden_size, dtype=dtype, device=device
        )
        max_tokens = MAX_CAPTURED_PATCHES // spec.spatial_merge_size**2
        self._output = torch.empty(
            spec.num_features, max_tokens, spec.out_hidden_size, dtype=dtype, device=device
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Captured] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures graphs, the largest first. Each takes about the time of two forward passes.

        A failure is logged. After an error other than a lack of memory, no more graphs are
        captured.

        Args:
            sizes: numbers of patches.
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
                    size,
                    len(self._captured),
                    type(error).__name__,
                    error,
                )
                if not isinstance(error, torch.OutOfMemoryError):
                    return
            else:
                self._captured[size] = captured

    def fits(self, grids: Sequence[Grid]) -> bool:
        """Returns whether there is a graph for a batch."""
        return self._size(grids) is not None and len(grids) <= _MAX_SEGMENTS

    def replay(
        self, pixels: Tensor, grids: Sequence[Grid], *, are_pairs: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Enqueues a batch for which `fits` is true, one part after another.

        Args:
            pixels: flat pixels of the images, as for `Ops.pack_patches`, or of the pairs of frames,
                as for `Ops.pack_pairs`.
            grids: sizes of the images in patches.
            are_pairs: True if the images are pairs of frames.

        Yields:
            Number of the feature that a part ends with, and its rows in new memory.
        """
        size = self._size(grids)
        assert size is not None
        spec, ops = self._model.spec, self._model.ops
        merge, num_patches = spec.spatial_merge_size, _num_patches(grids)
        pack = ops.pack_pairs if are_pairs else ops.pack_patches
        patches = pack(pixels, grids, spec.patch_size, merge, self._dtype)
        self._embedded[:num_patches] = self._model.patch_embed(patches)
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
        layout, embedded = self._layout.rows(size), self._embedded[:size]
        with table.for_graph():
            # The first run lets libraries choose their kernels.
            for _ in self._model.features(embedded.clone(), layout):
                pass
        parts: Parts = []
        features: Iterator[tuple[int, Tensor]] | None = None
        with table.capturing() as calls:
            for _ in range(self._model.spec.num_features):
                with launches.captured_graph(self._pool) as graph:
                    # The generator's frame refers to the tensors that one part passes to the next,
                    # until the last part is captured. The copy of the input is captured, too,
                    # because the tower may overwrite its input: the rows behind a batch would
                    # otherwise grow from replay to replay.
                    features = features or self._model.features(embedded.clone(), layout)
                    feature, rows = next(features)
                    self._output[feature, : len(rows)] = rows
                parts.append((graph, feature))
        return Captured(parts, calls)


def _num_patches(grids: Sequence[Grid]) -> int:
    return sum(height * width for _, height, width in grids)
