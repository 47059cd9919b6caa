"""The segments of a packed batch: an image, or one frame of a video, each attends to itself only.

One object describes them for every implementation of ragged attention: lengths on the host,
`cu_seqlens` on the device (FlashAttention's word), and a list of the work for kernels whose CTAs
take one block of queries each. A model's layout creates one per batch, or one in static buffers per
set of CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_SIZES = (64, 128)  # queries of a CTA, for which there are lists of the work
_FIELDS = 4


@dataclass(frozen=True, slots=True)
class WorkList:
    """Blocks of queries on the device.

    Attributes:
        items: `[1 + max_blocks, 4]` int32, see `list_work`.
        max_blocks: upper bound of `items[0, 0]`, for the launch grid.
    """

    items: Tensor
    max_blocks: int


class BatchSegments:
    """The segments of one batch. Copies to the device start at the first use of each.

    Attributes:
        lengths: rows of each segment, in the order they are packed; all positive. Rows behind the
            last segment belong to none; their output is undefined.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self._device = device
        self._cu_seqlens: Tensor | None = None
        self._work: dict[int, WorkList] = {}

    @property
    def cu_seqlens(self) -> Tensor:
        """`[S + 1]` int32 on the device: where each segment begins; segments may be empty."""
        if self._cu_seqlens is None:
            self._cu_seqlens = self._upload(_cumulate(self.lengths))
        return self._cu_seqlens

    def max_length(self, num_rows: int) -> int:
        """Upper bound of a segment's rows in a batch of `num_rows`."""
        return max(self.lengths)

    def work_list(self, block_size: int, num_rows: int) -> WorkList:
        """Blocks of `block_size` queries (of `BLOCK_SIZES`) for a batch of `num_rows`."""
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
    """Static buffers of a CUDA graph: captured once, set before each replay."""

    def __init__(self, max_rows: int, max_segments: int, device: torch.device) -> None:
        self.lengths: Sequence[int] = ()
        self._max_segments = max_segments
        pinned = device.type == "cuda"
        # One buffer, so that one copy sets all: cu_seqlens, then the lists of the work, each
        # 16-byte aligned for the kernels.
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
        """The list for a graph of `num_rows`; the buffer is the same for all graphs."""
        items = self._views[1 + BLOCK_SIZES.index(block_size)].view(-1, _FIELDS)
        return WorkList(items, count_blocks(num_rows, self._max_segments, block_size))

    def set(self, lengths: Sequence[int]) -> None:
        """Enqueues the copy for a batch. Waits for the copy before it, which the device does before
        that copy's batch: with two batches in flight it is long done.
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
    """The most blocks that `num_rows` in `num_segments` segments can have."""
    return -(-num_rows // block_size) + num_segments - 1


def list_work(lengths: Sequence[int], block_size: int) -> npt.NDArray[np.int32]:
    """Blocks of queries, `[1 + blocks, 4]`.

    Row 0 holds the number of blocks; each other row a block's first row, its number of rows, and
    the begin and end of its segment.
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
