"""Segments of a packed batch, each of which attends to itself only: an image or a video frame.

An object describes the segments for every implementation of ragged attention. It has lengths on the
host, FlashAttention's `cu_seqlens` on the device, and a work list for kernels whose CTAs each
process a block of queries. A model's layout makes an object per batch, or an object with static
buffers per set of CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_SIZES = (64, 128)  # numbers of queries of a CTA for which there are work lists
_FIELDS = 4


@dataclass(frozen=True, slots=True)
class WorkList:
    """Work list of blocks of queries on the device.

    Attributes:
        items: `[1 + max_blocks, 4]` int32, from `list_work`.
        max_blocks: upper bound of `items[0, 0]`, from which the launch grid is computed.
    """

    items: Tensor
    max_blocks: int


class BatchSegments:
    """Segments of one batch. Data is copied to the device at its first use.

    Attributes:
        lengths: number of rows of each segment, in the order of the batch. All are positive. Rows
            after the last segment are padding, whose output is undefined.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self._device = device
        self._cu_seqlens: Tensor | None = None
        self._work: dict[int, WorkList] = {}

    @property
    def cu_seqlens(self) -> Tensor:
        """Start of each segment and end of the last: `[S + 1]` int32 on the device."""
        if self._cu_seqlens is None:
            self._cu_seqlens = self._upload(_cumulate(self.lengths))
        return self._cu_seqlens

    def max_length(self, num_rows: int) -> int:
        """Largest number of rows that a segment has in a batch of `num_rows` rows."""
        return max(self.lengths)

    def work_list(self, block_size: int, num_rows: int) -> WorkList:
        """Work list with blocks of `block_size` queries, which is one of `BLOCK_SIZES`."""
        found = self._work.get(block_size)
        if found is None:
            items = list_work(self.lengths, block_size)
            found = WorkList(self._upload(items), len(items) - 1)
            self._work[block_size] = found
        return found

    def _upload(self, values: npt.NDArray[np.int32]) -> Tensor:
        host = torch.from_numpy(values)
        if self._device.type != "cuda":
            return host.to(self._device)
        return host.pin_memory().to(self._device, non_blocking=True)


class StaticSegments:
    """Segments in static buffers of CUDA graphs, which are set before each replay.

    A batch with fewer than `max_segments` segments has empty segments at its end.
    """

    def __init__(self, max_rows: int, max_segments: int, device: torch.device) -> None:
        self.lengths: Sequence[int] = ()
        self._max_segments = max_segments
        pinned = device.type == "cuda"
        # A single buffer, so that one copy sets cu_seqlens and the work lists. Each of them is
        # aligned to 16 bytes for the kernels.
        sizes = [_aligned(max_segments + 1)]
        sizes += [
            _FIELDS * (1 + count_blocks(max_rows, max_segments, size)) for size in BLOCK_SIZES
        ]
        self._device_buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host_buffer = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._views = self._device_buffer.split(sizes)
        self._host_views = [view.numpy() for view in self._host_buffer.split(sizes)]
        self._copied = torch.cuda.Event() if pinned else None

    @property
    def cu_seqlens(self) -> Tensor:
        return self._views[0][: self._max_segments + 1]

    def max_length(self, num_rows: int) -> int:
        return num_rows

    def work_list(self, block_size: int, num_rows: int) -> WorkList:
        """Work list for a graph of `num_rows` rows. All graphs share the buffer."""
        items = self._views[1 + BLOCK_SIZES.index(block_size)].view(-1, _FIELDS)
        return WorkList(items, count_blocks(num_rows, self._max_segments, block_size))

    def set(self, lengths: Sequence[int]) -> None:
        """Enqueues the copy for a batch.

        Waits until the previous copy has ended, because both use the same host buffer. The device
        copies before it runs the previous batch, so with two batches in flight it has long ended.
        """
        assert len(lengths) <= self._max_segments
        if self._copied is not None:
            self._copied.synchronize()
        cu_seqlens, *work = self._host_views
        ends = _cumulate(lengths)
        cu_seqlens[: len(ends)] = ends
        cu_seqlens[len(ends) :] = ends[-1]
        for size, host in zip(BLOCK_SIZES, work, strict=True):
            items = list_work(lengths, size).reshape(-1)
            host[: len(items)] = items
        self._device_buffer.copy_(self._host_buffer, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.lengths = lengths


Segments = BatchSegments | StaticSegments


def count_blocks(num_rows: int, num_segments: int, block_size: int) -> int:
    """Largest number of blocks that `num_rows` rows in `num_segments` segments can have."""
    return -(-num_rows // block_size) + num_segments - 1


def list_work(lengths: Sequence[int], block_size: int) -> npt.NDArray[np.int32]:
    """Makes a work list of blocks of queries, `[1 + blocks, 4]`.

    Row 0 has the number of blocks. Each further row has a block's first row and number of rows, and
    the begin and the end of the block's segment.
    """
    sizes = np.asarray(lengths)
    ends = sizes.cumsum()
    counts = -(-sizes // block_size)
    segment = np.repeat(np.arange(len(sizes)), counts)
    index = np.arange(len(segment)) - np.repeat(counts.cumsum() - counts, counts)
    before = index * block_size  # rows of the segment before the block
    begin, end = (ends - sizes)[segment], ends[segment]
    items = np.zeros((1 + len(segment), _FIELDS), np.int32)
    items[0, 0] = len(segment)
    fields = (begin + before, np.minimum(sizes[segment] - before, block_size), begin, end)
    for column, values in enumerate(fields):
        items[1:, column] = values
    return items


def _cumulate(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _aligned(size: int) -> int:
    return -(-size // _FIELDS) * _FIELDS
