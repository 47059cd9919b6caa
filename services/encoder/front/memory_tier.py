"""The memory tier: embeddings in the arena, complete or while they are written.

`Embeddings` and `ClientEmbeddings` write embeddings, and the servicer reads them through `Reading`.
The engine writes an embedding feature by feature. Readers get each range of bytes as soon as it is
written, and threads digest the range meanwhile. `commit` says that the whole embedding is right.
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import (
    EmbeddingSpec,
    TensorDigest,
    split_blocks,
    split_evenly,
)
from services.common.errors import Overloaded
from services.common.threads import name_thread, num_threads

# Readers release their entries soon, but the largest images take seconds to encode.
_RESERVE_TIMEOUT_S = 60.0
_UNREAD_POLL_S = 0.005
_CLOSE_ATTEMPTS = 50
Range = tuple[int, int]  # bytes of the tensor, [start, stop)


class Progress(Protocol):
    """A reader that wants to know, while it waits, whether its embedding is under way."""

    async def report(self, *, in_work: bool) -> None:
        """Tells the reader whether an encode of the embedding has started."""
        ...


@dataclass(slots=True)
class _Partial:
    """An embedding that is being written, or whose digest is not known yet.

    Attributes:
        digest: the digest of the ranges so far.
        changed: future that is done when `ranges` has grown, or will grow no more.
        ranges: ranges of bytes in the order in which they were written.
        num_digesting: number of jobs of threads that digest these ranges.
        digested: future of the digest. None before `commit`.
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
    """Owner of the embeddings in the arena. One event loop uses it.

    Args:
        arena: the shared memory.
        min_streamed_bytes: smallest size of an embedding whose features are offered to readers one
            by one. The messages for the features of a smaller embedding would cost more time than
            they hide.
        report_s: seconds between two progress reports to a reader that waits.
    """

    def __init__(
        self, arena: Arena, *, min_streamed_bytes: int = 8 << 20, report_s: float = 2.0
    ) -> None:
        self.arena = arena
        self._min_streamed_bytes = min_streamed_bytes
        self._report_s = report_s
        self._partials: dict[ArenaEntry, _Partial] = {}
        # The threads are used without run_in_executor: wrapping its futures costs the event loop
        # more than the digest costs a thread.
        self._threads = ThreadPoolExecutor(num_threads(), "digest", name_thread)

    @property
    def num_partial(self) -> int:
        """Number of embeddings that are being written or digested."""
        return len(self._partials)

    def try_acquire(self, entry: ArenaEntry) -> bool:
        """Takes a reference to an entry that is complete or being written.

        Returns False if writing the entry has failed, or if it has been evicted.
        """
        readable = self.arena.has(entry) and (entry.committed or entry in self._partials)
        if readable:
            self.arena.acquire(entry)
        return readable

    async def reserve(self, key: bytes, spec: EmbeddingSpec) -> ArenaEntry:
        """Reserves memory for an embedding, unless a complete entry appears meanwhile.

        Returns:
            An entry with a reference for the caller. The caller is the writer of the entry if it is
            not committed.

        Raises:
            Overloaded: no memory was free for too long.
        """
        try:
            async with asyncio.timeout(_RESERVE_TIMEOUT_S):
                return await self.arena.claim(_EntryClaim(self.arena, key, spec))
        except TimeoutError:
            raise Overloaded("no memory for the embedding", retry_after_s=1.0) from None

    # Writing.

    def begin(self, entry: ArenaEntry) -> None:
        """Starts the writing of a reserved entry, which `commit` or `abort` has to end."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._partials[entry] = _Partial(TensorDigest(self.arena.view(entry)), changed)

    def add_range(self, entry: ArenaEntry, start: int, stop: int) -> None:
        """Offers bytes that are written to readers, and starts to digest them in a thread."""
        partial = self._partials[entry]
        self._digest_range(entry, partial, (start, stop), 1)
        partial.changed.set_result(None)
        partial.changed = asyncio.get_running_loop().create_future()

    def feature_written(self, entry: ArenaEntry, feature: int) -> None:
        """Offers a written feature to readers if the embedding is large; others will follow."""
        if entry.spec.size_bytes >= self._min_streamed_bytes:
            size = entry.spec.size_bytes // entry.spec.num_features
            self.add_range(entry, feature * size, (feature + 1) * size)

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the embedding complete, and starts to digest what was not digested yet."""
        partial = self._partials[entry]
        partial.digested = asyncio.get_running_loop().create_future()
        for gap in _gaps(partial.ranges, entry.spec.size_bytes):
            self._digest_range(entry, partial, gap, num_threads())  # a reader may be waiting
        partial.changed.set_result(None)
        self._finish_if_digested(entry, partial)
        self.arena.commit(entry)

    def abort(self, entry: ArenaEntry) -> None:
        """Gives up a writing that has failed; the writer still releases its reference."""
        self._partials.pop(entry).changed.set_result(None)

    # Reading.

    async def wait_first(
        self, awaited: "set[asyncio.Future[Any]]", progress: Progress | None, *, in_work: bool
    ) -> None:
        """Waits until one of the futures is done, and reports progress meanwhile."""
        timeout_s = self._report_s if progress else None
        while True:
            done, _ = await asyncio.wait(
                awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            assert progress is not None
            await progress.report(in_work=in_work)

    def written_ranges(self, entry: ArenaEntry) -> list[Range]:
        """Returns the readable ranges of an acquired entry, in the order they were written.

        The list grows while the entry is being written.
        """
        if partial := self._partials.get(entry):
            return partial.ranges
        return [(0, entry.spec.size_bytes)]

    def changed(self, entry: ArenaEntry) -> "asyncio.Future[None] | None":
        """Returns a future that is done when `written_ranges` has grown or will grow no more.

        All readers share the future, so a reader must not cancel it. Returns None if the writing
        is over.
        """
        partial = self._partials.get(entry)
        return None if partial is None else partial.changed

    async def digest_of(self, entry: ArenaEntry) -> bytes:
        """Returns the digest of a committed, acquired entry, which is computed once."""
        if (partial := self._partials.get(entry)) and partial.digested:
            return await asyncio.shield(partial.digested)
        return entry.digest

    async def until_unread(self, entry: ArenaEntry, timeout_s: float) -> None:
        """Waits until only the caller refers to the entry, at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while entry.references > 1 and loop.time() < deadline:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(_UNREAD_POLL_S)

    async def close(self) -> None:
        """Waits for digests under way, and unmaps the memory."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.sleep(0)  # runs the callbacks that the threads have scheduled
        self._partials.clear()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that has ended may still have its view for a moment.
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
        """Releases the reference of a job that has ended, and may complete the digest."""
        job.result()  # a job raises nothing
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
    """An acquired entry, which can be read while it is being written.

    Attributes:
        entry: the entry, released by the owner of the reading.
        memory: the tier of the entry.
        written: the readable ranges, see `MemoryTier.written_ranges`.
        work: the encode that writes the entry. None if the entry is complete.
    """

    entry: ArenaEntry
    memory: MemoryTier
    written: list[Range]
    work: "asyncio.Future[Any] | None" = None

    async def ranges(self, progress: Progress | None = None) -> AsyncGenerator[Range]:
        """Yields the ranges of the tensor's bytes, each as soon as it is written, until the end.

        Args:
            progress: gets a report now and then while there is no new range.

        Raises:
            TriptychError: the encode failed, and the bytes that were read are invalid.
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
            await self.memory.wait_first(awaited, progress, in_work=True)


def _digest(digest: TensorDigest, ranges: list[Range]) -> None:
    for start, stop in ranges:
        digest.add(start, stop)


def _gaps(ranges: list[Range], size: int) -> list[Range]:
    """Returns the parts of [0, size) that are in none of the ranges."""
    bounds = [0, *(bound for each in sorted(ranges) for bound in each), size]
    return [
        (stop, start) for stop, start in zip(bounds[::2], bounds[1::2], strict=True) if stop < start
    ]
