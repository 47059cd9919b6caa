"""The simulated clock: what happens next."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """An event queue. Events of the same time happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any = None) -> None:  # noqa: ANN401
        """Calls `action(argument)` at `time`, which is not in the past."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action, argument))

    def run(self, until: float) -> None:
        """Runs all events up to `until`."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, action, argument = pop(events)
            action(argument)
        self.now = max(self.now, until)
