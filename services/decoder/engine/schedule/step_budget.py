"""The step budget: the time and the tokens that prompts may use in one step. Pure Python.

`StepCost` predicts how many milliseconds a step lasts, and how many prompt tokens fit
into the time that a step may last.
"""

import sys

from services.decoder.engine.schedule.step_cost import Limit, StepCost, StepLoad

# The steps of a prompt that is alone may last this many times as long, because they delay only
# requests that arrive meanwhile.
_LONE_PROMPT_FACTOR = 4


class StepBudget:
    """The time and the tokens of one step that are left for prompts.

    Args:
        cost: the model that predicts how long a step lasts.
        load: the work that is planned for the step: at first its decodes. `spend` adds prompts.
        step_ms: milliseconds that a step may last.
        max_tokens: the most tokens that a step may compute.
        alone: True if the engine has a single prompt and no decodes.
        max_chunks: the most prompts of which the step computes tokens.
        is_crowded: True if more than `StepCost.crowd_tokens` tokens of prompts wait.
    """

    def __init__(
        self,
        cost: StepCost,
        load: StepLoad,
        *,
        step_ms: float,
        max_tokens: int,
        alone: bool,
        max_chunks: int = sys.maxsize,
        is_crowded: bool = False,
    ) -> None:
        self._cost = cost
        self._load = load
        self._num_chunks, self._max_chunks = 0, max_chunks
        # `min_chunk` tokens of prompts may be computed even if the step then lasts longer than its
        # bound, because prompts would otherwise never advance beside many decodes.
        factor = _LONE_PROMPT_FACTOR if alone else 1
        least = min(max_tokens, load.tokens + factor * cost.min_chunk)
        whole = Limit(factor * cost.bound(step_ms), max_tokens, least)
        # A prompt is long if its tokens do not fit into a step of this size. Afterwards the size is
        # limited once more, to the most efficient one, which does not change which prompts are
        # long.
        self._longest_chunk = cost.fitting_tokens(load, 0, whole)
        if not alone:
            tokens = min(max_tokens, cost.efficient_tokens)
            ms = cost.sized_bound(whole.ms) if step_ms else whole.ms  # 0: as short as possible
            whole = whole._replace(ms=ms, tokens=tokens)
            if step_ms:
                extended = cost.extended_ms(whole.ms, is_crowded=is_crowded)
                whole = whole._replace(extended_ms=extended, extended_tokens=max_tokens)
        self._whole = self._limit = whole

    @property
    def is_spent(self) -> bool:
        """True if not one token of a prompt fits into the step any more."""
        if self._num_chunks == self._max_chunks:
            return True
        return not self._cost.fitting_tokens(self._load, 0, self._limit)

    def exceeds_step(self, num_tokens: int) -> bool:
        """Returns whether a chunk of `num_tokens` tokens would be too long for a step that computes
        no other prompt. False if no step may compute another prompt, which then need not wait.
        """
        return self._max_chunks > 1 and num_tokens > self._longest_chunk

    def reserve_half(self) -> None:
        """Makes half of the budget unavailable, until `release_half` is called."""
        self._limit = self._cost.half_limit(self._load, self._whole)

    def release_half(self) -> None:
        """Makes the whole budget available again."""
        self._limit = self._whole

    def fitting_tokens(self, start: int, left: int) -> int:
        """Returns how many tokens of a prompt still fit, if its first `start` tokens are computed
        and `left` tokens are left. The result may be more than these.

        Tokens that are late in a prompt attend to more keys and take longer.
        """
        return self._cost.fitting_tokens(self._load, start, self._limit, left)

    def spend(self, start: int, length: int) -> None:
        """Uses budget for the tokens [start, start + length) of a prompt."""
        self._load.add_chunk(start, length)
        self._num_chunks += 1
