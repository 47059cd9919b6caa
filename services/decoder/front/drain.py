"""Chooses the sequences that a draining decoder hands over to other decoders, and their times.

A sequence may need more time than the drain's grace period leaves. Such sequences are handed over
in the second half of the grace period, because many sequences end by themselves before. The
sequences with the most tokens left go first. Hand-overs are spread evenly over time, so that no
decoder receives all prompts at once.
"""

import math
from collections.abc import Mapping

# Fractions of the grace period at which the first and the last sequence are handed over. A sequence
# needs the rest of the grace period to move.
_FIRST, _LAST = 0.5, 0.9
_PERIODS = 20
_MAX_PERIOD_S = 1.0


class Drain:
    """The schedule of one drain of a decoder. All times are seconds of the same monotonic clock.

    Args:
        now: time at which the drain starts.
        grace_s: length of the grace period, in seconds.

    Attributes:
        ends_at: time at which the grace period ends.
        period_s: seconds between two calls of `due`.
    """

    def __init__(self, now: float, grace_s: float) -> None:
        self._first_at = now + _FIRST * grace_s
        self._last_at = now + _LAST * grace_s
        self.ends_at = now + grace_s
        self.period_s = min(_MAX_PERIOD_S, grace_s / _PERIODS)
        self._handed_over: set[int] = set()

    def due(self, now: float, seconds_left: Mapping[int, float]) -> list[int]:
        """Returns the numbers of the sequences to hand over now. No number is returned twice.

        Args:
            now: current time.
            seconds_left: estimated time that each running sequence still needs, by its number.
        """
        if now < self._first_at:
            return []
        outlasting = [
            number
            for number, left in seconds_left.items()
            if number not in self._handed_over and left > self.ends_at - now
        ]
        outlasting.sort(key=lambda number: seconds_left[number], reverse=True)
        num_calls_left = 1 + max(0, math.floor((self._last_at - now) / self.period_s))
        numbers = outlasting[: math.ceil(len(outlasting) / num_calls_left)]
        self._handed_over.update(numbers)
        return numbers
