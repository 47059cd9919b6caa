"""Slots in the memory of the host for copies of KV blocks and of recurrent states.

`schedule.host_slots` assigns the slots. On a GPU the copies to and from the host run on a stream of
their own, beside the computation. The stream of the computation only moves blocks between a pool
and a buffer on the device. It waits for the other stream before it overwrites the buffer, or reads
blocks from it. The host never waits.
"""

import weakref

import numpy as np
import torch
from torch import Tensor

from services.common.nn.pinned import pin, unpin
from services.decoder.engine.run.graphs import DeviceState
from services.decoder.engine.step import ComputeStep, Int64Array

# Size of the buffer for KV blocks on the device. Copies of more blocks wait for each other.
BUFFER_BYTES = 128 << 20
_BUFFERED_STATES = 2  # states are larger than blocks, and few are copied in a step


def buffer_bytes(state_bytes: int) -> int:
    """Returns the most bytes that the buffers on a GPU take.

    Args:
        state_bytes: bytes of a recurrent state. 0 if the model has none.
    """
    return BUFFER_BYTES + _BUFFERED_STATES * state_bytes


class HostCache:
    """The copies of a step. Each rank has the slots of its own heads.

    Args:
        state: the pools on the device.
        num_blocks: number of slots for KV blocks.
        num_states: number of slots for recurrent states.
    """

    def __init__(self, state: DeviceState, num_blocks: int, num_states: int) -> None:
        block_bytes = state.kv_cache[:, 0].nbytes
        self._blocks = HostPool(state.kv_cache, num_blocks, max(1, BUFFER_BYTES // block_bytes))
        self._states: list[tuple[HostPool, Tensor]] = []
        if num_states:
            saved, rows = state.checkpoints, state.states
            assert saved is not None and rows is not None
            self._states = [
                (HostPool(pool, num_states, _BUFFERED_STATES), of_rows)
                for pool, of_rows in ((saved.conv, rows.conv), (saved.recurrent, rows.recurrent))
            ]

    def copy(self, step: ComputeStep) -> None:
        """Copies what the step saves and loads, and the states from which rows start."""
        if step.block_saves is not None:
            self._blocks.save(step.block_saves)
        if step.block_loads is not None:
            self._blocks.load(step.block_loads)
        starts = [(s.row, -2 - s.checkpoint) for s in step.row_starts if s.checkpoint < -1]
        for pool, of_rows in self._states:
            if step.checkpoint_saves is not None:
                pool.save(step.checkpoint_saves)
            if starts:
                pool.load(np.array(starts, np.int64), of_rows)


class HostPool:
    """Slots for copies of the blocks of a pool.

    Args:
        pool: `[num_layers, num_blocks, ...]` on the device that computes.
        num_slots: number of slots.
        num_buffered: number of blocks that fit into the buffer, on a GPU.
    """

    def __init__(self, pool: Tensor, num_slots: int, num_buffered: int) -> None:
        self._pool = _by_block(pool)
        sizes = self._pool.shape[1:]
        pages = np.zeros(num_slots * sizes.numel(), np.int64)
        self._slots = torch.from_numpy(pages).view(num_slots, *sizes)
        self._buffer = None
        if pool.is_cuda:
            self._buffer = _DeviceBuffer(self._pool, self._slots, num_buffered)

    def save(self, copies: Int64Array) -> None:
        """Copies blocks to slots.

        Args:
            copies: `[n, 2]`, block and slot.
        """
        blocks, slots = _columns(copies)
        if self._buffer is None:
            _copy(self._pool, blocks, self._slots, slots)
        else:
            self._buffer.save(blocks, slots)

    def load(self, copies: Int64Array, target: Tensor | None = None) -> None:
        """Copies slots to blocks.

        Args:
            copies: `[n, 2]`, block and slot.
            target: `[num_layers, num_blocks, ...]`, the pool of the blocks. Defaults to the pool
                from which the slots were saved.
        """
        blocks, slots = _columns(copies)
        pool = self._pool if target is None else _by_block(target)
        if self._buffer is None:
            _copy(self._slots, slots, pool, blocks)
        else:
            self._buffer.load(blocks, slots, pool)


def _copy(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> None:
    """Copies rows of a tensor in the host's memory to rows of a second tensor. Indexing would first
    gather the rows in new memory, whose pages cost more time than the copies.
    """
    for row, place in zip(sources.tolist(), targets.tolist(), strict=True):
        target[place].copy_(source[row])


def _columns(copies: Int64Array) -> tuple[Tensor, ...]:
    """Returns the two columns. They are contiguous: the host would wait for the upload of others,
    because torch copies those to memory that is not pinned first.
    """
    return torch.from_numpy(copies.T.copy()).unbind(0)


def _by_block(pool: Tensor) -> Tensor:
    """Returns a view `[num_blocks, num_layers, words]`. A word has 8 bytes, whatever the dtype."""
    words = pool.view(*pool.shape[:2], -1).view(torch.int64)
    return words.transpose(0, 1)


class _DeviceBuffer:
    """The way of blocks between a GPU and the slots.

    Args:
        pool: `[num_blocks, num_layers, words]`, from which blocks are saved.
        slots: `[num_slots, num_layers, words]` in the memory of the host, which is pinned here.
        count: number of blocks that fit into the buffer.
    """

    def __init__(self, pool: Tensor, slots: Tensor, count: int) -> None:
        pin(slots)
        # CUDA keeps the pages of freed memory that is registered, and would copy to them what is
        # meant for new memory at their address.
        weakref.finalize(self, unpin, slots, pool.device).atexit = False
        self._pool, self._slots, self._count = pool, slots, count
        self._buffer = pool.new_empty((count, *slots.shape[1:]))
        self._stream = torch.cuda.Stream(pool.device)
        self._moved = torch.cuda.Event()  # when the main stream has last used the buffer

    def save(self, blocks: Tensor, slots: Tensor) -> None:
        """Copies blocks to slots. The ids are int64 on the host."""
        main = torch.cuda.current_stream()
        for ids, targets in zip(blocks.split(self._count), slots.split(self._count), strict=True):
            buffer = self._buffer[: len(ids)]
            main.wait_stream(self._stream)
            torch.index_select(self._pool, 0, self._upload(ids), out=buffer)
            self._moved.record(main)
            self._stream.wait_event(self._moved)
            with torch.cuda.stream(self._stream):
                for block, slot in zip(buffer, targets.tolist(), strict=True):
                    self._slots[slot].copy_(block, non_blocking=True)

    def load(self, blocks: Tensor, slots: Tensor, pool: Tensor) -> None:
        """Copies slots to blocks of a pool. The ids are int64 on the host."""
        main = torch.cuda.current_stream()
        for ids, sources in zip(blocks.split(self._count), slots.split(self._count), strict=True):
            buffer = self._buffer[: len(ids)]
            self._stream.wait_event(self._moved)
            with torch.cuda.stream(self._stream):
                for block, slot in zip(buffer, sources.tolist(), strict=True):
                    block.copy_(self._slots[slot], non_blocking=True)
            main.wait_stream(self._stream)
            pool.index_copy_(0, self._upload(ids), buffer)
            self._moved.record(main)

    def _upload(self, ids: Tensor) -> Tensor:
        return ids.pin_memory().to(self._pool.device, non_blocking=True)
