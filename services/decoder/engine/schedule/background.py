"""Decides what a step leaves out for requests that somebody waits for. Pure Python.

Sequences in the background (`AddSequence.background`) are the lines of batches. Four rules keep
them from delaying the first tokens of other sequences:

- Steps leave out the sequences in the background while another sequence is unfinished. So a
  sequence waits for a step of the background only if it arrives while no other sequence is there.
  It then waits for nothing else, whereas the slowest first tokens are those of sequences that
  meet other ones. After `_MOST_HELD_STEPS` such steps the background takes part in steps again,
  until no other sequence is left, so that an endless row of other sequences does not stop it.
- A step that computes the prompt of another sequence leaves the background out in any case, because
  its tokens would lengthen the step.
- As long as other sequences come, steps of the background are short, because a sequence that
  arrives while a step runs waits for the end of the step. A step of the background alone then
  computes one prompt, or decodes. Several prompts, or both kinds, would be padded to a graph of at
  least 256 tokens and 64 decodes.
- For as long, the engine launches a step only shortly before the end of the step before it
  (`expects_others`), because a sequence that arrives after the launch waits for the end of both
  steps.
"""

import sys
from collections.abc import Mapping

from services.decoder.engine.schedule.admission import Admission
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.schedule.step_cost import StepCost

# Number of steps after the last other sequence for which steps stay short.
_QUIET_STEPS = 4096
# The most steps in a row that leave the background out only because another sequence is there.
# With 40 requests a second of 200 words, whose answers have 8 tokens, an H200 with an 8B is without
# a request again after fewer steps.
_MOST_HELD_STEPS = 128
# Tokens of a short step that computes one prompt. Its graphs have all multiples of 64 tokens.
_PROMPT_TOKENS = 192
# While prompts of the background wait, one of so many short steps computes decodes.
_DECODES_PERIOD = 3


class Background:
    """The rules for the step that is planned.

    Attributes:
        holds: True if the step leaves out sequences in the background.
        is_short: True if the step is short.
        holds_prompts: True if the step leaves out prompts of sequences in the background.
        holds_decodes: True if the step leaves out decodes of sequences in the background.
    """

    def __init__(self) -> None:
        self._num = [0, 0]  # unfinished sequences: others, and those in the background
        self.holds = self.is_short = self.holds_prompts = self.holds_decodes = False
        self._step = 0
        self._busy_step = -_QUIET_STEPS  # last step with a sequence that is not in the background
        self._has_prompts = self._has_decodes = False  # sequences that the step might compute
        self._free_step = 0  # last step for which no sequence was kept waiting by another one

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

    def begin_step(
        self, step: int, prefilling: Mapping[int, Sequence], waiting: Admission, num_decodes: int
    ) -> None:
        """Decides the rules for a step.

        Args:
            step: number of the step.
            prefilling: sequences with a row and tokens of their prompts to compute, by id.
            waiting: sequences that wait for a row.
            num_decodes: number of sequences whose prompts are computed.
        """
        others, in_background = self._num
        self._step = step
        if others:
            self._busy_step = step
        if not others or not in_background:
            self._free_step = step
        self.holds = self.is_short = self.holds_prompts = self.holds_decodes = False
        if not in_background:
            return
        if others and step - self._free_step <= _MOST_HELD_STEPS:
            self.holds = True
        elif others:
            prompts = any([not sequence.message.background for sequence in prefilling.values()])
            self.holds = prompts or waiting.has_foreground
        self.is_short = not self.holds and self.expects_others
        self._has_prompts, self._has_decodes = bool(prefilling or len(waiting)), num_decodes > 0
        if not others:
            self._divide()

    def let_in(self) -> bool:
        """Lets sequences in the background into the step after all, because it would be empty.
        Returns whether the step would have left out any of them.
        """
        held, is_divided = self.holds, self.holds_prompts or self.holds_decodes
        self.holds = self.holds_prompts = self.holds_decodes = False
        self.is_short = self.expects_others
        if held:
            self._divide()
        return held or is_divided

    def _divide(self) -> None:
        """Decides whether a short step of the background computes a prompt or decodes."""
        if self.is_short and self._has_prompts and self._has_decodes:
            self.holds_prompts = self._step % _DECODES_PERIOD == 0
            self.holds_decodes = not self.holds_prompts

    def leaves_out(self, sequence: Sequence) -> bool:
        """Returns whether the step leaves out a sequence that has prompt tokens to compute."""
        return (self.holds or self.holds_prompts) and sequence.message.background

    def rest(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the sequences, whose prompts are computed, that the step does not leave out."""
        if self.holds or self.holds_decodes:
            return [s for s in sequences if not s.message.background]
        return sequences

    def step_ms(self, usual: float) -> float:
        """Returns the milliseconds that the step may last: `usual`, or 0 for the least that
        `StepCost.bound` allows.
        """
        return 0.0 if self.is_short else usual

    @property
    def max_chunks(self) -> int:
        """The most prompts of which the step computes tokens."""
        return 1 if self.holds_decodes else sys.maxsize

    def max_tokens(self, usual: int, num_decodes: int) -> int:
        """Returns the most tokens of the step, which has `num_decodes` decodes: `usual`, or those
        of a short step.
        """
        if self.holds_decodes:
            return min(usual, _PROMPT_TOKENS)
        return min(usual, StepCost.short_tokens(num_decodes)) if self.is_short else usual
