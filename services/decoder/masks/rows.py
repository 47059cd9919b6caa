"""Token masks in shared memory. A mask process fills the rows, and the engine reads them. Messages
carry row numbers only.

A sequence has a row until the front removes the sequence, or several rows if it may have drafts:
the first for its next token, and one for the token behind each of its drafts. The engine copies
a mask before it sends the token that was sampled under the mask, and the process writes the next
mask after this token.
The memory begins with marks of the sequences that the process works on. If the process dies, the
front finds in the marks which sequence may be the cause.
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
# Rows for sequences that have ended while a thread still fills their masks.
SPARE_ROWS = 128
PROBE_WORDS = 2  # words behind each mask; see `bounded_strings`
# A process works on up to four sequences at once: in its event loop and in three threads.
FILLING, QUICK, SLOW, CLIENTS = _SLOTS = (0, 1, 2, 3)


def create_mask_memory(num_rows: int, num_words: int) -> int:
    """Creates memory for marks and rows. Returns its file descriptor."""
    return create_memory(ROWS_OFFSET + -(-4 * num_rows * num_words // PAGE_BYTES) * PAGE_BYTES)[0]


def num_mask_words(vocab_size: int) -> int:
    """Returns the number of 32-bit words in which a mask and its probes are filled."""
    return -(-vocab_size // 32) + PROBE_WORDS


class Marks:
    """Marks of the sequences that a process works on, in shared memory.

    Args:
        fd: descriptor of the memory.
    """

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
        """Marks the begin of work on a sequence in a slot. The number 0 marks its end."""
        self._times[slot] = time.monotonic()
        self._numbers[slot] = number

    @contextmanager
    def during(self, slot: int, number: int) -> Generator[None]:
        """Marks a sequence during a `with` block."""
        self.set(slot, number)
        try:
            yield
        finally:
            self.set(slot, 0)

    def get(self) -> list[tuple[int, float]]:
        """Returns the numbers of the sequences that the process works on, each with the time at
        which the work began, as `time.monotonic()`.
        """
        return [(self._numbers[at], self._times[at]) for at in _SLOTS if self._numbers[at]]


class MaskRows:
    """The rows of a process. The memory of a row is allocated at the first write.

    Args:
        fd: descriptor of the memory.
        num_sequences: largest number of sequences.
        num_words: number of 32-bit words of a row.
        count: number of rows of a sequence.

    Attributes:
        marks: marks of the sequences that the process works on.
        array: all rows, `[num_sequences * count, num_words]` int32.
        count: number of rows of a sequence.
    """

    def __init__(self, fd: int, num_sequences: int, num_words: int, count: int = 1) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.marks = Marks(fd)
        num_rows = num_sequences * count
        words = np.frombuffer(memory, np.int32, num_rows * num_words, ROWS_OFFSET)
        self.array: Int32Array = words.reshape(num_rows, num_words)
        self.count = count
        self._free = list(range(num_rows - count, -1, -count))

    def take(self) -> int | None:
        """Returns the first of a sequence's rows, which are free. None if all rows are taken."""
        return self._free.pop() if self._free else None

    def release(self, row: int) -> None:
        """Frees the rows of a sequence that has ended. No thread may write to them any more."""
        self._free.append(row)
