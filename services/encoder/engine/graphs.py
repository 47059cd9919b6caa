"""The tower as CUDA graphs, for small batches of equal images that come often.

A small image's forward is bound by its launches, not by the device; a replay is one launch for each
level, so that a level leaves the device while later blocks run. Larger batches keep the device busy
longer than their launches take, and run eagerly.

All graphs read one input buffer, write one output buffer and share one memory pool: one runs at a
time, in the order of one stream.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from services.encoder.engine.frequent import FrequentLayouts
from services.encoder.models.base import Grid, VisionLayout, VisionModel

MAX_CAPTURED_PATCHES = 4096  # one image of 1024 x 1024; above, a graph gains nothing
_MAX_GRAPHS = 16

# Pixels, grids, whether it is captured → the levels.
Forward = Callable[[Tensor, Sequence[Grid], bool], Iterator[tuple[int, Tensor]]]
Layout = tuple[Grid, int]  # so many images of one grid


@dataclass(slots=True)
class TowerGraph:
    """A captured forward.

    Attributes:
        parts: each ends with a level, in the order of the tower.
        pixels: where its input goes, flat uint8.
        output: `[levels, num_tokens, hidden]`, valid until the next replay of any graph.
        tables: of its grid; the graph reads them, so they must live.
    """

    parts: list[tuple[torch.cuda.CUDAGraph, int]]
    pixels: Tensor
    output: Tensor
    tables: VisionLayout

    def replay(self) -> Iterator[tuple[int, Tensor]]:
        """Enqueues part after part; yields each one's level, in memory of its own."""
        for graph, level in self.parts:
            graph.replay()
            yield level, self.output[level].clone()

    def reset(self) -> None:
        """Gives the memory back. The device must be done with it."""
        for graph, _ in self.parts:
            graph.reset()


class TowerGraphs:
    """Captures and keeps graphs. All calls are made with the runner's stream as the current one.

    Args:
        model: loaded.
        forward: enqueues a batch.
        dtype: of the embeddings.
        device: a CUDA device.
    """

    def __init__(
        self, model: VisionModel, forward: Forward, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._forward = forward
        self._dtype = dtype
        self._device = device
        self._frequent: FrequentLayouts[Layout] = FrequentLayouts(room=_MAX_GRAPHS)
        self._captured: dict[Layout, TowerGraph] = {}
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._pool = None  # torch's handle, once there is one
        self._broken = False

    def find(self, grids: Sequence[Grid]) -> TowerGraph | None:
        """The graph of a batch, if there is one. Notes that the batch was launched."""
        layout = _layout(grids)
        self._frequent.see(layout)
        return self._captured.get(layout) if layout else None

    def capture_next(self) -> bool:
        """Captures one frequent layout; False: there is none. Takes about three forwards."""
        found = None if self._broken else self._frequent.next_capture()
        if found is None:
            return False
        layout, victim = found
        if victim is not None:
            torch.cuda.current_stream(self._device).synchronize()  # it may still run
            self._captured.pop(victim).reset()
        try:
            self._captured[layout] = self._capture(*layout)
        except Exception:
            logging.exception("capturing failed; batches run eagerly from now on")
            self.clear()
            self._broken = True
        return True

    def warm_up(self) -> None:
        """Runs a forward as for a capture: its attention may be another one than the eager."""
        merge = self._model.config.spatial_merge_size
        side = int(MAX_CAPTURED_PATCHES**0.5) // merge * merge
        grid = (1, side, side)
        pixels, _ = self._views(grid, 1)
        list(self._forward(pixels, [grid], True))

    def clear(self) -> None:
        """Gives up all graphs and their memory. The device must be idle."""
        for captured in self._captured.values():
            captured.reset()
        self._captured.clear()
        self._frequent.clear()
        self._buffers = self._pool = None

    def _capture(self, grid: Grid, count: int) -> TowerGraph:
        grids = [grid] * count
        pixels, output = self._views(grid, count)
        tables = self._model.layout([grid])

        for level, rows in self._forward(pixels, grids, True):  # libraries choose their kernels
            output[level].copy_(rows)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        parts: list[tuple[torch.cuda.CUDAGraph, int]] = []
        levels: Iterator[tuple[int, Tensor]] | None = None
        for _ in range(self._model.config.levels):
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate pinned memory meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                # What a part leaves to the next lives in the tower's frame until all are captured.
                levels = levels or self._forward(pixels, grids, True)
                level, rows = next(levels)
                output[level].copy_(rows)
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
            parts.append((graph, level))
        return TowerGraph(parts, pixels, output, tables)

    def _views(self, grid: Grid, count: int) -> tuple[Tensor, Tensor]:
        """A layout's part of the shared input and output."""
        config = self._model.config
        merge = config.spatial_merge_size**2
        patch_bytes = config.in_channels * config.patch_size**2
        row = config.levels * config.out_hidden_size
        if self._buffers is None:
            self._buffers = (
                torch.zeros(
                    MAX_CAPTURED_PATCHES * patch_bytes, dtype=torch.uint8, device=self._device
                ),
                torch.empty(
                    MAX_CAPTURED_PATCHES // merge * row, dtype=self._dtype, device=self._device
                ),
            )
        num_patches = count * grid[1] * grid[2]
        num_tokens = num_patches // merge
        pixels, output = self._buffers
        shape = (config.levels, num_tokens, config.out_hidden_size)
        return pixels[: num_patches * patch_bytes], output[: num_tokens * row].view(shape)


def _layout(grids: Sequence[Grid]) -> Layout | None:
    """None: not one grid, or too large to gain from a graph."""
    grid, count = grids[0], len(grids)
    if count * grid[0] * grid[1] * grid[2] > MAX_CAPTURED_PATCHES:
        return None
    return (grid, count) if all(other == grid for other in grids) else None
