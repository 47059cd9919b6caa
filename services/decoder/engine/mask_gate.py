"""The gate before sampling: token masks may arrive while their step is computed. Pure Python.

A step with late masks is launched without being sampled. The gate decides when the engine samples
it: as soon as all of its masks have arrived, or at a deadline (`MaskDeadline`). A sequence whose
mask has not arrived by then gets no token from the step, and the other sequences go on.
"""

import time
from collections.abc import Iterator

import numpy as np

from services.common.clock import Clock
from services.decoder.engine.mask_deadline import MaskDeadline
from services.decoder.engine.messages import TokenMasks
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.step import Int32Array

# Seconds that the device waits for late masks if no other sequence of the batch could be sampled.
_LONE_MASK_GRACE_S = 0.02
_EMPTY_MASK = np.empty(0, np.int32)


class MaskGate:
    """Decides when a launched step is sampled, and hands it the token masks.

    Args:
        vocab_size: number of tokens that a mask has bits for.
        clock: the clock that times the deadline.

    Attributes:
        rows: masks in shared memory, int32 `[num_rows, num_words]`, by the number of the
            `MaskLink` over which they come.
        unsampled: the last launched step, while it waits to be sampled.
        num_missed: number of tokens so far that sequences did not get because a mask came too late.
    """

    def __init__(self, vocab_size: int, clock: Clock = time.monotonic) -> None:
        num_words = -(-vocab_size // 32)
        self._clock = clock
        self.rows: dict[int, Int32Array] = {}
        self.num_missed = 0
        self._nothing_allowed = np.zeros(num_words, np.int32)
        self._all_allowed = np.full(num_words, -1, np.int32)
        self._deadline = MaskDeadline()
        self.unsampled: tuple[Batch, PendingStep] | None = None
        # The index of each sequence's mask among the late masks of the last launched step.
        self._places: dict[int, int] = {}
        self._computed_at = self._sampled_at = 0.0

    @property
    def waits(self) -> bool:
        """True if the last launched step should be sampled later, because masks are missing."""
        if self.unsampled is None:
            return False
        batch, pending = self.unsampled
        missing = finished = 0
        for chunk in batch.late:
            if chunk.sequence.state is SequenceState.FINISHED:
                finished += 1
            elif chunk.sequence.token_mask is None:
                missing += 1
        if missing == 0:
            return False
        now = self._clock()
        if missing + finished < len(batch.chunks):  # other sequences would wait, too
            deadline = self._deadline.at
            if deadline is None:
                return not pending.is_computed()
            if len(batch.late) == len(batch.chunks):  # every sequence has masks
                return now < deadline + self._deadline.patience_s(missing, len(batch.late))
            return now < deadline and not pending.is_computed()
        if not pending.is_computed():
            return True
        self._computed_at = self._computed_at or now
        return now - self._computed_at < _LONE_MASK_GRACE_S

    def masks(self, message: TokenMasks) -> Iterator[tuple[int, int, list[Int32Array]]]:
        """Yields the masks of a message as arguments of `Engine.mask_ready`: a list of each
        sequence's mask and those of its drafts.

        A message from a process that has ended yields nothing.
        """
        if (rows := self.rows.get(message.link)) is None:
            return
        num_words = len(self._all_allowed)
        counts = message.num_drafts or [0] * len(message.rows)
        for number, num_generated, row, count in zip(
            message.sequence_ids, message.num_generated, message.rows, counts, strict=True
        ):
            found = [_EMPTY_MASK] if row < 0 else list(rows[row : row + 1 + count, :num_words])
            yield number, num_generated, found

    def put(self, sequence: Sequence, mask: Int32Array) -> bool:
        """Hands a mask to the launched step that waits for it.

        Args:
            sequence: the sequence whose next token the mask is for.
            mask: words of the mask; empty if every token is allowed.

        Returns:
            False if no launched step waits for the mask, so that the sequence has to be planned.
        """
        place = self._places.get(sequence.sequence_id)
        if place is None or self.unsampled is None:
            return False
        self.unsampled[1].put_mask(place, mask if len(mask) else self._all_allowed)
        return True

    def sample(self) -> list[Sequence]:
        """Samples the last launched step if it is not sampled yet, before the next launch.

        Returns the sequences whose masks are missing. They get no token from the step.
        """
        if self.unsampled is None:
            return []
        batch, pending = self.unsampled
        self._sampled_at = self._clock()
        if pending.is_computed():
            self._deadline.computed(self._sampled_at)
        self.unsampled = None
        missed: list[Sequence] = []
        for place, chunk in enumerate(batch.late):
            sequence = chunk.sequence
            mask, sequence.token_mask = sequence.token_mask, None
            if sequence.state is SequenceState.FINISHED or mask is None:
                pending.put_mask(place, self._nothing_allowed)
                chunk.is_void = True
                if sequence.state is not SequenceState.FINISHED:
                    missed.append(sequence)
        self.num_missed += len(missed)
        pending.sample()
        return missed

    def launched(self, batch: Batch, pending: PendingStep) -> None:
        """Notes that a step was launched, which waits here if it has late masks."""
        if self._sampled_at:
            self._deadline.launched(self._clock() - self._sampled_at)
            self._sampled_at = 0.0
        if batch.late:
            self.unsampled = batch, pending
            self._places = {c.sequence.sequence_id: i for i, c in enumerate(batch.late)}
            self._computed_at = 0.0
            for chunk in batch.late:
                # If earlier steps left the sequence out (`Background`), its mask may be here.
                if (mask := chunk.sequence.token_mask) is not None:
                    self.put(chunk.sequence, mask)
        for chunk in reversed(batch.chunks):
            if chunk.from_device:
                break
            if chunk.samples:
                chunk.sequence.token_mask = None  # the step has the mask

    def resumed(self) -> None:
        """Notes that the next launch came late because another process had the device."""
        self._sampled_at = 0.0

    def read(self, following: Batch | None, now: float) -> None:
        """Notes that the oldest step's result was read.

        Args:
            following: the step that the device computes now. None if no other step is in flight.
            now: present time of the clock.
        """
        if following is None:
            self._deadline.idle()
        else:
            self._deadline.began(now, decodes_only=following.chunks[-1].from_device)
