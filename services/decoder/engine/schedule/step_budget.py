"""The time and the tokens that prompts may use in one step. Pure Python."""

from services.decoder.engine.schedule.step_cost import Limit, StepCost, StepLoad

# The step of a lone prompt delays nobody but requests that arrive meanwhile.
_LONE_PROMPT_FACTOR = 4


class StepBudget:
    """The time and tokens of a step that are left for prompts, beside the planned decodes.

    Args:
        cost: the model that predicts how long a step lasts.
        load: the step's work so far; `spend` adds to it.
        step_ms: milliseconds that a step may last.
        max_tokens: the most tokens that a step may compute.
        alone: True if one prompt is all there is. Its step may last four times as long.
    """

    def __init__(
        self, cost: StepCost, load: StepLoad, *, step_ms: float, max_tokens: int, alone: bool
    ) -> None:
        self._cost = cost
        self._load = load
        # The bound is the time that the step may last. So that prompts always advance, `min_chunk`
        # tokens of them may be computed even if the step then lasts longer.
        factor = _LONE_PROMPT_FACTOR if alone else 1
        least = min(max_tokens, load.tokens + factor * cost.min_chunk)
        whole = Limit(factor * cost.bound(step_ms), max_tokens, least)
        # A prompt is long if it exceeds the time or the tokens of a step. If it exceeds only the
        # efficient number of tokens, it is not, so the longest chunk is found before that cap.
        self._longest_chunk = cost.fitting_tokens(load, 0, whole)
        if not alone:
            whole = whole._replace(tokens=min(max_tokens, cost.efficient_tokens))
        self._whole = self._limit = whole

    @property
    def is_spent(self) -> bool:
        """True if no token of a prompt fits any more."""
        return not self._cost.fitting_tokens(self._load, 0, self._limit)

    def exceeds_step(self, num_tokens: int) -> bool:
        """Returns whether `num_tokens` tokens of one prompt exceed a step without other prompts."""
        return num_tokens > self._longest_chunk

    def reserve_half(self) -> None:
        """Withholds half of the budget until `release_half`."""
        self._limit = self._cost.half_limit(self._load, self._whole)

    def release_half(self) -> None:
        """Makes the whole budget available again."""
        self._limit = self._whole

    def fitting_tokens(self, start: int) -> int:
        """Returns how many tokens fit of a prompt whose first `start` tokens are computed."""
        return self._cost.fitting_tokens(self._load, start, self._limit)

    def spend(self, start: int, length: int) -> None:
        """Takes tokens [start, start + length) of a prompt out of the budget."""
        self._load.add_chunk(start, length)
