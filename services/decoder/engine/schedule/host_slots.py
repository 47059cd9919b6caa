"""Slots in the memory of the host for KV blocks and recurrent states. Pure Python.

A block that is found in the prefix cache is lost when it is given to another sequence for new
contents, and so is a checkpoint of a recurrent state. With slots on the host, the step that changes
the block first copies it to a slot. A later prompt with the same prefix finds the slot and takes a
new block, and the step that computes the prompt first copies the slot to that block.

The device runs all copies in the order of the steps. Within a step, the saves come first, then the
loads, then the computation. Therefore neither the scheduler nor the device waits for a copy, and a
slot can be read from the step on that follows the one that writes it.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from services.decoder.engine.step import Int64Array


class HostSlots:
    """Owner of the slots; a new copy replaces the least recently used one.

    A copy is named by the hash of its block, or of the block at whose end the state is. Among ids
    of blocks or checkpoints, `-1 - slot` stands for a copy.

    Args:
        num_slots: number of slots. 0 if there is no host cache.

    Attributes:
        slot_of: slot of each copy by its name, least recently used first.
        saves: copies that the next launched step makes before all else: slot by id of the block or
            checkpoint.
        loads: copies that it makes next: slot by id of the block.
        free: slots without a copy.
        saving: slots of `saves`.
        dropped: slots that are free when the next step is launched.
        num_saved: number of saves so far.
        num_loaded: number of loads so far.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self.saves: dict[int, int] = {}
        self.loads: dict[int, int] = {}
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

    def save(self, block_hash: bytes, number: int) -> None:
        """Plans to copy what may get new contents in the next step.

        Nothing is copied if there is a copy already, if the next step uses all slots, or if it is
        yet to load the contents.

        Args:
            block_hash: name of the copy.
            number: id of the block or of the checkpoint.
        """
        if block_hash in self.slot_of:
            self.slot_of.move_to_end(block_hash)
        elif number not in self.loads and (self.free or self._evict()):
            slot = self.slot_of[block_hash] = self.saves[number] = self.free.pop()
            self.saving.add(slot)

    def drop(self, block_hash: bytes) -> None:
        """Forgets a copy, because its contents are wrong."""
        if (slot := self.slot_of.pop(block_hash, None)) is not None:
            self.dropped.append(slot)

    def clear(self) -> None:
        """Forgets all copies. Planned loads are made all the same."""
        for block_hash in list(self.slot_of):
            self.drop(block_hash)

    def copies(self) -> tuple[Int64Array | None, Int64Array | None]:
        """Returns the planned saves and loads, `[n, 2]`: id, slot. None if there are none."""
        saves = np.array(list(self.saves.items()), np.int64) if self.saves else None
        loads = np.array(list(self.loads.items()), np.int64) if self.loads else None
        return saves, loads

    def launched(self) -> None:
        """Notes that a step with the planned copies was launched."""
        self.num_saved += len(self.saves)
        self.num_loaded += len(self.loads)
        for planned in (self.saves, self.loads, self.saving, self._claimed):
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
        self.saving.clear()

    def _evict(self) -> bool:
        """Frees the slot that was used least recently. Returns False if there is none."""
        for block_hash, slot in self.slot_of.items():
            if slot not in self.saving and slot not in self._claimed:
                del self.slot_of[block_hash]
                self.free.append(slot)
                return True
        return False
