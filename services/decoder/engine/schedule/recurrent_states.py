"""Recurrent states: which slot holds the state of linear attention after which tokens. Pure Python.

The running state of a sequence has the slot of its row, so the scheduler owns it with the row. A
checkpoint is a copy of that state at a block boundary, named by the hash of the block that ends
there. A prefix can be reused only where both exist: the KV blocks up to a boundary, and the state
at the boundary. `NoStates` stands for a model without linear attention.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.host_slots import HostSlots
from services.decoder.engine.schedule.prefix_hash import extend_hashes
from services.decoder.engine.schedule.sequence import Sequence

Checkpoints = tuple[tuple[int, int], ...]  # of a chunk, see `Chunk.checkpoints`

# The next turn's prompt may differ from this one's in its last tokens: templates end a prompt in an
# empty or an open thought, which they leave out of the history.
_PROMPT_TAIL_TOKENS = 8


class NoStates:
    """The states of a model without linear attention, of which a prefix is its blocks alone.

    Args:
        num_host_slots: number of slots for copies of checkpoints in the host's memory.
        num_checkpoints: number of checkpoints on the device.

    Attributes:
        host: the copies in the host's memory.
    """

    def __init__(self, num_host_slots: int = 0, num_checkpoints: int = 0) -> None:
        self.host = HostSlots(num_host_slots, num_checkpoints)

    def __contains__(self, block_hash: bytes) -> bool:
        """Returns whether a sequence can go on behind a prefix that ends with this block."""
        return True

    def drop(self, block_hash: bytes) -> None:
        """Forgets the checkpoint at a block that is not in the prefix cache any more."""

    def evict(self, block_hash: bytes) -> None:
        """Moves the checkpoint to the host, because the block leaves the KV cache."""

    def admitted(self, sequence: Sequence) -> None:
        """Notes that the sequence gets a row and a cached prefix of `num_computed_tokens`, whose
        state it will need. Call this before the sequence gets blocks, which may evict states.
        """

    def boundary(self, num_tokens: int) -> int:
        """Returns the last index up to `num_tokens` at which a chunk within a prompt may end."""
        return num_tokens

    def plan(
        self, sequence: Sequence, start: int, end: int, admitted: Iterable[Sequence]
    ) -> tuple[int, Checkpoints]:
        """Returns where the chunk [start, end) has to end, and the checkpoints within it.

        Args:
            sequence: the sequence whose chunk is planned.
            start: index of the chunk's first token.
            end: index behind the chunk's last token, at most.
            admitted: sequences that begin with the step, which is not launched yet.
        """
        return end, ()

    def commit(self, planned: Checkpoints) -> None:
        """Makes checkpoints available to later steps: the step that fills them was launched."""

    def abandon(self, planned: Checkpoints) -> None:
        """Gives back the slots of checkpoints whose step was not launched."""


class RecurrentStates(NoStates):
    """Owner of the checkpoints' slots; a new checkpoint replaces the least recently used one.

    A slot is free, or planned (the step that fills it has not been launched), or holds a
    checkpoint.

    Args:
        info: the engine's limits.
        least: smallest number of tokens between two checkpoints. A checkpoint that saves few
            tokens would take the slot of a checkpoint that saves more.

    Attributes:
        num_slots: number of slots for checkpoints.
        state_tokens: number of tokens of a piece, after each of which there is a state.
        free: slots that are free.
        slot_of: slot of each checkpoint by its name, least recently used first.
        planned: name of the planned checkpoint by its slot.

    Raises:
        ValueError: steps may yield several tokens.
    """

    def __init__(self, info: EngineInfo, least: int = 256) -> None:
        if info.max_tokens_per_step > 1:
            raise ValueError("recurrent states cannot be taken back: max_tokens_per_step must be 1")
        super().__init__(info.num_host_states, info.num_checkpoints)
        self.least = least
        self.num_slots = info.num_checkpoints
        self._block_size, self.state_tokens = info.block_size, info.state_tokens
        self.free = list(range(self.num_slots - 1, -1, -1))
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self.planned: dict[int, bytes] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.slot_of or self.host.find(block_hash) is not None

    def use(self, block_hash: bytes) -> int:
        """Returns the slot of a checkpoint, which counts as used; `-2 - slot` if it is only in a
        slot of the host.
        """
        if block_hash in self.slot_of:
            self.slot_of.move_to_end(block_hash)
            return self.slot_of[block_hash]
        return self.host.use(block_hash) - 1

    def reserve(self, block_hash: bytes, in_use: Container[int]) -> int:
        """Returns a slot for a new checkpoint, to be committed or abandoned.

        Returns -1 if every slot is in use, or if the checkpoint exists already.

        Args:
            block_hash: name of the new checkpoint.
            in_use: slots that a step reads which is not launched yet.
        """
        if block_hash in self.slot_of or block_hash in self.planned.values():
            return -1
        if not self.free:
            for name, slot in self.slot_of.items():
                if slot not in in_use:
                    self.evict(name)
                    break
            else:
                return -1
        slot = self.free.pop()
        self.planned[slot] = block_hash
        return slot

    def commit(self, planned: Checkpoints) -> None:
        for _, slot in planned:
            block_hash = self.planned.pop(slot)
            self.slot_of[block_hash] = slot
            self.host.offer(block_hash, slot)

    def abandon(self, planned: Checkpoints) -> None:
        for _, slot in planned:
            del self.planned[slot]
            self.free.append(slot)

    def drop(self, block_hash: bytes) -> None:
        self.host.drop(block_hash)
        slot = self.slot_of.pop(block_hash, None)
        if slot is not None:
            self.free.append(slot)

    def evict(self, block_hash: bytes) -> None:
        slot = self.slot_of.pop(block_hash, None)
        if slot is not None:
            self.host.save(block_hash, slot)
            self.free.append(slot)

    def admitted(self, sequence: Sequence) -> None:
        start, size, sequence.checkpoint = sequence.num_computed_tokens, self._block_size, -1
        if start:
            sequence.checkpoint = self.use(sequence.block_hashes[start // size - 1])
        sequence.checkpoints = checkpoint_boundaries(sequence, size, start, self.least)

    def boundary(self, num_tokens: int) -> int:
        """Returns a block boundary, so that chunks of prompts begin and end at block boundaries."""
        return num_tokens // self._block_size * self._block_size

    def plan(
        self, sequence: Sequence, start: int, end: int, admitted: Iterable[Sequence]
    ) -> tuple[int, Checkpoints]:
        """Plans a checkpoint at the last piece boundary before each wanted place.

        Linear attention computes a chunk in pieces of `state_tokens` and has a state after each. A
        chunk of one token is computed as a decode, which keeps no checkpoint.
        """
        if not sequence.checkpoints:
            return end, ()
        if end < len(sequence.token_ids):
            # A chunk that began within a piece before a wanted state would be too late for it.
            early = [w - self.state_tokens for w in sequence.checkpoints if w > end]
            ends = map(self.boundary, (end, *early))
            end = min((each for each in ends if start < each <= end), default=end)
        planned: list[tuple[int, int]] = []
        in_use = {other.checkpoint for other in admitted}
        keeps = self.num_slots > 0 and end > start + 1
        for wanted in sequence.checkpoints if keeps else ():
            tokens = start + (wanted - start) // self.state_tokens * self.state_tokens
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
    """Returns after how many tokens of a prompt a checkpoint is wanted, in ascending order.

    The first is the last block boundary within the last image, for another question about the same
    image, which may differ from its first token on. The second is the last block boundary before
    the end of the prompt, for the next turn of the conversation.

    Args:
        sequence: the sequence whose prompt is computed.
        block_size: number of tokens of a block.
        start: number of tokens whose state exists already.
        least: smallest number of tokens from `start` to a checkpoint, and between two checkpoints.
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


def states_of(info: EngineInfo) -> NoStates:
    """Returns the owner of the states of a model with or without linear attention."""
    return RecurrentStates(info) if info.has_states else NoStates()
