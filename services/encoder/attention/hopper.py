"""Attention by a kernel of our own, for Hopper and heads of 64.

The work is a list on the device, so that a CUDA graph serves any segments: blocks of up to 128
queries, or 64 where that would leave processors idle, each of whose heads is a program's. What a
program does is in `services.encoder.kernels.segment_kernel`.
"""

# pyright: reportIndexIssue=false, reportCallIssue=false
# (of how a kernel is launched)

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.common.nn import launches
from services.encoder.kernels.segment_kernel import segment_kernel

HEAD_DIM = 64
_BLOCK, _SMALL_BLOCK = 128, 64  # queries
_KEYS = 64  # that go together
_WARPS = 4  # that multiply together; two programs share a processor
_TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LOG2_E = 1.4426950408889634


class HopperAttention:
    """One kernel for all segments, whatever their lengths."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        assert head_dim == HEAD_DIM
        self._num_heads = num_heads
        # For up to so many rows, programs with large blocks would be fewer than processors.
        self.few_rows = launches.PROCESSORS // num_heads * _BLOCK

    def plan(self, lengths: Sequence[int], device: torch.device) -> "_Plan":
        """The list of the work, on its way to the device."""
        block = self.block_for(sum(lengths))
        items = torch.from_numpy(list_items(lengths, block)).pin_memory()
        return _Plan(items.to(device, non_blocking=True), len(items) - 1, block)

    def lasting_plan(
        self, max_rows: int, max_segments: int, device: torch.device
    ) -> "_LastingPlan":
        """See `AttentionBackend.lasting_plan`."""
        return _LastingPlan(self, max_rows, max_segments, device)

    def block_for(self, num_rows: int) -> int:
        """How many queries a block has."""
        return _SMALL_BLOCK if num_rows <= self.few_rows else _BLOCK

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: "_Plan | _LastingPlan"
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if isinstance(plan, _LastingPlan):
            plan = plan.of(len(query))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        segment_kernel[(plan.num_blocks * self._num_heads,)](
            _tiles(query, plan.block), _tiles(key, _KEYS), _tiles(value, _KEYS), plan.items, out,
            HEAD_DIM**-0.5 * _LOG2_E,
            HEADS=self._num_heads, DIM=HEAD_DIM, BLOCK=plan.block, num_warps=_WARPS,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """A list of the work, how many blocks it has at most, and of how many queries."""

    items: Tensor
    num_blocks: int
    block: int


class _LastingPlan:
    """See `LastingPlan`. A list for each size of a block: a graph takes the one for its rows."""

    def __init__(
        self, backend: HopperAttention, max_rows: int, max_segments: int, device: torch.device
    ) -> None:
        self._backend = backend
        self._max_segments = max_segments
        self._items: dict[int, Tensor] = {}  # by size of a block
        self._host: dict[int, Tensor] = {}
        for block, rows in ((_BLOCK, max_rows), (_SMALL_BLOCK, backend.few_rows)):
            shape = 1 + count_blocks(rows, max_segments, block), 4
            self._items[block] = torch.zeros(shape, dtype=torch.int32, device=device)
            self._host[block] = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()

    def of(self, num_rows: int) -> _Plan:
        """For a graph of so many rows."""
        block = self._backend.block_for(num_rows)
        most = count_blocks(num_rows, self._max_segments, block)
        return _Plan(self._items[block], most, block)

    def set(self, lengths: Sequence[int]) -> None:
        """Waits for the copies of the lists before, which the device does before its batch: long
        ago, where at most two batches are launched.
        """
        self._copied.synchronize()
        # Few rows may also be replayed by a graph of many.
        for block in {_BLOCK, self._backend.block_for(sum(lengths))}:
            items = torch.from_numpy(list_items(lengths, block))
            host = self._host[block][: len(items)]
            host.copy_(items)
            self._items[block][: len(items)].copy_(host, non_blocking=True)
        self._copied.record()


def count_blocks(num_rows: int, num_segments: int, block: int) -> int:
    """The most blocks of so many rows in so many segments."""
    return -(-num_rows // block) + num_segments - 1


def list_items(lengths: Sequence[int], block: int) -> npt.NDArray[np.int32]:
    """The work, `[1 + blocks, 4]`: first how many blocks there are, and then of each block its
    first row, how many it has, and where its segment begins and ends.
    """
    sizes = np.asarray(lengths)
    ends = sizes.cumsum()
    counts = -(-sizes // block)
    segment = np.repeat(np.arange(len(sizes)), counts)
    before = (np.arange(len(segment)) - np.repeat(counts.cumsum() - counts, counts)) * block
    begin, end = (ends - sizes)[segment], ends[segment]
    items = np.zeros((1 + len(segment), 4), np.int32)
    items[0, 0] = len(segment)
    fields = (begin + before, np.minimum(sizes[segment] - before, block), begin, end)
    for column, values in enumerate(fields):
        items[1:, column] = values
    return items


def _tiles(rows: Tensor, count: int) -> TensorDescriptor:
    """`[N, heads, head_dim]`, heads side by side, as tiles of so many rows of one head."""
    flat = rows.flatten(1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [count, HEAD_DIM], _TILE)
