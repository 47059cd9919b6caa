"""Checkpoints of recurrent states: which slot holds the state after which tokens. Pure Python.

A sequence's running state has the slot of its row, so rows need no owner but the scheduler. A
checkpoint is a copy of it at a block boundary, named by the hash of the block that ends there. A
prefix can be reused only where both are there: the KV blocks up to a boundary, and the state at it.
`BlockManager` owns the one instance and drops a checkpoint with its block.
"""

from collections import OrderedDict
from collections.abc import Container

from services.decoder.engine.sequence import Sequence

# A checkpoint that saves fewer tokens takes a slot from one that saves more.
MIN_CHECKPOINT_TOKENS = 256
# The next turn's prompt may differ from this one's in its last tokens: templates end a prompt in an
# empty or an open thought, which they leave out of the history.
_PROMPT_TAIL_TOKENS = 8


class StateCheckpoints:
    """Owner of the checkpoints' slots; the least recently used checkpoint makes room.

    A slot is free, or planned (the step that fills it has not been launched), or holds a
    checkpoint.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._planned: dict[int, bytes] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    def use(self, block_hash: bytes) -> int:
        """The slot of a checkpoint, which counts as used."""
        self._slot_of.move_to_end(block_hash)
        return self._slot_of[block_hash]

    def plan(self, block_hash: bytes, in_use: Container[int]) -> int:
        """A slot for a new checkpoint, to be committed or abandoned; -1: there is none, or there is
        such a checkpoint already.

        Args:
            in_use: slots that a step which was not launched yet reads.
        """
        if block_hash in self._slot_of or block_hash in self._planned.values():
            return -1
        if not self._free:
            for name, slot in self._slot_of.items():
                if slot not in in_use:
                    self.drop(name)
                    break
            else:
                return -1
        slot = self._free.pop()
        self._planned[slot] = block_hash
        return slot

    def commit(self, slot: int) -> None:
        """The step that fills a planned slot was launched: later ones may read the checkpoint."""
        self._slot_of[self._planned.pop(slot)] = slot

    def abandon(self, slot: int) -> None:
        """The step that fills a planned slot was not launched."""
        del self._planned[slot]
        self._free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        """Removes a checkpoint, if there is one."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)


def checkpoint_boundaries(
    sequence: Sequence, block_size: int, start: int, least: int
) -> tuple[int, ...]:
    """After how many tokens of a prompt a checkpoint is wanted, at the latest: at the last block
    boundary within the last image (the same image, another question, which may differ from its
    first token on), and at the last one before the prompt's end (the next turn).

    Args:
        start: tokens whose state is there already.
        least: tokens between it and a checkpoint, and between two.
    """
    last = (sequence.num_prompt_tokens - 1 - _PROMPT_TAIL_TOKENS) // block_size * block_size
    wanted = [last]
    if sequence.images:
        span = sequence.images[-1]
        wanted.insert(0, (span.offset + span.num_tokens) // block_size * block_size)
    found: list[int] = []
    for boundary in wanted:
        if start + least <= boundary <= last:
            found.append(boundary)
            start = boundary
    return tuple(found)
