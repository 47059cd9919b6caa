"""Token masks arrive while a step is computed, which is then sampled as a whole; a sequence whose
mask is late gets no token from it.
"""

import time

import numpy as np

from services.decoder.engine.engine import Engine
from services.decoder.engine.mask_deadline import MaskDeadline
from services.decoder.engine.messages import NewTokens, SequenceEvent, TokenMasks
from services.decoder.engine.sampling_gate import SamplingGate
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.sequence import SequenceState
from services.decoder.engine.step import Int32Array, PendingStep

# How long the device waits for late masks where no other row of the batch could be sampled.
_LONE_MASK_GRACE_S = 0.02
_NO_MASK = np.empty(0, np.int32)


class MaskGate(SamplingGate):
    """Opens when all masks of the step are there, or when the others would wait for them.

    Args:
        engine: whose gate this is from now on.

    Attributes:
        rows: of each `MaskLink`, by its number; `[num_rows, num_words]`.
    """

    def __init__(self, engine: Engine) -> None:
        engine.gate, self._engine = self, engine
        num_words = -(-engine.info.vocab_size // 32)
        self.rows: dict[int, Int32Array] = {}
        self._nothing_allowed = np.zeros(num_words, np.int32)
        self._all_allowed = np.full(num_words, -1, np.int32)
        self._deadline = MaskDeadline()
        # The last step that was launched, if it waits; each sequence's place among its masks.
        self._unsampled: tuple[Batch, PendingStep] | None = None
        self._places: dict[int, int] = {}
        self._computed_at = self._sampled_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether the masks that are missing will arrive in time."""
        if self._unsampled is None:
            return False
        batch, pending = self._unsampled
        missing = finished = 0
        for chunk in batch.late:
            if chunk.sequence.state is SequenceState.FINISHED:
                finished += 1
            elif chunk.sequence.token_mask is None:
                missing += 1
        if missing == 0:
            return False
        now = time.monotonic()
        if missing + finished < len(batch.chunks):  # others need not wait
            deadline = self._deadline.at
            if deadline is None:
                return not pending.is_computed()
            if len(batch.late) == len(batch.chunks):  # no free ones, who would gain nothing by it
                return now < deadline + self._deadline.patience_s(missing, len(batch.late))
            return now < deadline and not pending.is_computed()
        if not pending.is_computed():
            return True
        self._computed_at = self._computed_at or now
        return now - self._computed_at < _LONE_MASK_GRACE_S

    def handle(self, message: TokenMasks) -> None:
        """Masks of several sequences, in `rows`."""
        num_words = len(self._all_allowed)
        if (rows := self.rows.get(message.link)) is None:  # the process has ended
            return
        for number, num_generated, row in zip(
            message.sequence_ids, message.num_generated, message.rows, strict=True
        ):
            mask = _NO_MASK if row < 0 else rows[row, :num_words]
            self.mask_ready(number, num_generated, mask)

    def mask_ready(self, sequence_id: int, num_generated: int, mask: Int32Array) -> None:
        """The mask of a sequence's next token. One that the sequence has had is ignored: its
        process may have ended, and another one does not know that. One for another token fails the
        sequence.

        Args:
            num_generated: tokens before that one.
            mask: its words; empty: every token is allowed.
        """
        sequence = self._engine.find(sequence_id)
        if sequence is None or num_generated <= sequence.num_masked:
            return
        wanted = sequence.num_generated
        if not sequence.awaits_mask or num_generated != wanted:
            problem = f"a token mask for token {num_generated} came, at token {wanted}"
            self._engine.fail(sequence, problem)
        else:
            sequence.num_masked = num_generated
            place = self._places.get(sequence_id)
            if place is not None and self._unsampled is not None:
                self._unsampled[1].put_mask(place, mask if len(mask) else self._all_allowed)
            else:  # it is planned again
                self._engine.discard_plan()
            self._engine.scheduler.mask_ready(sequence, mask)

    def sample(self) -> None:
        """See `SamplingGate`. A sequence whose mask has not arrived gets no token."""
        if self._unsampled is None:
            return
        batch, pending = self._unsampled
        self._sampled_at = time.monotonic()
        if pending.is_computed():
            self._deadline.computed(self._sampled_at)
        self._unsampled = None
        for chunk in batch.late:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.FINISHED and sequence.token_mask is None:
                self._engine.discard_plan()
                break
        for place, chunk in enumerate(batch.late):
            sequence = chunk.sequence
            mask, sequence.token_mask = sequence.token_mask, None
            if sequence.state is SequenceState.FINISHED or mask is None:
                pending.put_mask(place, self._nothing_allowed)
                chunk.is_void = True
                if sequence.state is not SequenceState.FINISHED:
                    self.num_missed += 1
                    self._engine.scheduler.mask_missed(sequence)
        pending.sample()

    def launched(self, batch: Batch, pending: PendingStep) -> None:
        if self._sampled_at:
            self._deadline.launched(time.monotonic() - self._sampled_at)
            self._sampled_at = 0.0
        if batch.late:
            self._unsampled = batch, pending
            self._places = {c.sequence.sequence_id: i for i, c in enumerate(batch.late)}
            self._computed_at = 0.0
        for chunk in reversed(batch.chunks):
            if chunk.from_device:
                break
            if chunk.samples:
                chunk.sequence.token_mask = None  # the step has it

    def read(self, following: Batch | None, now: float) -> None:
        if following is None:
            self._deadline.idle()
        else:
            self._deadline.began(now, decodes_only=following.chunks[-1].from_device)

    def new_tokens(self, events: list[SequenceEvent]) -> NewTokens:
        """The tokens of sequences with masks that go on."""
        found = NewTokens([], [], [])
        for event in events:
            sequence = self._engine.find(event.sequence_id)
            if sequence is not None and sequence.message.token_masks and event.token_ids:
                found.sequence_ids.append(event.sequence_id)
                found.token_ids.append(event.token_ids)
                found.num_generated.append(sequence.num_generated)
        return found
