"""The tower as CUDA graphs, by number of patches: whatever the sizes of a batch's images.

A small batch's forward is bound by its launches, not by the device, and that of a larger one is,
too, while other threads prepare images; a replay is one launch for each level, so that a level
leaves the device while later blocks run. A batch is padded to the next captured number of patches;
the padding is no segment of the attention, so no image sees it. What is larger than a batch should
be runs eagerly.

All graphs read one input and one layout, write one output and share one memory pool: one runs at a
time, in the order of one stream.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.common.nn import launches
from services.encoder.engine.patches import pack_patches
from services.encoder.models.base import Grid, LastingLayout, VisionModel

MAX_CAPTURED_PATCHES = 12288  # as many as a batch has by default
_MAX_SEGMENTS = 16

Parts = list[tuple[torch.cuda.CUDAGraph, int]]  # each ends with a level, in the order of the tower


def buckets() -> list[int]:
    """Numbers of patches to capture, close enough that padding costs little."""
    return [*range(256, 4096, 256), *range(4096, MAX_CAPTURED_PATCHES + 1, 512)]


class TowerGraphs:
    """Captures the tower and replays it. All calls are made with one stream as the current one,
    which is not the default one.

    Args:
        model: loaded.
        layout: of the model, for `MAX_CAPTURED_PATCHES` and `_MAX_SEGMENTS`.
        dtype: of the embeddings.
        device: a CUDA device.
    """

    def __init__(
        self, model: VisionModel, layout: LastingLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._layout = layout
        self._dtype = dtype
        config = model.config
        self._patches = torch.zeros(
            MAX_CAPTURED_PATCHES, config.in_channels * config.patch_size**2,
            dtype=dtype, device=device,
        )  # fmt: skip
        most_tokens = MAX_CAPTURED_PATCHES // config.spatial_merge_size**2
        self._output = torch.empty(
            config.num_features, most_tokens, config.out_hidden_size, dtype=dtype, device=device
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Parts] = {}

    @classmethod
    def create(
        cls, model: VisionModel, dtype: torch.dtype, device: torch.device
    ) -> "TowerGraphs | None":
        """Without any graph yet; None: the model's attention cannot be captured here."""
        layout = model.lasting_layout(MAX_CAPTURED_PATCHES, _MAX_SEGMENTS)
        return None if layout is None else cls(model, layout, dtype, device)

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures these numbers of patches, the largest first; takes about two forwards each."""
        try:
            for size in sorted(sizes, reverse=True):
                with launches.captured():
                    self._captured[size] = self._capture(size)
                for graph, _ in self._captured[size]:
                    graph.replay()  # the first one takes longer
        except Exception:
            logging.exception("capturing failed; batches run eagerly")
            self._captured.clear()

    def fits(self, grids: Sequence[Grid]) -> bool:
        """Whether there is a graph for a batch."""
        return self._size(grids) is not None and sum(time for time, _, _ in grids) <= _MAX_SEGMENTS

    def replay(self, pixels: Tensor, grids: Sequence[Grid]) -> Iterator[tuple[int, Tensor]]:
        """Enqueues a batch that fits, part after part; yields each one's level, in memory of its
        own.

        Args:
            pixels: flat, see `pack_patches`.
            grids: of the images.
        """
        size = self._size(grids)
        assert size is not None
        config = self._model.config
        merge, num_patches = config.spatial_merge_size, _num_patches(grids)
        patches = self._patches[:num_patches]
        pack_patches(pixels, grids, config.patch_size, merge, self._dtype, out=patches)
        self._layout.set(grids)
        for graph, level in self._captured[size]:
            graph.replay()
            yield level, self._output[level, : num_patches // merge**2].clone()

    def _size(self, grids: Sequence[Grid]) -> int | None:
        wanted = _num_patches(grids)
        return min((size for size in self._captured if size >= wanted), default=None)

    def _capture(self, size: int) -> Parts:
        merge = self._model.config.spatial_merge_size
        self._layout.set([(1, merge, size // merge)])
        layout, patches = self._layout.rows(size), self._patches[:size]
        for _ in self._model.features(patches, layout):  # libraries choose their kernels
            pass
        parts: Parts = []
        levels: Iterator[tuple[int, Tensor]] | None = None
        for _ in range(self._model.config.num_features):
            with launches.captured_graph(self._pool) as graph:
                # What a part leaves to the next lives in the tower's frame until all are captured.
                levels = levels or self._model.features(patches, layout)
                level, rows = next(levels)
                self._output[level, : len(rows)] = rows
            parts.append((graph, level))
        return parts


def _num_patches(grids: Sequence[Grid]) -> int:
    return sum(time * height * width for time, height, width in grids)
