"""The type of the clocks that tests replace."""

from collections.abc import Callable

# Returns seconds that only grow, as `time.monotonic`.
Clock = Callable[[], float]
