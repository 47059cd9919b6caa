"""Token masks in memory that the front writes and the engine reads: only row numbers are sent.

A row is one sequence's for as long as the front knows it. The engine has copied a mask when it
sends the token that was sampled under it, and only then is the next one written.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

from services.common.shared_memory import PAGE_BYTES, ForeignMemory, MemoryAddress, create_memory
from services.decoder.engine.messages import MaskMemory

Int32Array = npt.NDArray[np.int32]


class MaskRows:
    """The front's side. It takes memory as rows are first written.

    Attributes:
        array: `[num_rows, num_words]` int32.
        message: with which the engine finds it.

    Args:
        num_rows, num_words: of the array.
        link: see `MaskMemory`.
    """

    def __init__(self, num_rows: int, num_words: int, link: int = -1) -> None:
        size_bytes = -(-4 * num_rows * num_words // PAGE_BYTES) * PAGE_BYTES
        self._fd, name = create_memory(size_bytes)
        memory = mmap.mmap(self._fd, size_bytes)
        self.array: Int32Array = np.frombuffer(memory, np.int32, num_rows * num_words)
        self.array = self.array.reshape(num_rows, num_words)
        self.message = MaskMemory(
            os.getpid(), self._fd, name, size_bytes, num_rows, num_words, link
        )
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int | None:
        """A row; None: all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, row: int) -> None:
        """Nobody writes to the row any more."""
        self._free.append(row)

    def close(self) -> None:
        """No engine can open it any more."""
        os.close(self._fd)


def open_rows(message: MaskMemory) -> Int32Array:
    """The engine's side: `[num_rows, num_words]`, read-only.

    Raises:
        NotReadable: this process may not open it.
    """
    memory = ForeignMemory(MemoryAddress(message.pid, message.fd, message.name, message.size_bytes))
    count = message.num_rows * message.num_words
    words = np.frombuffer(memory.view(0, 4 * count), np.int32)
    return words.reshape(message.num_rows, message.num_words)
