"""Which sequences a draining decoder offers to other decoders, and when.

A sequence may outlast the grace if the tokens that it may still generate take longer. Such
sequences are offered in the second half of the grace: many end by themselves before. Those with the
most to do go first, evenly spread, so that the others do not get all prompts at once.
"""

import math
from collections.abc import Mapping

# Of the grace: when the first is offered and when the last one, which leaves time to move.
_FIRST, _LAST = 0.5, 0.9
_PERIODS = 20
_MAX_PERIOD_S = 1.0


class Departure:
    """One drain. Times are of any clock, in seconds.

    Attributes:
        ends_at: when the grace is over.
        period_s: how often `due` is to be asked.
    """

    def __init__(self, now: float, grace_s: float) -> None:
        self._first_at = now + _FIRST * grace_s
        self._last_at = now + _LAST * grace_s
        self.ends_at = now + grace_s
        self.period_s = min(_MAX_PERIOD_S, grace_s / _PERIODS)
        self._offered: set[int] = set()

    def due(self, now: float, seconds: Mapping[int, float]) -> list[int]:
        """The sequences to offer now, each once; `seconds`: what each that runs may still take."""
        if now < self._first_at:
            return []
        outlasting = [
            number
            for number, left in seconds.items()
            if number not in self._offered and left > self.ends_at - now
        ]
        outlasting.sort(key=lambda number: seconds[number], reverse=True)
        num_times = 1 + max(0, math.floor((self._last_at - now) / self.period_s))
        numbers = outlasting[: math.ceil(len(outlasting) / num_times)]
        self._offered.update(numbers)
        return numbers
