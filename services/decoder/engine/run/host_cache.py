"""Slots in the memory of the host for copies of KV blocks and of recurrent states.

`schedule.host_slots` assigns the slots. On a GPU, saves and loads have a stream and buffers each,
beside the main stream, which computes. A save gathers blocks in a buffer and copies that to slots,
both on the stream of saves. A load copies slots to one of two buffers on the stream of loads, and
the main stream scatters the buffer to blocks. The host never waits. What a stream waits for:

- A step's saves wait for all steps before it, which may still change the blocks.
- The main stream waits for the gathers of a step's saves before it loads blocks or computes. For
  the gathers of idle saves it waits before the next step, which may change those blocks. Therefore
  a block is never overwritten before it was gathered.
- A load waits only for saves to slots that the load reads. Therefore a slot is never read before
  its save is done.
- A step's saves wait for the loads of all steps before it, which the main stream has waited for.
  Within a step no slot is both written and read. Therefore a slot is never overwritten before it
  was read.
"""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from services.common.nn.pinned import pin, unpin
from services.decoder.engine.run.graphs import DeviceState
from services.decoder.engine.step import ComputeStep, Int64Array

# Sizes of the buffers for KV blocks on the device. The idle saves of a decode step should fit: with
# 32 rows these are 18 blocks (`schedule.host_slots`), 42 MB of an 8B model. A gather of more blocks
# waits for copies to the host, which take 1 ms for these bytes at 50 GB/s.
SAVE_BYTES = 48 << 20
LOAD_BYTES = 40 << 20  # of each of two
_BUFFERED_STATES = 1  # states are larger than blocks, and few are copied in a step
_FIRST = -1  # priority of the streams, whose kernels are short


def buffer_bytes(state_bytes: int) -> int:
    """Returns the most bytes that the buffers on a GPU take.

    Args:
        state_bytes: bytes of a recurrent state. 0 if the model has none.
    """
    return SAVE_BYTES + 2 * LOAD_BYTES + 3 * _BUFFERED_STATES * state_bytes


class HostCache:
    """The copies of a step. Each rank has the slots of its own heads.

    Args:
        state: the pools on the device.
        num_blocks: number of slots for KV blocks.
        num_states: number of slots for recurrent states.
    """

    def __init__(self, state: DeviceState, num_blocks: int, num_states: int) -> None:
        block_bytes = state.kv_cache[:, 0].nbytes
        counts = max(1, SAVE_BYTES // block_bytes), max(1, LOAD_BYTES // block_bytes)
        self._blocks = HostPool(state.kv_cache, num_blocks, *counts)
        self._states: list[tuple[HostPool, Tensor]] = []
        if num_states:
            saved, rows = state.checkpoints, state.states
            assert saved is not None and rows is not None
            self._states = [
                (HostPool(pool, num_states, _BUFFERED_STATES, _BUFFERED_STATES), of_rows)
                for pool, of_rows in ((saved.conv, rows.conv), (saved.recurrent, rows.recurrent))
            ]

    def copy(self, step: ComputeStep) -> None:
        """Copies what the step saves and loads, and the states from which rows start. Call this
        before anything of a step is launched, for each step.
        """
        self._blocks.begin_step()
        if step.block_saves is not None:
            self._blocks.save(step.block_saves)
        if step.block_loads is not None:
            self._blocks.load(step.block_loads)
        starts = [(s.row, -2 - s.checkpoint) for s in step.row_starts if s.checkpoint < -1]
        for pool, of_rows in self._states:
            pool.begin_step()
            if step.checkpoint_saves is not None:
                pool.save(step.checkpoint_saves)
            if starts:
                pool.load(np.array(starts, np.int64), of_rows)

    def save_idle(self, step: ComputeStep) -> None:
        """Makes the step's idle saves. Call this after `copy`, once the computation is launched,
        which would otherwise begin later.
        """
        if step.idle_block_saves is not None:
            self._blocks.save(step.idle_block_saves, idle=True)
        if step.idle_checkpoint_saves is not None:
            for pool, _ in self._states:
                pool.save(step.idle_checkpoint_saves, idle=True)


class HostPool:
    """Slots for copies of the blocks of a pool.

    Args:
        pool: `[num_layers, num_blocks, ...]` on the device that computes.
        num_slots: number of slots.
        num_saved: number of blocks that fit into the buffer for saves, on a GPU.
        num_loaded: number of blocks that fit into each of the two buffers for loads, on a GPU.
    """

    def __init__(self, pool: Tensor, num_slots: int, num_saved: int, num_loaded: int) -> None:
        self._pool = _by_block(pool)
        sizes = self._pool.shape[1:]
        pages = np.zeros(num_slots * sizes.numel(), np.int64)
        self._slots = torch.from_numpy(pages).view(num_slots, *sizes)
        self._streams = None
        if pool.is_cuda:
            self._streams = _Streams(self._pool, self._slots, num_saved, num_loaded)

    def begin_step(self) -> None:
        """Begins the copies of a step, before anything of it is launched."""
        if self._streams is not None:
            self._streams.begin_step()

    def save(self, copies: Int64Array, *, idle: bool = False) -> None:
        """Copies blocks to slots. Of a step, the saves that are not idle come before the loads.

        Args:
            copies: `[n, 2]`, block and slot.
            idle: True if no block is changed before the next call of `begin_step`.
        """
        blocks, slots = _columns(copies)
        if self._streams is None:
            _copy(self._pool, blocks, self._slots, slots)
        else:
            self._streams.save(blocks, slots, idle=idle)

    def load(self, copies: Int64Array, target: Tensor | None = None) -> None:
        """Copies slots to blocks.

        Args:
            copies: `[n, 2]`, block and slot.
            target: `[num_layers, num_blocks, ...]`, the pool of the blocks. Defaults to the pool
                from which the slots were saved.
        """
        blocks, slots = _columns(copies)
        pool = self._pool if target is None else _by_block(target)
        if self._streams is None:
            _copy(self._slots, slots, pool, blocks)
        else:
            self._streams.load(blocks, slots, pool)


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


class _Streams:
    """The streams and buffers of a GPU for copies between a pool and the slots.

    Args:
        pool: `[num_blocks, num_layers, words]`, from which blocks are saved.
        slots: `[num_slots, num_layers, words]` in the memory of the host, which is pinned here.
        num_saved: number of blocks that fit into the buffer for saves.
        num_loaded: number of blocks that fit into each of the two buffers for loads.
    """

    def __init__(self, pool: Tensor, slots: Tensor, num_saved: int, num_loaded: int) -> None:
        pin(slots)
        # CUDA keeps the pages of freed memory that is registered, and would copy to them what is
        # meant for new memory at their address.
        weakref.finalize(self, unpin, slots, pool.device).atexit = False
        self._pool, self._slots = pool, slots
        self._saved = pool.new_empty((num_saved, *slots.shape[1:]))
        self._loaded = pool.new_empty((2, num_loaded, *slots.shape[1:]))
        self._saves = torch.cuda.Stream(pool.device, _FIRST)
        self._loads = torch.cuda.Stream(pool.device, _FIRST)
        self._begun = torch.cuda.Event()  # when the main stream begins the step
        self._gathered = torch.cuda.Event()  # when the blocks of all saves are in the buffer
        self._copied = torch.cuda.Event()  # when a buffer has the blocks of a load
        self._scattered = torch.cuda.Event(), torch.cuda.Event()  # when each has been read
        # The last saves that may not be done: when they are done, and their slots.
        self._written: deque[tuple[torch.cuda.Event, set[int]]] = deque()

    def begin_step(self) -> None:
        """Lets the main stream wait until the idle saves of earlier steps have read their blocks,
        and marks the place in the main stream where the step begins.
        """
        main = torch.cuda.current_stream()
        main.wait_event(self._gathered)
        self._begun.record(main)

    def save(self, blocks: Tensor, slots: Tensor, *, idle: bool) -> None:
        """Copies blocks to slots. The ids are int64 on the host."""
        main, count = torch.cuda.current_stream(), len(self._saved)
        self._saves.wait_event(self._begun)
        with torch.cuda.stream(self._saves):
            for ids, targets in zip(blocks.split(count), slots.split(count), strict=True):
                buffer = self._saved[: len(ids)]
                torch.index_select(self._pool, 0, self._upload(ids), out=buffer)
                self._gathered.record(self._saves)
                for block, slot in zip(buffer, targets.tolist(), strict=True):
                    self._slots[slot].copy_(block, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._saves)
        while self._written and self._written[0][0].query():
            self._written.popleft()
        self._written.append((done, set(slots.tolist())))
        if not idle:
            main.wait_event(self._gathered)

    def load(self, blocks: Tensor, slots: Tensor, pool: Tensor) -> None:
        """Copies slots to blocks of a pool. The ids are int64 on the host."""
        main, count = torch.cuda.current_stream(), self._loaded.shape[1]
        for done, written in self._written:
            if not written.isdisjoint(slots.tolist()):
                self._loads.wait_event(done)
        parts = zip(blocks.split(count), slots.split(count), strict=True)
        for number, (ids, sources) in enumerate(parts):
            buffer, scattered = self._loaded[number % 2, : len(ids)], self._scattered[number % 2]
            self._loads.wait_event(scattered)
            with torch.cuda.stream(self._loads):
                for block, slot in zip(buffer, sources.tolist(), strict=True):
                    block.copy_(self._slots[slot], non_blocking=True)
            self._copied.record(self._loads)
            main.wait_event(self._copied)
            pool.index_copy_(0, self._upload(ids), buffer)
            scattered.record(main)

    def _upload(self, ids: Tensor) -> Tensor:
        return ids.pin_memory().to(self._pool.device, non_blocking=True)
