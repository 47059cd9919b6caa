"""Readers of embeddings, which may read an embedding while it is still being written."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding_write import EmbeddingWrite, Range


class Progress(Protocol):
    """A reader that wants to know, while it waits, whether its embedding is under way."""

    async def report(self, *, in_work: bool) -> None:
        """Tells the reader whether an encode of the embedding has started."""
        ...


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits on behalf of one reader.

    Attributes:
        progress: gets a report now and then during a wait. None if the reader wants no reports.
        report_s: seconds between two reports.
    """

    progress: Progress | None
    report_s: float

    async def wait_first(self, awaited: "set[asyncio.Future[Any]]", *, in_work: bool) -> None:
        """Waits until one of the futures is done, and reports progress meanwhile.

        Args:
            awaited: the futures.
            in_work: whether an encode of the embedding has started.
        """
        timeout_s = self.report_s if self.progress else None
        while True:
            done, _ = await asyncio.wait(
                awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            assert self.progress is not None
            await self.progress.report(in_work=in_work)


@dataclass(frozen=True, slots=True)
class Reading:
    """An acquired entry, which can be read while it is being written.

    Attributes:
        entry: the entry, released by the owner of the reading.
        waiter: waits on behalf of the reader.
        write: the writing of the entry. None if the entry was complete already.
        lookup: future of the lookup that writes the entry. None without `write`.
    """

    entry: ArenaEntry
    waiter: Waiter
    write: EmbeddingWrite | None = None
    lookup: "asyncio.Future[str] | None" = None

    async def ranges(self) -> AsyncGenerator[Range]:
        """Yields the ranges of the tensor's bytes, each as soon as it is written, until the end.

        Raises:
            TriptychError: the encode failed, and the bytes that were read are invalid.
        """
        write, lookup = self.write, self.lookup
        if write is None or lookup is None:
            yield 0, self.entry.spec.size_bytes
            return
        num_sent = 0
        while True:
            while num_sent < len(write.ranges):
                yield write.ranges[num_sent]
                num_sent += 1
            if self.entry.committed:
                return
            if lookup.done():
                lookup.result()
                assert self.entry.committed
                continue
            awaited = {lookup, write.changed} if write.changed else {lookup}
            await self.waiter.wait_first(awaited, in_work=True)
