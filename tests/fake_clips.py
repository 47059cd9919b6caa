"""A `ClipPool` whose files are bytes that a test names, read when the test says so."""

import threading
from queue import Queue

from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress
from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.questions import Facts
from tests.noise import PATIENCE_S

FACTS = Facts(2, 24.0, 48, 64, 1.0, b"a" * 16 + b"b" * 16)


class FakeClips:
    """In the place of a `ClipPool`. A file is two frames, or the error that `errors` has for it.

    Args:
        waits: each file is read when the test calls `finish` for it; else at once.

    Attributes:
        begun: files in the order in which their reading has begun.
        read: files that have been read.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.begun: Queue[bytes] = Queue()
        self.read: list[bytes] = []
        self.errors: dict[bytes, Exception] = {b"bad": InvalidVideo("the video is corrupt")}
        self._waits = waits
        self._may_end: dict[bytes, threading.Semaphore] = {}

    def probe(self, file: MemoryAddress) -> Facts:
        data = bytes(ForeignMemory(file).view(0, file.size_bytes))
        self.begun.put(data)
        if self._waits:
            assert self._end_of(data).acquire(timeout=PATIENCE_S)
        self.read.append(data)
        if data in self.errors:
            raise self.errors[data]
        return FACTS

    def finish(self, data: bytes) -> None:
        """Lets the reading of a file end, whether or not it has begun."""
        self._end_of(data).release()

    def _end_of(self, data: bytes) -> threading.Semaphore:
        """Returns the one semaphore of a file, whichever thread asks for it first."""
        return self._may_end.setdefault(data, threading.Semaphore(0))

    def close(self) -> None:
        """There is no process to end."""
