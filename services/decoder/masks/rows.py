"""Token masks in memory that a process fills and the engine reads: only row numbers are sent.

A row is one sequence's for as long as the process knows it. The engine has copied a mask when it
sends the token that was sampled under it, and only then is the next one written. Before the rows
the process marks which sequences it works on, so that the front knows which one has ended it.
"""

import mmap
import os
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from services.common.embeddings.shared_memory import PAGE_BYTES, create_memory

Int32Array = npt.NDArray[np.int32]

ROWS_OFFSET = PAGE_BYTES
# For sequences that have ended, and whose masks are still being filled.
SPARE_ROWS = 128
PROBE_WORDS = 2  # behind each mask, see `bounded_strings`
# What a process may work on at once: in its event loop, and in two threads.
FILLING, QUICK, SLOW = _SLOTS = (0, 1, 2)


def create_mask_memory(num_rows: int, num_words: int) -> int:
    """Memory of marks and rows; its descriptor."""
    return create_memory(ROWS_OFFSET + -(-4 * num_rows * num_words // PAGE_BYTES) * PAGE_BYTES)[0]


def num_mask_words(vocab_size: int) -> int:
    """Of the memory that a mask is filled in."""
    return -(-vocab_size // 32) + PROBE_WORDS


class Marks:
    """Which sequence is in work in each slot, and since when, as `time.monotonic()`."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._numbers = memoryview(self._memory)[:64].cast("q")
        self._times = memoryview(self._memory)[64:128].cast("d")

    @classmethod
    def unshared(cls) -> "Marks":
        """Makes marks that no other process reads."""
        memory, _ = create_memory(PAGE_BYTES)
        try:
            return cls(memory)
        finally:
            os.close(memory)

    def set(self, slot: int, number: int) -> None:
        """Work on a sequence begins; 0: it is done."""
        self._times[slot] = time.monotonic()
        self._numbers[slot] = number

    @contextmanager
    def during(self, slot: int, number: int) -> Generator[None]:
        """Within the block a sequence is in work."""
        self.set(slot, number)
        try:
            yield
        finally:
            self.set(slot, 0)

    def get(self) -> list[tuple[int, float]]:
        """Sequences in work, and since when."""
        return [(self._numbers[at], self._times[at]) for at in _SLOTS if self._numbers[at]]


class MaskRows:
    """The rows of a process. It takes memory as rows are first written.

    Attributes:
        array: `[num_rows, num_words]` int32.
    """

    def __init__(self, fd: int, num_rows: int, num_words: int) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.marks = Marks(fd)
        words = np.frombuffer(memory, np.int32, num_rows * num_words, ROWS_OFFSET)
        self.array: Int32Array = words.reshape(num_rows, num_words)
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int | None:
        """A row; None: all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, row: int) -> None:
        """The row's sequence has ended, and nothing writes to it."""
        self._free.append(row)
