"""Slots in the memory of the host for copies of KV blocks; `schedule.host_blocks` assigns them.

On a GPU the copies to and from the host run on a stream of their own, beside the computation. The
stream of the computation only moves blocks between the pool and a buffer on the device. It waits
for the other stream before it overwrites the buffer, or reads blocks from it. The host never waits.
"""

import numpy as np
import torch
from torch import Tensor

from services.common.nn.pinned import pin
from services.decoder.engine.step import Int64Array

# Size of the buffer on the device. Copies of more blocks than it has room for wait for each other.
BUFFER_BYTES = 128 << 20


class HostCache:
    """Copies blocks between the pool and the slots. Each rank has the slots of its own heads.

    Args:
        pool: the pool of keys and values, `[num_layers, num_blocks, ...]`.
        num_slots: number of slots.
    """

    def __init__(self, pool: Tensor, num_slots: int) -> None:
        num_layers, num_blocks = pool.shape[:2]
        # Elements are copied as integers of 8 bytes, whatever their type is.
        words = pool.view(num_layers, num_blocks, -1).view(torch.int64)
        self._blocks = words.transpose(0, 1)  # [num_blocks, num_layers, words]
        sizes = num_layers, words.shape[2]
        pages = np.zeros(num_slots * sizes[0] * sizes[1], np.int64)
        self._slots = torch.from_numpy(pages).view(num_slots, *sizes)
        self._device = _DeviceBuffer(self._blocks, self._slots) if pool.is_cuda else None

    def copy(self, saves: Int64Array | None, loads: Int64Array | None) -> None:
        """Copies blocks to slots, and then slots to blocks.

        Args:
            saves: `ComputeStep.block_saves`.
            loads: `ComputeStep.block_loads`.
        """
        if saves is not None:
            blocks, slots = torch.from_numpy(saves.copy()).unbind(1)
            if self._device is None:
                self._slots[slots] = self._blocks[blocks]
            else:
                self._device.save(blocks, slots)
        if loads is not None:
            blocks, slots = torch.from_numpy(loads.copy()).unbind(1)
            if self._device is None:
                self._blocks[blocks] = self._slots[slots]
            else:
                self._device.load(blocks, slots)


class _DeviceBuffer:
    """The way of blocks between a GPU and the slots.

    Args:
        blocks: `[num_blocks, num_layers, words]`, the pool.
        slots: `[num_slots, num_layers, words]` in the memory of the host, which is pinned here.
    """

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        pin(slots)
        self._blocks, self._slots = blocks, slots
        self._count = max(1, BUFFER_BYTES // slots[0].nbytes)
        self._buffer = blocks.new_empty((self._count, *slots.shape[1:]))
        self._stream = torch.cuda.Stream(blocks.device)
        self._moved = torch.cuda.Event()  # when the main stream has last used the buffer

    def save(self, blocks: Tensor, slots: Tensor) -> None:
        """Copies blocks to slots. The ids are int64 on the host."""
        main = torch.cuda.current_stream()
        for ids, targets in zip(blocks.split(self._count), slots.split(self._count), strict=True):
            buffer = self._buffer[: len(ids)]
            main.wait_stream(self._stream)
            torch.index_select(self._blocks, 0, self._upload(ids), out=buffer)
            self._moved.record(main)
            self._stream.wait_event(self._moved)
            with torch.cuda.stream(self._stream):
                for block, slot in zip(buffer, targets.tolist(), strict=True):
                    self._slots[slot].copy_(block, non_blocking=True)

    def load(self, blocks: Tensor, slots: Tensor) -> None:
        """Copies slots to blocks. The ids are int64 on the host."""
        main = torch.cuda.current_stream()
        for ids, sources in zip(blocks.split(self._count), slots.split(self._count), strict=True):
            buffer = self._buffer[: len(ids)]
            self._stream.wait_event(self._moved)
            with torch.cuda.stream(self._stream):
                for block, slot in zip(buffer, sources.tolist(), strict=True):
                    block.copy_(self._slots[slot], non_blocking=True)
            main.wait_stream(self._stream)
            self._blocks.index_copy_(0, self._upload(ids), buffer)
            self._moved.record(main)

    def _upload(self, ids: Tensor) -> Tensor:
        return ids.pin_memory().to(self._blocks.device, non_blocking=True)
