"""The positions of patches: interpolated position embeddings, and angles for rotary embeddings.

They depend only on the grid of an image, so they are computed once per grid and cached. The
positions of a batch are those of its images, concatenated. Rows are in merge-block order: the
patches of an image token are neighbours. Vision towers make their layouts with this file.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.segments import BatchSegments, Segments, StaticSegments
from services.common.geometry import Grid

ROPE_THETA = 10_000.0
_CACHE_BYTES = 256 << 20
_ROWS_AT_ONCE = 8192


class GridPositions(NamedTuple):
    """The positions of the patches of one frame of h x w patches, or of several frames.

    Attributes:
        embeddings: position embeddings, `[h * w, hidden]`.
        cos: cosines of the angles, `[h * w, head_dim / 2]` float32. The first half of the columns
            is for the patch's row, the second half for its column.
        sin: sines of the same angles.
    """

    embeddings: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all three tensors."""
        return sum(x.nbytes for x in self)


class VisionLayout(NamedTuple):
    """The layout of a batch. It depends only on the sizes of the batch's images, is made before the
    forward pass, and is shared by all blocks.

    Attributes:
        positions: positions of all patches.
        segments: rows of each image or frame, within which patches attend to each other.
    """

    positions: GridPositions
    segments: Segments


class PositionCache:
    """An LRU cache of positions by grid. It has at most 256 MiB, unless one grid needs more.

    Args:
        table: learned position embeddings, `[side * side, hidden]`. The results have their device
            and data type.
        head_dim: size of an attention head.
        merge_size: patches per side of an image token.
        max_bytes: bytes that the positions of earlier images may take.
    """

    def __init__(
        self, table: Tensor, head_dim: int, merge_size: int, max_bytes: int = _CACHE_BYTES
    ) -> None:
        self._table = table
        self._max_bytes = max_bytes
        self.merge_size = merge_size
        quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32)
        self._frequencies = 1.0 / ROPE_THETA ** (quarter / (head_dim // 2))  # [head_dim / 4], host
        self._cache: OrderedDict[tuple[int, int], GridPositions] = OrderedDict()
        self._cached_bytes = 0

    def of(self, frames: Sequence[tuple[int, int]]) -> GridPositions:
        """Returns the positions of a batch.

        Args:
            frames: rows and columns of each image or frame in patches, in packing order.
        """
        found = [self._one(height, width) for height, width in frames]
        while self._cached_bytes > self._max_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].size_bytes
        if len(found) == 1:
            return found[0]
        return GridPositions(*map(torch.cat, zip(*found, strict=True)))

    def _one(self, height: int, width: int) -> GridPositions:
        found = self._cache.get((height, width))
        if found is not None:
            self._cache.move_to_end((height, width))
            return found
        rows, columns = merge_block_order(height, width, self.merge_size)
        angles = torch.cat(
            [axis[:, None] * self._frequencies for axis in (rows.float(), columns.float())], dim=1
        )
        device = self._table.device
        made = GridPositions(
            interpolate(self._table, height, width, rows, columns),
            angles.cos().to(device),
            angles.sin().to(device),
        )
        self._cache[height, width] = made
        self._cached_bytes += made.size_bytes
        return made


class StaticLayout:
    """A layout in static buffers, which CUDA graphs read. It is captured once, and set before each
    replay.

    Args:
        cache: cache of positions.
        max_patches: most patches of a batch.
        max_segments: most images or frames of a batch.
    """

    def __init__(self, cache: PositionCache, max_patches: int, max_segments: int) -> None:
        self._cache = cache
        self._frames: list[tuple[int, int]] = []  # frames of the batch that was set last
        one = cache.of([(cache.merge_size, cache.merge_size)])
        self._positions = GridPositions(*(x.new_zeros(max_patches, x.shape[1]) for x in one))
        self._segments = StaticSegments(max_patches, max_segments, one.cos.device)

    def rows(self, num_patches: int) -> VisionLayout:
        """Returns the layout of a graph of `num_patches` rows, as views of the buffers."""
        positions = GridPositions(*(buffer[:num_patches] for buffer in self._positions))
        return VisionLayout(positions, self._segments)

    def set(self, grids: Sequence[Grid]) -> None:
        """Enqueues the copies of a batch's positions into the buffers. Rows after the batch have
        undefined values, which do not affect the rows of the batch.

        Args:
            grids: sizes of the images or frames, at most `max_patches` patches in all.
        """
        frames = [(height, width) for _, height, width in grids]
        if frames == self._frames:
            return
        self._frames = []  # stays empty if an error prevents some of the copies
        for buffer, found in zip(self._positions, self._cache.of(frames), strict=True):
            buffer[: len(found)] = found
        self._segments.set([height * width for height, width in frames])
        self._frames = frames


def batch_layout(cache: PositionCache, grids: Sequence[Grid]) -> VisionLayout:
    """Makes the layout of one batch."""
    frames = [(height, width) for _, height, width in grids]
    found = cache.of(frames)
    lengths = [height * width for height, width in frames]
    return VisionLayout(found, BatchSegments(lengths, found.cos.device))


def merge_block_order(height: int, width: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """Returns row and column of each patch in merge-block order, `[h * w]` int64 on the host."""
    index = torch.arange(height * width).view(
        height // merge_size, merge_size, width // merge_size, merge_size
    )
    index = index.transpose(1, 2).reshape(-1)
    return index // width, index % width


def interpolate(table: Tensor, height: int, width: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolates a square table bilinearly at patches of a grid. The corners of the grid are the
    corners of the table. Sums are computed in float32.

    Args:
        table: `[side * side, hidden]`.
        height: rows of the grid.
        width: columns of the grid.
        rows: row of each patch, `[n]`.
        columns: column of each patch, `[n]`.

    Returns:
        `[n, hidden]` with the table's device and data type.
    """
    side = round(table.shape[0] ** 0.5)
    low_row, high_row, row_part = _corners(rows, height, side)
    low_column, high_column, column_part = _corners(columns, width, side)
    corners = [
        (row * side + column, row_weight * column_weight)
        for row, row_weight in ((low_row, 1 - row_part), (high_row, row_part))
        for column, column_weight in ((low_column, 1 - column_part), (high_column, column_part))
    ]
    index = torch.stack([index for index, _ in corners]).to(table.device)  # [4, n]
    weight = torch.stack([weight for _, weight in corners]).to(table.device)
    out = torch.empty(len(rows), table.shape[1], dtype=table.dtype, device=table.device)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        values = table[index[:, part]] * weight[:, part, None]  # [4, rows, hidden] float32
        out[part] = values.sum(0)
    return out


def _corners(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the lines of the table before and after each position, and the float32 weight of the
    line after it.
    """
    at = index.float() * (side - 1) / max(size - 1, 1)
    low = at.floor().long().clamp(max=side - 1)
    return low, (low + 1).clamp(max=side - 1), at - low
