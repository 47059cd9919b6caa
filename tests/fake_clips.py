"""An `EngineClient` whose files are bytes that a test names, read when the test says so."""

import asyncio
from collections import defaultdict

from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress
from services.common.errors import InvalidVideo
from services.encoder.decoding.tasks import Facts
from tests.noise import PATIENCE_S

FACTS = Facts(2, 24.0, 48, 64, 1.0, b"a" * 16 + b"b" * 16)


class FakeClips:
    """In the place of an `EngineClient`. A file is two frames, or its error in `errors`.

    Args:
        waits: each file is read when the test calls `finish` for it; else at once.

    Attributes:
        begun: files in the order in which their reading has begun.
        read: files that have been read.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.begun: asyncio.Queue[bytes] = asyncio.Queue()
        self.read: list[bytes] = []
        self.errors: dict[bytes, Exception] = {b"bad": InvalidVideo("the video is corrupt")}
        self._waits = waits
        self._may_end: defaultdict[bytes, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(0)
        )
        self._reading: set[asyncio.Task[Facts]] = set()

    def probe(self, file: MemoryAddress) -> asyncio.Future[Facts]:
        data = bytes(ForeignMemory(file).view(0, file.size_bytes))
        self.begun.put_nowait(data)
        reading = asyncio.create_task(self._read(data))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    async def next_begun(self) -> bytes:
        """The file whose reading begins next."""
        return await asyncio.wait_for(self.begun.get(), PATIENCE_S)

    def finish(self, data: bytes) -> None:
        """Lets the reading of a file end, whether or not it has begun."""
        self._may_end[data].release()

    async def _read(self, data: bytes) -> Facts:
        if self._waits:
            await asyncio.wait_for(self._may_end[data].acquire(), PATIENCE_S)
        self.read.append(data)
        if data in self.errors:
            raise self.errors[data]
        return FACTS
