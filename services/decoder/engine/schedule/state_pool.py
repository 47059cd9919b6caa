"""Checkpoints of recurrent states: which slot holds the state after which tokens. Pure Python.

A sequence's running state has the slot of its row, so rows need no owner but the scheduler. A
checkpoint is a copy of it at a block boundary, named by the hash of the block that ends there. A
prefix can be reused only where both are there: the KV blocks up to a boundary, and the state at it.
An engine of a model with such states makes the one instance; the scheduler asks it and obeys.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.prefix_hash import extend_hashes
from services.decoder.engine.schedule.row_states import Checkpoints, RowStates
from services.decoder.engine.schedule.sequence import Sequence

# The next turn's prompt may differ from this one's in its last tokens: templates end a prompt in an
# empty or an open thought, which they leave out of the history.
_PROMPT_TAIL_TOKENS = 8


class StateCheckpoints(RowStates):
    """Owner of the checkpoints' slots; the least recently used checkpoint makes room.

    A slot is free, or planned (the step that fills it has not been launched), or holds a
    checkpoint.

    Attributes:
        least: tokens from one checkpoint to the next: one that saves fewer takes a slot from one
            that saves more.

    Raises:
        ValueError: steps may yield several tokens.
    """

    least = 256

    def __init__(self, info: EngineInfo) -> None:
        if info.max_tokens_per_step > 1:
            raise ValueError("recurrent states cannot be taken back: max_tokens_per_step must be 1")
        self.num_slots = info.num_checkpoints
        self._block_size, self._state_tokens = info.block_size, info.state_tokens
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._planned: dict[int, bytes] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    def use(self, block_hash: bytes) -> int:
        """The slot of a checkpoint, which counts as used."""
        self._slot_of.move_to_end(block_hash)
        return self._slot_of[block_hash]

    def reserve(self, block_hash: bytes, in_use: Container[int]) -> int:
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

    def commit(self, planned: Checkpoints) -> None:
        for _, slot in planned:
            self._slot_of[self._planned.pop(slot)] = slot

    def abandon(self, planned: Checkpoints) -> None:
        for _, slot in planned:
            del self._planned[slot]
            self._free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def admitted(self, sequence: Sequence) -> None:
        start, size, sequence.checkpoint = sequence.num_computed_tokens, self._block_size, -1
        if start:
            sequence.checkpoint = self.use(sequence.block_hashes[start // size - 1])
        sequence.checkpoints = checkpoint_boundaries(sequence, size, start, self.least)

    def boundary(self, num_tokens: int) -> int:
        """Chunks of prompts begin at block boundaries, so that pieces of them end at others."""
        return num_tokens // self._block_size * self._block_size

    def plan(
        self, sequence: Sequence, start: int, end: int, admitted: Iterable[Sequence]
    ) -> tuple[int, Checkpoints]:
        """States are kept at most a piece of the chunk before where they are wanted. A chunk of one
        token is computed as a decode and keeps none.
        """
        if not sequence.checkpoints:
            return end, ()
        if end < len(sequence.token_ids):
            # A chunk that began within a piece before a wanted state would be too late for it.
            early = [w - self._state_tokens for w in sequence.checkpoints if w > end]
            ends = map(self.boundary, (end, *early))
            end = min((each for each in ends if start < each <= end), default=end)
        planned: list[tuple[int, int]] = []
        in_use = {other.checkpoint for other in admitted}
        keeps = self.num_slots > 0 and end > start + 1
        for wanted in sequence.checkpoints if keeps else ():
            tokens = start + (wanted - start) // self._state_tokens * self._state_tokens
            if start < tokens and wanted <= end and tokens == self.boundary(tokens):
                count = tokens // self._block_size
                extend_hashes(sequence, self._block_size, count)
                slot = self.reserve(sequence.block_hashes[count - 1], in_use)
                if slot >= 0:
                    planned.append((tokens, slot))
        return end, tuple(planned)


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
    if sequence.message.images:
        span = sequence.message.images[-1]
        wanted.insert(0, (span.offset + span.num_tokens) // block_size * block_size)
    found: list[int] = []
    for boundary in wanted:
        if start + least <= boundary <= last:
            found.append(boundary)
            start = boundary
    return tuple(found)
