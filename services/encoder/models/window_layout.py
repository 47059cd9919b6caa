"""The layout of a batch for a tower whose blocks attend within windows.

A window is a square of image tokens. The windows of an image form a grid; at the right and the
lower edge they may be smaller. The patches of a batch are reordered once, so that those of a window
are neighbouring rows. Then attention within windows is ragged attention with more segments, and
attention within whole images has the segments that it would have without the reordering.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.segments import BatchSegments, StaticSegments
from services.common.geometry import Grid
from services.encoder.models.positions import GridPositions, PositionCache, VisionLayout

Int64s = npt.NDArray[np.int64]


class WindowLayout(NamedTuple):
    """The layout of a batch.

    Attributes:
        images: positions of the reordered patches, with a segment for each image or frame.
        windows: the same positions, with a segment for each window.
        order: index of the image token that each place of the new order holds, `[num_tokens]`.
        inverse: place of each image token in the new order, `[num_tokens]`.
    """

    images: VisionLayout
    windows: VisionLayout
    order: Tensor
    inverse: Tensor


class Windows(NamedTuple):
    """The windows of a batch on the host.

    Attributes:
        order: see `WindowLayout`.
        lengths: number of patches of each window, in the new order.
    """

    order: Int64s
    lengths: list[int]


@functools.lru_cache(maxsize=4096)
def windows_of(height: int, width: int, side: int, merge_size: int) -> Windows:
    """Returns the windows of one image.

    Args:
        height, width: size of the image in patches.
        side: side of a window in tokens.
        merge_size: side of a token in patches.
    """
    rows, columns = height // merge_size, width // merge_size
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    order = np.argsort(window, kind="stable")
    lengths = np.bincount(window) * merge_size**2
    return Windows(order, lengths.tolist())


def windows_of_batch(grids: Sequence[Grid], side: int, merge_size: int) -> Windows:
    """Returns the windows of all images of a batch."""
    found = [windows_of(height, width, side, merge_size) for _, height, width in grids]
    starts = np.cumsum([0, *(len(each.order) for each in found)]).tolist()
    order = [each.order + start for each, start in zip(found, starts, strict=False)]
    return Windows(np.concatenate(order), [n for each in found for n in each.lengths])


def most_windows(num_patches: int, num_images: int, side: int, merge_size: int) -> int:
    """Returns an upper bound of the number of windows of images with `num_patches` in all.

    An image of one row of tokens has the most windows for its patches: one for each `side` tokens.
    """
    return num_patches // (merge_size**2 * side) + num_images


def batch_layout(cache: PositionCache, grids: Sequence[Grid], side: int) -> WindowLayout:
    """Makes the layout of one batch.

    Args:
        cache: cache of positions in merge-block order.
        grids: size (t, h, w) of each unit in patches.
        side: side of a window in tokens.
    """
    frames = [(height, width) for _, height, width in grids]
    windows = windows_of_batch(grids, side, cache.merge_size)
    found = cache.of(frames)
    device = found.cos.device
    order = _upload(windows.order, device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=device)
    positions = _reordered(found, order, cache.merge_size)
    images = BatchSegments([height * width for height, width in frames], device)
    return WindowLayout(
        VisionLayout(positions, images),
        VisionLayout(positions, BatchSegments(windows.lengths, device)),
        order,
        inverse,
    )


class StaticWindowLayout:
    """A layout in static buffers, which CUDA graphs read, see `positions.StaticLayout`.

    Args:
        cache: cache of positions.
        max_patches: most patches of a batch.
        max_segments: most images or frames of a batch.
        side: side of a window in tokens.
    """

    def __init__(
        self, cache: PositionCache, max_patches: int, max_segments: int, side: int
    ) -> None:
        self._cache, self._side = cache, side
        self._grids: list[Grid] = []  # grids of the batch that was set last
        merge = cache.merge_size
        one = cache.of([(merge, merge)])
        device = one.cos.device
        self._positions = GridPositions(*(x.new_zeros(max_patches, x.shape[1]) for x in one))
        self._images = StaticSegments(max_patches, max_segments, device)
        num_windows = most_windows(max_patches, max_segments, side, merge)
        self._windows = StaticSegments(max_patches, num_windows, device)
        # Places after the batch hold tokens of the padding.
        self._order = torch.arange(max_patches // merge**2, device=device)
        self._inverse = self._order.clone()
        self._places = self._order.clone()

    def rows(self, num_patches: int) -> WindowLayout:
        """Returns the layout of a graph of `num_patches` rows, as views of the buffers."""
        num_tokens = num_patches // self._cache.merge_size**2
        positions = GridPositions(*(buffer[:num_patches] for buffer in self._positions))
        return WindowLayout(
            VisionLayout(positions, self._images),
            VisionLayout(positions, self._windows),
            self._order[:num_tokens],
            self._inverse[:num_tokens],
        )

    def set(self, grids: Sequence[Grid]) -> None:
        """Enqueues the copies of a batch's layout into the buffers.

        Args:
            grids: sizes of the images or frames, at most `max_patches` patches in all.
        """
        if list(grids) == self._grids:
            return
        self._grids = []  # stays empty if an error prevents some of the copies
        merge = self._cache.merge_size
        windows = windows_of_batch(grids, self._side, merge)
        found = self._cache.of([(height, width) for _, height, width in grids])
        order = _upload(windows.order, found.cos.device)
        count = len(order)
        self._order.copy_(self._places)
        self._inverse.copy_(self._places)
        self._order[:count] = order
        self._inverse[order] = self._places[:count]
        for buffer, part in zip(self._positions, _reordered(found, order, merge), strict=True):
            buffer[: len(part)] = part
        self._images.set([height * width for _, height, width in grids])
        self._windows.set(windows.lengths)
        self._grids = list(grids)


def reorder(rows: Tensor, order: Tensor, merge_size: int) -> Tensor:
    """Brings the patches `[N, columns]` of tokens into another order of the tokens."""
    return rows.unflatten(0, (len(order), merge_size**2))[order].flatten(0, 1)


def _reordered(positions: GridPositions, order: Tensor, merge_size: int) -> GridPositions:
    return GridPositions(*(reorder(each, order, merge_size) for each in positions))


def _upload(values: Int64s, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
