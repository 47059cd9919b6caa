"""The decode phase: sequences whose prompts are computed. Pure Python.

A sequence gets one new token a step, or several if it verifies drafts (`chunk`).
"""

import numpy as np

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.background import Background
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.chunk import Chunk
from services.decoder.engine.schedule.drafts import UNKNOWN_DRAFT
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.speculation import Speculation
from services.decoder.engine.step import Int32Array

# Blocks for the keys and values of the next drafts are taken while so many are free for each
# sequence.
_ROOMY = 8


class Decodes:
    """Owner of the queues of decoding sequences.

    A step may yield up to `max_tokens_per_step` tokens for a sequence. The plan assumes that it
    yields the most, and the engine corrects `num_computed_tokens` when fewer arrive.

    Args:
        info: the engine's limits.
        blocks: the KV blocks, of which sequences take more as they grow.
        speculation: decides how many drafts each sequence verifies.

    Attributes:
        decoding: sequences by id that are planned while their last token is still on the device.
        awaiting: sequences by id that are planned once the host knows their last token, and the
            token mask of the next one if there is a grammar. A sequence with drafts is one of them.
        speculation: decides how many drafts each sequence verifies.
        extended: sequences that got a block since the last step that was launched.
        background: the rules for sequences in the background.
    """

    def __init__(self, info: EngineInfo, blocks: BlockManager, speculation: Speculation) -> None:
        self._blocks = blocks
        self.speculation = speculation
        self._max_tokens_per_step = info.max_tokens_per_step
        self.decoding: dict[int, Sequence] = {}
        self.awaiting: dict[int, Sequence] = {}
        self.extended: list[Sequence] = []
        self.background = Background()

    def __len__(self) -> int:
        """Returns the number of decoding and awaiting sequences."""
        return len(self.decoding) + len(self.awaiting)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence whose last prompt token has just been planned."""
        queue = self.decoding if sequence.plans_ahead else self.awaiting
        queue[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue, if it is in this phase."""
        self.decoding.pop(sequence.sequence_id, None)
        self.awaiting.pop(sequence.sequence_id, None)
        if sequence.drafts is not None:
            sequence.drafts.leave_row()

    def await_tokens(self, sequence: Sequence) -> None:
        """Stops planning a decoding sequence until the host knows its last token, and its token
        mask has arrived if there is a grammar.
        """
        if (found := self.decoding.pop(sequence.sequence_id, None)) is not None:
            self.awaiting[sequence.sequence_id] = found

    def head_drafts(self, chunks: list[Chunk], *, is_open: bool) -> int:
        """Returns how many tokens the model drafts behind each token that a step samples. If it
        drafts any, sequences are planned no further before the drafts have arrived.

        Args:
            chunks: the chunks of the step.
            is_open: False if the next step may compute prompts, which excludes drafts.
        """
        count = self.speculation.num_head_drafts(chunks, is_open=is_open)
        if count:
            self.awaiting |= self.decoding
            self.decoding = {}
        return count

    def look_for_drafts(self, chunks: list[Chunk], drafts: Int32Array | None) -> None:
        """Looks for drafts behind the new tokens of sequences. A sequence that has drafts is not
        planned before the host knows its last token.

        Args:
            chunks: the chunks of a step whose tokens were appended to their sequences.
            drafts: `[B, n]`, drafts of the chunks that sample, up to the first id below 0. None if
                no drafts came with the tokens.
        """
        if not self.speculation.max_drafts:
            return
        for index, chunk in enumerate([chunk for chunk in chunks if chunk.samples]):
            sequence = chunk.sequence
            if chunk.is_void or sequence.state is SequenceState.FINISHED:
                continue
            if sequence.drafts is not None:
                sequence.drafts.group = index
            is_ahead = sequence.sequence_id in self.decoding
            num_others = len(self.decoding) - is_ahead
            offered = () if drafts is None else drafts[index]
            alone = len(self) == 1
            if self.speculation.tokens_arrived(sequence, num_others, offered, is_alone=alone):
                self.await_tokens(sequence)

    def look_for_unknown_drafts(self, chunks: list[Chunk], count: int) -> None:
        """Looks for drafts like `look_for_drafts`, while the device still makes them.

        Args:
            chunks: the chunks of the last launched step, whose tokens were appended.
            count: number of drafts behind each of these tokens, where the row has blocks for them.
        """
        drafts = np.full((len(chunks), count), UNKNOWN_DRAFT, np.int32)
        for index, chunk in enumerate([chunk for chunk in chunks if chunk.samples]):
            sequence = chunk.sequence
            # The first draft depends on the keys and values of the token before the last one.
            room = sequence.capacity - (len(sequence.token_ids) - 2)
            if room < count:
                drafts[index, max(0, room) :] = -1
        self.look_for_drafts(chunks, drafts)

    def forget_unknown_drafts(self, chunks: list[Chunk]) -> None:
        """Drops the drafts of `look_for_unknown_drafts` that the next step does not verify."""
        for chunk in chunks:
            if (drafts := chunk.sequence.drafts) is not None and UNKNOWN_DRAFT in drafts.proposed:
                drafts.proposed, drafts.chosen = [], []

    def choose_drafts(self, *, is_open: bool) -> None:
        """Chooses the drafts that sequences verify in the next step.

        Args:
            is_open: False if the step may compute prompts, so that it has no drafts.
        """
        if self.speculation.max_drafts:
            self.speculation.choose(self.ready(), self._plannable(), self._blocks, is_open=is_open)

    def ready(self) -> list[Sequence]:
        """Returns the awaiting sequences whose last token and next token mask have arrived."""
        return [s for s in self.awaiting.values() if not (s.num_in_flight or s.awaits_mask)]

    def lacking_blocks(self) -> list[Sequence]:
        """Returns the sequences whose next step needs more blocks than they own."""
        most = self._max_tokens_per_step
        lacking = [s for s in self._plannable() if s.num_computed_tokens + most > s.capacity]
        if most > 1:
            lacking = [s for s in lacking if self.num_lacking_blocks(s)]
        ready = self.background.rest(self.ready())
        return lacking + [s for s in ready if self.num_lacking_blocks(s)]

    def num_lacking_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks the sequence has to be given for its next step."""
        needed = sequence.num_computed_tokens + self._most_tokens(sequence)
        room = self.speculation.head_room
        if room and self._blocks.num_free >= _ROOMY * len(self):
            needed = max(needed, min(needed + room, sequence.max_length))
        return max(0, self._blocks.num_blocks_for(needed) - len(sequence.block_table))

    def append_blocks(self, sequences: list[Sequence]) -> None:
        """Gives each sequence the blocks that it lacks; enough blocks have to be free."""
        for sequence in sequences:
            for _ in range(self.num_lacking_blocks(sequence)):
                self._blocks.append_block(sequence)
        self.extended += sequences

    def plan(self) -> list[Chunk]:
        """Returns one chunk for each sequence that can be planned; none of them lacks blocks.

        Sequences whose last token is on the device come before those whose token the host knows.
        """
        ready = self._ready_together()
        most_is_one = self._max_tokens_per_step == 1
        chunks: list[Chunk] = []
        for sequence in self._plannable():
            start = sequence.num_computed_tokens
            limit = 1 if most_is_one else self._most_tokens(sequence)
            sequence.num_computed_tokens = start + limit
            sequence.num_in_flight += 1
            chunks.append(Chunk(sequence, start, 1, True, True, limit))
        # If drafts come for all sequences at once, those without drafts wait for those with drafts.
        together = self.speculation.head_room > 0 and any(
            [s.drafts is not None and s.drafts.chosen for s in ready]
        )
        for sequence in ready:
            start, limit = sequence.num_computed_tokens, self._most_tokens(sequence)
            sequence.num_computed_tokens = start + limit
            sequence.num_in_flight += 1
            drafts, num_folded, waits = (), 0, False
            if sequence.drafts is not None:
                waits = sequence.drafts.waits
                drafts, num_folded = sequence.drafts.take(), sequence.drafts.num_unfolded
                sequence.drafts.num_unfolded = 0
            if sequence.plans_ahead and not (drafts or together or waits):
                number = sequence.sequence_id
                self.decoding[number] = self.awaiting.pop(number)
            chunk = Chunk(sequence, start, 1, False, True, limit, drafts=drafts)
            chunk.num_folded = num_folded
            if UNKNOWN_DRAFT in drafts and sequence.drafts is not None:
                chunk.group = sequence.drafts.group
            chunks.append(chunk)
        return chunks

    def _ready_together(self) -> list[Sequence]:
        """Returns the sequences of `ready`. If they are the only ones that can be planned, and
        others that verify drafts are in flight, it returns none, so that all share the next steps.
        """
        ready = self.background.rest(self.ready())
        if ready and self.speculation.max_drafts and not self.decoding:
            others = self.awaiting.values()
            if any([s.num_in_flight and s.plans_ahead for s in others]):
                return []
        return ready

    def _plannable(self) -> list[Sequence]:
        """Returns the decoding sequences that have a next token.

        All tokens of a sequence but the last are computed, so a sequence whose computed tokens
        reach `max_length` - 1 has its last token in flight.
        """
        found = [s for s in self.decoding.values() if s.num_computed_tokens + 1 < s.max_length]
        return self.background.rest(found)

    def _most_tokens(self, sequence: Sequence) -> int:
        """Returns the most tokens that the next step may yield for the sequence."""
        if sequence.drafts is not None:
            return 1 + len(sequence.drafts.chosen)
        if sequence.message.token_masks:
            return 1  # a mask is for one token
        left = sequence.max_length - 1 - sequence.num_computed_tokens
        return min(self._max_tokens_per_step, left)
