"""The bound on the memory that grammars and matchers take in a mask process.

The memory of a grammar is not known before the grammar has been compiled, and a matcher grows with
its text. The bound therefore applies to the growth of the process's resident memory since the
vocabulary was read. As memory fills, the process first drops compiled grammars that no sequence
uses, then lets further grammars wait, and finally lets sequences fail.
"""

import ctypes

from llguidance import LLMatcher

from services.common.process.work_limits import SLACK_BYTES, resident_bytes

MAX_GRAMMAR_BYTES = 1 << 30
# Memory that the compile process allows one grammar. The largest schema of JSONSchemaBench takes 22
# MiB, and 24 KB of a regular expression of Unicode classes take 65.
MAX_COMPILATION_BYTES = 64 << 20
# A matcher that takes more memory fails. Matchers of ordinary texts take 0.3 KiB per token.
_LEAST_STATE_BYTES = 64 << 20
_GROWTH = 1.25  # growth of the CPU time of a matcher between two measurements
_STATES = 8  # matchers of the largest size that a process may have
_LARGE_ALLOCATION_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # constant of malloc.h
_LIBC = ctypes.CDLL(None)


class GrammarMemory:
    """Measures how full the memory of the process is.

    Args:
        most_bytes: bound on the growth of this process.
        first_measured_s: CPU seconds after which a matcher is measured for the first time. The
            state of a matcher grows with the work on it, so it is small before.
        compilation_bytes: bytes that one compilation may take.

    Attributes:
        max_state_bytes: bound on the memory of one matcher's state.
    """

    def __init__(
        self,
        most_bytes: int = MAX_GRAMMAR_BYTES,
        first_measured_s: float = 0.5,
        compilation_bytes: int = MAX_COMPILATION_BYTES + SLACK_BYTES,
    ) -> None:
        self._most_bytes = most_bytes
        self._first_measured_s = first_measured_s
        self._compilation_bytes = compilation_bytes
        self._first_bytes: int | None = None
        self.max_state_bytes = max(most_bytes // _STATES, _LEAST_STATE_BYTES)

    @property
    def resident_bytes(self) -> int:
        """Number of resident bytes of this process."""
        return resident_bytes()

    def begin(self) -> None:
        """Records the memory of the process with its vocabulary, at the first call."""
        if self._first_bytes is None:
            self._first_bytes = self.resident_bytes

    @property
    def grown_bytes(self) -> int:
        """Number of bytes by which the process has grown since the vocabulary was read."""
        return 0 if self._first_bytes is None else self.resident_bytes - self._first_bytes

    @property
    def is_half_full(self) -> bool:
        """Returns whether compiled grammars that no sequence uses are to be dropped."""
        return self.grown_bytes > self._most_bytes // 2

    def has_room_beside(self, num_compiling: int) -> bool:
        """Returns whether another grammar may be compiled. The last quarter of the memory is left
        for this grammar and for the growth of running sequences.

        Args:
            num_compiling: number of grammars that are being compiled.
        """
        reserved = num_compiling * self._compilation_bytes
        return self.grown_bytes + reserved <= self._most_bytes // 4 * 3

    @property
    def is_over(self) -> bool:
        """Returns whether sequences have to be ended."""
        return self.grown_bytes > self._most_bytes

    def measures(self, used_s: float, measured_at_s: float) -> bool:
        """Returns whether a matcher is to be measured.

        Args:
            used_s: CPU seconds that the matcher has taken.
            measured_at_s: CPU seconds that the matcher had taken at its last measurement.
        """
        return used_s > max(self._first_measured_s, _GROWTH * measured_at_s)

    def size_of(self, *states: LLMatcher) -> int:
        """Returns the approximate bytes of the states of matchers, measured by copying them. Memory
        that copies share, such as the lexer, is not counted.
        """
        before = self.resident_bytes
        copies = [state.deep_copy() for state in states]
        size = self.resident_bytes - before
        del copies
        return max(0, size)

    def release(self) -> None:
        """Returns freed memory to the operating system."""
        trim = getattr(_LIBC, "malloc_trim", None)
        if trim is not None:
            trim(0)


def map_large_allocations() -> None:
    """Configures the C library to return large allocations to the operating system as soon as they
    are freed. By default, it caches allocations of up to 32 MiB.
    """
    option = getattr(_LIBC, "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _LARGE_ALLOCATION_BYTES)
