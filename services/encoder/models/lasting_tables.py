"""A batch's tables and attention plan at one place in memory, for CUDA graphs."""

from collections.abc import Sequence

import torch

from services.encoder.attention.base import LastingPlan
from services.encoder.models.base import Grid, VisionLayout
from services.encoder.models.grid_tables import GridTables


class LastingTables:
    """See `LastingLayout`.

    Args:
        tables: of the model.
        plan: likewise.
        max_patches: of a batch.
    """

    def __init__(self, tables: GridTables, plan: LastingPlan, max_patches: int) -> None:
        self._tables = tables
        self._plan = plan
        self._frames: list[tuple[int, int]] = []  # that are set
        one = tables.of([(tables.merge_size, tables.merge_size)])
        self._positions, self._cos, self._sin = (
            torch.zeros(max_patches, table.shape[1], dtype=table.dtype, device=table.device)
            for table in (one.positions, one.cos, one.sin)
        )

    def rows(self, num_patches: int) -> VisionLayout:
        """See `LastingLayout.rows`."""
        positions, cos, sin = self._positions, self._cos, self._sin
        rows = slice(num_patches)
        return VisionLayout(num_patches, positions[rows], cos[rows], sin[rows], self._plan)

    def set(self, grids: Sequence[Grid]) -> None:
        """See `LastingLayout.set`."""
        frames = frames_of(grids)
        if frames == self._frames:
            return
        self._frames = []  # until all of it is enqueued
        table = self._tables.of(frames)
        size = len(table.positions)
        self._positions[:size] = table.positions
        self._cos[:size] = table.cos
        self._sin[:size] = table.sin
        self._plan.set([height * width for height, width in frames])
        self._frames = frames


def frames_of(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    """The segments of a batch, (h, w) each: every frame of a video is one of its own."""
    return [(height, width) for time, height, width in grids for _ in range(time)]
