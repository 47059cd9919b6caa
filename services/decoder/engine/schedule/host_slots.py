"""Slots in the memory of the host for KV blocks and recurrent states. Pure Python.

A cached block is lost when it is given to another sequence for new contents, and so is a checkpoint
of a recurrent state. With slots on the host, the block is copied to a slot before. A later prompt
with the same prefix finds the slot and takes a new block, and the step that computes the prompt
first copies the slot to that block.

There are two kinds of saves. When the last owner of a cached block ends, the block is offered, and
a later step copies the block beside the step's computation (an idle save). A step makes a bounded
number of idle saves, so many offers take several steps. They wait while no step is launched. If an
offered block is given away before its turn, the step that changes the block copies it first.

Within a step, the saves of changed blocks come first, then the loads, then the computation with the
idle saves. The block of an idle save is not changed before the next step. A slot can be read by the
steps after the save. `run.host_cache` keeps this order on the device, and the scheduler waits for
no copy.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from services.decoder.engine.step import Int64Array, Step

# Idle saves of a step, besides one for each block that its tokens would fill. A block of a dense 8B
# model has 2.4 MB, so 16 take 0.8 ms at 50 GB/s and a decode step 5 ms. Larger models have larger
# blocks and longer steps. To compute a block's tokens takes several times as long as to copy it.
_IDLE_SAVES = 16
# The same for checkpoints. A state has some 50 MB, and a prompt yields one or two.
_IDLE_STATE_SAVES = 1


class HostSlots:
    """Owner of the slots; a new copy replaces the least recently used one.

    A copy is named by the hash of its block, or of the block at whose end the state is. Among ids
    of blocks or checkpoints, `-1 - slot` stands for a copy.

    Args:
        num_slots: number of slots. 0 if there is no host cache.
        num_on_device: number of blocks or checkpoints on the device. Nothing is offered if it is
            not below `num_slots`: the slots would hold what the device still has, instead of what
            it has lost.

    Attributes:
        slot_of: slot of each copy by its name, least recently used first.
        saves: copies that the next launched step makes before all else: slot by id of the block or
            checkpoint.
        loads: copies that it makes next: slot by id of the block.
        idle_saves: copies beside the computation of that step, which does not change their blocks:
            slot by id of the block or checkpoint.
        offered: ids of blocks or checkpoints that wait for an idle save, by name, in order.
        free: slots without a copy.
        saving: slots of `saves` and `idle_saves`.
        dropped: slots that are free when the next step is launched.
        num_saved: number of saves so far.
        num_loaded: number of loads so far.
    """

    def __init__(self, num_slots: int = 0, num_on_device: int = 0) -> None:
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self.saves: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self.idle_saves: dict[int, int] = {}
        self.offered: OrderedDict[bytes, int] = OrderedDict()
        self._takes_offers = num_slots > num_on_device
        self.num_saved = 0
        self.num_loaded = 0
        self.free = list(range(num_slots - 1, -1, -1))
        self.saving: set[int] = set()
        self._claimed: set[int] = set()  # slots that the next step reads
        self.dropped: list[int] = []

    def find(self, block_hash: bytes) -> int | None:
        """Returns the id of a copy that can be loaded in the next step, or None.

        A copy that the next step is yet to save is not found. If the launch of that step fails, the
        copy is undefined, and no sequence may depend on it by then.
        """
        slot = self.slot_of.get(block_hash)
        return None if slot is None or slot in self.saving else -1 - slot

    def claim(self, ids: Iterable[int]) -> None:
        """Keeps the copies among the ids until the next step is launched."""
        self._claimed.update([-1 - number for number in ids if number < 0])

    def use(self, block_hash: bytes) -> int:
        """Returns the id of a copy that was found, and keeps it until the next step is launched."""
        self.slot_of.move_to_end(block_hash)
        number = -1 - self.slot_of[block_hash]
        self.claim([number])
        return number

    def load(self, block_hash: bytes, block: int) -> None:
        """Plans to copy a claimed slot to a block."""
        self.slot_of.move_to_end(block_hash)
        self.loads[block] = self.slot_of[block_hash]

    def offer(self, block_hash: bytes, number: int) -> None:
        """Notes that a block or checkpoint may be copied in any later step. Its contents are final
        when the next step begins, and stay until `save` or `drop` is called.
        """
        if self._takes_offers and block_hash not in self.slot_of:
            self.offered[block_hash] = number

    def plan_idle_saves(self, most: int) -> None:
        """Plans to copy what was offered first, so that the next step makes up to `most` idle
        saves. Call this when it is known which blocks and checkpoints the step changes.
        """
        while self.offered and len(self.idle_saves) < most:
            block_hash, number = self.offered.popitem(last=False)
            self._save(block_hash, number, self.idle_saves)

    def save(self, block_hash: bytes, number: int) -> None:
        """Plans to copy what may get new contents in the next step.

        Nothing is copied if there is a copy already, if the next step uses all slots, or if it is
        yet to load the contents.

        Args:
            block_hash: name of the copy.
            number: id of the block or of the checkpoint.
        """
        self.offered.pop(block_hash, None)
        # A step that was planned with an idle save is planned again if messages arrive before its
        # launch, and may now change the block.
        if (slot := self.idle_saves.pop(number, None)) is not None:
            self.saves[number] = slot
        self._save(block_hash, number, self.saves)

    def _save(self, block_hash: bytes, number: int, saves: dict[int, int]) -> None:
        if block_hash in self.slot_of:
            self.slot_of.move_to_end(block_hash)
        elif number not in self.loads and (self.free or self._evict()):
            slot = self.slot_of[block_hash] = saves[number] = self.free.pop()
            self.saving.add(slot)

    def drop(self, block_hash: bytes) -> None:
        """Forgets a copy or an offer, because the contents are wrong."""
        self.offered.pop(block_hash, None)
        if (slot := self.slot_of.pop(block_hash, None)) is not None:
            self.dropped.append(slot)

    def close(self) -> None:
        """Takes the slots out of use, before anything was copied."""
        self.free.clear()
        self._takes_offers = False

    def clear(self) -> None:
        """Forgets all copies and offers. Planned loads are made all the same."""
        self.offered.clear()
        for block_hash in list(self.slot_of):
            self.drop(block_hash)

    def copies(self) -> tuple[Int64Array | None, Int64Array | None, Int64Array | None]:
        """Returns the planned saves, loads and idle saves, `[n, 2]`: id, slot. None if there are
        none.
        """
        return _pairs(self.saves), _pairs(self.loads), _pairs(self.idle_saves)

    def launched(self) -> None:
        """Notes that a step with the planned copies was launched."""
        self.num_saved += len(self.saves) + len(self.idle_saves)
        self.num_loaded += len(self.loads)
        for planned in (self.saves, self.loads, self.idle_saves, self.saving, self._claimed):
            planned.clear()
        self.free += self.dropped
        self.dropped = []

    def failed(self) -> None:
        """Notes that the launch of a step with the planned copies has failed.

        The step may have changed what it was to save first, so these copies are forgotten. The next
        step makes the loads once more.
        """
        for block_hash in [name for name, slot in self.slot_of.items() if slot in self.saving]:
            self.drop(block_hash)
        self.saves.clear()
        self.idle_saves.clear()
        self.saving.clear()

    def _evict(self) -> bool:
        """Frees the slot that was used least recently. Returns False if there is none."""
        for block_hash, slot in self.slot_of.items():
            if slot not in self.saving and slot not in self._claimed:
                del self.slot_of[block_hash]
                self.free.append(slot)
                return True
        return False


class HostCopies:
    """The copies of blocks and checkpoints that the next step makes.

    Args:
        blocks: the slots for blocks.
        states: the slots for checkpoints.
        block_size: number of tokens of a block.
    """

    def __init__(self, blocks: HostSlots, states: HostSlots, block_size: int) -> None:
        self._blocks, self._states, self._block_size = blocks, states, block_size

    def add_to(self, step: Step) -> Step:
        """Plans the idle saves of the next step, adds all copies to the step, and returns it."""
        compute = step.compute
        self._blocks.plan_idle_saves(_IDLE_SAVES + compute.num_tokens // self._block_size)
        self._states.plan_idle_saves(_IDLE_STATE_SAVES)
        compute.block_saves, compute.block_loads, compute.idle_block_saves = self._blocks.copies()
        compute.checkpoint_saves, _, compute.idle_checkpoint_saves = self._states.copies()
        return step

    def launched(self) -> None:
        """Notes that the step with the planned copies was launched."""
        self._blocks.launched()
        self._states.launched()

    def failed(self) -> None:
        """Notes that the launch of the step has failed. See `HostSlots.failed`."""
        self._blocks.failed()
        self._states.failed()


def _pairs(copies: dict[int, int]) -> Int64Array | None:
    return np.array(list(copies.items()), np.int64) if copies else None
