"""The embeddings in this pod's arena: reserving, writing, reading while written, digests.

`Embeddings` and `BroughtEmbeddings` write here, the servicer reads through `Reading`. No room in
time is `Overloaded`.

An embedding is written by the engine feature by feature. Readers may have each range as soon as it
is written; threads digest it meanwhile; `commit` says that all of it is good.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import (
    EmbeddingSpec,
    TensorDigest,
    split_blocks,
    split_evenly,
)
from services.common.errors import Overloaded
from services.common.threads import num_threads

# Readers release their entries soon, but the largest images take seconds to encode.
_RESERVE_TIMEOUT_S = 60.0
_UNREAD_POLL_S = 0.005
_CLOSE_ATTEMPTS = 50
# A reader that asks for it is told so often that there is nothing new.
WORD_S = 2.0
Word = Callable[[bool], Awaitable[None]]  # is called with whether the embedding is in work
Range = tuple[int, int]  # bytes of the tensor, [start, stop)


@dataclass(slots=True)
class _Partial:
    """An embedding that is being written, or is not digested yet.

    Attributes:
        changed: done when `ranges` has grown, or will grow no more.
        ranges: in the order they were written.
        num_digesting: jobs of threads that digest these ranges.
        digested: ends in the digest; made by `commit`.
    """

    digest: TensorDigest
    changed: asyncio.Future[None]
    ranges: list[Range] = field(default_factory=list[Range])
    num_digesting: int = 0
    digested: asyncio.Future[bytes] | None = None


@dataclass(frozen=True, slots=True)
class _EntryClaim(Claim[ArenaEntry]):
    """A claim of one embedding's entry: the complete entry if there is one, else a new entry."""

    arena: Arena
    key: bytes
    spec: EmbeddingSpec

    def attempt(self) -> ArenaEntry | None:
        if entry := self.arena.get(self.key):
            self.arena.acquire(entry)
            return entry
        return self.arena.try_reserve(self.key, self.spec)  # KeyError: a cancelled job writes there

    def undo(self, result: ArenaEntry) -> None:
        self.arena.release(result)


class MemoryTier:
    """The arena's embeddings, complete or being written. One event loop owns it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._partials: dict[ArenaEntry, _Partial] = {}
        # A pool of its own, not run_in_executor: wrapping its futures costs the event loop more
        # than the digest costs a thread.
        self._threads = ThreadPoolExecutor(num_threads(), "digest")

    def try_hold(self, entry: ArenaEntry) -> bool:
        """Takes a reference to an entry that is complete or being written; False: its writing has
        failed, or it has been evicted.
        """
        readable = self.arena.has(entry) and (entry.committed or entry in self._partials)
        if readable:
            self.arena.acquire(entry)
        return readable

    async def reserve(self, key: bytes, spec: EmbeddingSpec) -> ArenaEntry:
        """Room for an embedding, or its complete entry if one appears meanwhile.

        Returns:
            An entry with a reference for the caller, which is its writer if it is not committed.

        Raises:
            Overloaded: there was no room for too long.
        """
        try:
            async with asyncio.timeout(_RESERVE_TIMEOUT_S):
                return await self.arena.claim(_EntryClaim(self.arena, key, spec))
        except TimeoutError:
            raise Overloaded("no memory for the embedding", retry_after_s=1.0) from None

    # Writing.

    def begin(self, entry: ArenaEntry) -> None:
        """Called by the writer of a held entry before it writes; `commit` or `abort` follows."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._partials[entry] = _Partial(TensorDigest(self.arena.view(entry)), changed)

    def add_range(self, entry: ArenaEntry, start: int, stop: int) -> None:
        """These bytes are written, before the entry is complete: readers may have them, and a
        thread digests them.
        """
        partial = self._partials[entry]
        self._digest_range(entry, partial, (start, stop), 1)
        partial.changed.set_result(None)
        partial.changed = asyncio.get_running_loop().create_future()

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the bytes complete. Threads digest the ranges that they have not seen yet."""
        partial = self._partials[entry]
        partial.digested = asyncio.get_running_loop().create_future()
        for gap in _gaps(partial.ranges, entry.spec.size_bytes):
            self._digest_range(entry, partial, gap, num_threads())  # a reader waits for it
        partial.changed.set_result(None)
        self._finish_if_digested(entry, partial)
        self.arena.commit(entry)

    def abort(self, entry: ArenaEntry) -> None:
        """Called when the writing has failed; the writer still releases its reference."""
        self._partials.pop(entry).changed.set_result(None)

    # Reading.

    def written_ranges(self, entry: ArenaEntry) -> list[Range]:
        """What can be read of a held entry, in the order it was written; the list grows while the
        entry is being written.
        """
        if partial := self._partials.get(entry):
            return partial.ranges
        return [(0, entry.spec.size_bytes)]

    def changed(self, entry: ArenaEntry) -> "asyncio.Future[None] | None":
        """Done when `written_ranges` has grown, or will grow no more; None: the writing is over.
        All readers share it, so none may cancel it.
        """
        partial = self._partials.get(entry)
        return None if partial is None else partial.changed

    async def digest_of(self, entry: ArenaEntry) -> bytes:
        """The digest of a committed, held entry; computed once."""
        if (partial := self._partials.get(entry)) and partial.digested:
            return await asyncio.shield(partial.digested)
        return entry.digest

    async def until_unread(self, entry: ArenaEntry, timeout_s: float) -> None:
        """Returns when only the caller refers to the entry, or after that time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while entry.references > 1 and loop.time() < deadline:  # noqa: ASYNC110 - has no event
            await asyncio.sleep(_UNREAD_POLL_S)

    async def close(self) -> None:
        """Waits for running digests and unmaps the memory."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.sleep(0)  # the callbacks that the threads have left to this loop
        self._partials.clear()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that has ended may still hold its view for a moment.
                await asyncio.sleep(0.01)

    def _digest_range(
        self, entry: ArenaEntry, partial: _Partial, written: Range, max_jobs: int
    ) -> None:
        partial.ranges.append(written)
        loop = asyncio.get_running_loop()

        def digested(job: Future[None]) -> None:  # in the thread
            loop.call_soon_threadsafe(self._digested, entry, partial, job)

        for ranges in split_evenly(split_blocks(*written), max_jobs):
            self.arena.acquire(entry)
            partial.num_digesting += 1
            self._threads.submit(_digest, partial.digest, ranges).add_done_callback(digested)

    def _digested(self, entry: ArenaEntry, partial: _Partial, job: Future[None]) -> None:
        """Called when a job has ended; releases the reference that `_digest_range` took."""
        job.result()  # it raises nothing
        partial.num_digesting -= 1
        self.arena.release(entry)
        self._finish_if_digested(entry, partial)

    def _finish_if_digested(self, entry: ArenaEntry, partial: _Partial) -> None:
        if partial.digested is not None and partial.num_digesting == 0:
            entry.digest = partial.digest.finish()
            del self._partials[entry]
            partial.digested.set_result(entry.digest)


@dataclass(frozen=True, slots=True)
class Reading:
    """A held entry, and how to read it while it is being written.

    Attributes:
        work: the encode that writes it; None: the entry is complete.
    """

    entry: ArenaEntry
    memory: MemoryTier
    written: list[Range]
    work: "asyncio.Future[Any] | None" = None

    async def ranges(self, word: "Word | None" = None) -> AsyncGenerator[Range]:
        """The ranges of the tensor's bytes, each as soon as it is written, until all are; `word` is
        called while there is none.

        Raises:
            TriptychError: the encode failed; what has been read is void.
        """
        num_sent = 0
        while True:
            while num_sent < len(self.written):
                yield self.written[num_sent]
                num_sent += 1
            if self.entry.committed:
                return
            assert self.work is not None
            if self.work.done():
                self.work.result()
                assert self.entry.committed
                continue
            changed = self.memory.changed(self.entry)
            awaited = {self.work, changed} if changed else {self.work}
            await first_of(awaited, word)


async def first_of(
    awaited: "set[asyncio.Future[Any]]", word: Word | None, *, in_work: bool = True
) -> None:
    """Returns when one of them is done. None is cancelled; `word` is called now and then."""
    while not (
        await asyncio.wait(
            awaited, timeout=WORD_S if word else None, return_when=asyncio.FIRST_COMPLETED
        )
    )[0]:
        assert word is not None
        await word(in_work)


def _digest(digest: TensorDigest, ranges: list[Range]) -> None:
    for start, stop in ranges:
        digest.add(start, stop)


def _gaps(ranges: list[Range], size: int) -> list[Range]:
    """What is missing of [0, size)."""
    bounds = [0, *(bound for each in sorted(ranges) for bound in each), size]
    return [
        (stop, start) for stop, start in zip(bounds[::2], bounds[1::2], strict=True) if stop < start
    ]
