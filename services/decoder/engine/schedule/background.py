"""Decides what a step leaves out for requests that somebody waits for. Pure Python.

Sequences in the background (`AddSequence.background`) are the lines of batches. Three rules keep
them from delaying the first tokens of other sequences. A step that computes the prompt of another
sequence leaves them out, because their tokens would lengthen the step. A step with prompts of
theirs alone is short as long as other sequences come, because a sequence that arrives while a step
runs waits for the end of the step. And for as long, the engine launches a step only shortly before
the end of the step before it (`expects_others`), because a sequence that arrives after the launch
waits for the end of both steps.
"""

from collections.abc import Mapping

from services.decoder.engine.schedule.admission import Admission
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.schedule.step_cost import StepCost

# Number of steps after the last other sequence for which steps stay short.
_QUIET_STEPS = 4096


class Background:
    """The rules for the step that is planned.

    Attributes:
        holds: True if the step leaves out sequences in the background.
        is_short: True if the step is short.
    """

    def __init__(self) -> None:
        self._num = [0, 0]  # unfinished sequences: others, and those in the background
        self.holds = self.is_short = False
        self._step = 0
        self._busy_step = -_QUIET_STEPS  # last step with a sequence that is not in the background

    def add(self, sequence: Sequence) -> None:
        """Counts a new sequence, whether or not it is in the background."""
        self._num[sequence.message.background] += 1

    def remove(self, sequence: Sequence) -> None:
        """Counts a sequence that has finished."""
        self._num[sequence.message.background] -= 1

    @property
    def expects_others(self) -> bool:
        """True if there are sequences in the background, and another sequence may arrive soon,
        because one was there in the last steps.
        """
        return self._num[1] > 0 and self._step - self._busy_step < _QUIET_STEPS

    def begin_step(self, step: int, prefilling: Mapping[int, Sequence], waiting: Admission) -> None:
        """Decides the rules for a step.

        Args:
            step: number of the step.
            prefilling: sequences with a row and tokens of their prompts to compute, by id.
            waiting: sequences that wait for a row.
        """
        others, in_background = self._num
        self._step = step
        if others:
            self._busy_step = step
        self.holds = self.is_short = False
        if in_background:
            prompts = any([not sequence.message.background for sequence in prefilling.values()])
            self.holds = prompts or waiting.has_foreground
            self.is_short = not self.holds and self.expects_others

    def let_in(self) -> bool:
        """Lets sequences in the background into the step after all, because no other sequence can
        be computed. Returns whether the step would have left them out.
        """
        held, self.holds = self.holds, False
        return held

    def leaves_out(self, sequence: Sequence) -> bool:
        """Returns whether the step leaves out a sequence."""
        return self.holds and sequence.message.background

    def rest(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the sequences that the step does not leave out."""
        return [s for s in sequences if not s.message.background] if self.holds else sequences

    def step_ms(self, usual: float) -> float:
        """Returns the milliseconds that the step may last: `usual`, or 0 for the least that
        `StepCost.bound` allows.
        """
        return 0.0 if self.is_short else usual

    def max_tokens(self, usual: int, num_decodes: int) -> int:
        """Returns the most tokens of the step, which has `num_decodes` decodes: `usual`, or those
        of the smallest graph for a step with prompts.
        """
        return min(usual, StepCost.short_tokens(num_decodes)) if self.is_short else usual
