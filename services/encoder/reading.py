"""Reading an embedding while it comes about."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.common.arena import ArenaEntry
from services.common.errors import EmbeddingUnavailable, InvalidRequest, TriptychError
from services.encoder.memory_tier import MemoryTier, Range


@dataclass(frozen=True, slots=True)
class Reading:
    """A held entry, and how to read it while it comes about.

    Attributes:
        entry: complete, or written by the work on it.
        there: what can be read of it; grows until it is complete.
        work: that work; None: the entry is complete.
    """

    entry: ArenaEntry
    memory: MemoryTier
    there: list[Range]
    work: "asyncio.Future[Any] | None" = None

    async def ranges(self) -> AsyncGenerator[Range]:
        """The ranges of the tensor's bytes, each as soon as it is there, until all are.

        Raises:
            InvalidRequest: the image can be encoded nowhere.
            EmbeddingUnavailable: the work failed; what was read is void.
        """
        sent = 0
        while True:
            while sent < len(self.there):
                yield self.there[sent]
                sent += 1
            if self.entry.committed:
                return
            assert self.work is not None
            if self.work.done():
                with unavailable():
                    self.work.result()
                assert self.entry.committed
                continue
            change = self.memory.change(self.entry)
            awaited = {self.work, change} if change else {self.work}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


@contextmanager
def unavailable() -> Generator[None]:
    """Work that failed, as a reader is told of it."""
    try:
        yield
    except InvalidRequest:
        raise
    except TriptychError as error:
        raise EmbeddingUnavailable(f"the image was not encoded: {error.message}") from None
