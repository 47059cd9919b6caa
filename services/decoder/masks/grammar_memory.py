"""The bound on the memory that grammars and matchers take in a process that fills masks.

What a grammar takes is not known before it has been compiled, and a matcher grows with its text, so
the bound is on the process: on what its resident memory has grown by since the vocabulary was read.
In this order, as memory fills: compiled grammars that no sequence has are forgotten, further
grammars wait, and sequences fail.
"""

import ctypes
from collections.abc import Callable

from llguidance import LLMatcher

from services.common.process.work_limits import resident_bytes

MAX_GRAMMAR_BYTES = 1 << 30
# A matcher that takes more fails alone: those of honest texts take 0.3 KiB a token.
_LEAST_STATE_BYTES = 64 << 20
_GROWTH = 1.25  # of the work on a matcher, from one measurement to the next
_STATES = 8  # matchers of the largest size that a process may have
_LARGE_ALLOCATION_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LIBC = ctypes.CDLL(None)


class GrammarMemory:
    """Says how full the memory is.

    Args:
        most_bytes: bound on the growth of this process.
        resident: function that returns the resident bytes of this process.
        first_measured_s: CPU seconds of its masks from which a matcher is measured. A state grows
            with the work on it, so that one of little work is small.

    Attributes:
        max_state_bytes: bound on the memory of one matcher's state.
    """

    def __init__(
        self,
        most_bytes: int = MAX_GRAMMAR_BYTES,
        resident: Callable[[], int] = resident_bytes,
        first_measured_s: float = 0.5,
    ) -> None:
        self._most_bytes, self._resident = most_bytes, resident
        self._first_measured_s = first_measured_s
        self._first_bytes: int | None = None
        self.max_state_bytes = max(most_bytes // _STATES, _LEAST_STATE_BYTES)

    def begin(self) -> None:
        """Takes what the process has now for its vocabulary, the first time that it is called."""
        if self._first_bytes is None:
            self._first_bytes = self._resident()

    @property
    def grown_bytes(self) -> int:
        """Bytes that the process has grown by since the vocabulary was read."""
        return 0 if self._first_bytes is None else self._resident() - self._first_bytes

    @property
    def is_half_full(self) -> bool:
        """Whether grammars that no sequence has are to be forgotten."""
        return self.grown_bytes > self._most_bytes // 2

    @property
    def has_room(self) -> bool:
        """Whether another grammar may be compiled. A quarter is left for sequences to grow."""
        return self.grown_bytes <= self._most_bytes // 4 * 3

    @property
    def is_over(self) -> bool:
        """Whether sequences have to give way."""
        return self.grown_bytes > self._most_bytes

    def measures(self, used_s: float, measured_at_s: float) -> bool:
        """Returns whether a matcher whose masks have taken `used_s` is to be measured, which it was
        when they had taken `measured_at_s`.
        """
        return used_s > max(self._first_measured_s, _GROWTH * measured_at_s)

    def size_of(self, *states: LLMatcher) -> int:
        """Returns about the bytes that the states of matchers take, measured with copies of them.
        What copies share, such as the lexer, is not in it.
        """
        before = self._resident()
        copies = [state.deep_copy() for state in states]
        size = self._resident() - before
        del copies
        return max(0, size)

    def release(self) -> None:
        """Gives the memory that has been freed back to the system."""
        trim = getattr(_LIBC, "malloc_trim", None)
        if trim is not None:
            trim(0)


def map_large_allocations() -> None:
    """Has the C library give large allocations back to the system as soon as they are freed. By
    default it would keep those of up to 32 MiB.
    """
    option = getattr(_LIBC, "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _LARGE_ALLOCATION_BYTES)
