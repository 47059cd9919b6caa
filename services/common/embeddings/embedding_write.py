"""Embeddings of the arena while they are written, and the digests of embeddings.

A writer offers each range of bytes as soon as it is written. Readers get the range at once, and
threads digest it meanwhile. `EmbeddingWrite.commit` says that the whole embedding is right.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from services.common.embeddings.arena import Arena, ArenaEntry
from services.common.embeddings.embedding import TensorDigest, split_blocks, split_evenly
from services.common.threads import name_thread, num_threads

Range = tuple[int, int]  # bytes of the tensor, [start, stop)


class Digests:
    """The digests of the arena's embeddings, computed in threads. One event loop uses it.

    Attributes:
        threads: the threads. They are used without `run_in_executor`, because wrapping its futures
            costs the event loop more than a digest costs a thread.
        pending: futures of the digests of committed entries that are not known yet.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(num_threads(), "digest", name_thread)
        self.pending: dict[ArenaEntry, asyncio.Future[bytes]] = {}

    async def of(self, entry: ArenaEntry) -> bytes:
        """Returns the digest of a committed entry that the caller has acquired."""
        if (pending := self.pending.get(entry)) is not None:
            return await asyncio.shield(pending)
        return entry.digest

    async def close(self) -> None:
        """Waits for digests under way, and ends the threads."""
        await asyncio.to_thread(self.threads.shutdown)
        await asyncio.sleep(0)  # runs the callbacks that the threads have scheduled


class EmbeddingWrite:
    """The writing of one embedding into its entry of the arena.

    It ends with `commit`, or has failed when all writers have called `release` before. There is
    nothing to write if the entry is committed from the start.

    Args:
        arena: memory of the embedding.
        digests: digests of the arena's embeddings.
        entry: entry of the embedding, with a reference for the caller, who is the first writer.

    Attributes:
        entry: entry of the embedding.
        ranges: ranges that may be read, in the order in which they were written.
        changed: future that is done when `ranges` has grown, or will grow no more. All readers
            share it, so a reader must not cancel it. None once the writing has ended.
    """

    def __init__(self, arena: Arena, digests: Digests, entry: ArenaEntry) -> None:
        self._arena = arena
        self._digests = digests
        self._num_writers = 1
        self._tensor: TensorDigest | None = None  # digests what was offered
        self._num_jobs = 0
        self.entry = entry
        self.ranges: list[Range] = []
        self.changed: asyncio.Future[None] | None = None
        if entry.committed:
            self.ranges.append((0, entry.spec.size_bytes))
        else:
            self.changed = asyncio.get_running_loop().create_future()

    @property
    def view(self) -> memoryview:
        """The embedding's bytes in the arena."""
        return self._arena.view(self.entry)

    async def digest(self) -> bytes:
        """Returns the digest of the committed embedding. The caller has acquired the entry."""
        return await self._digests.of(self.entry)

    def try_acquire(self) -> bool:
        """Takes a reference to the entry for a reader.

        Returns False if the writing has failed, or if the entry has been evicted since.
        """
        has_failed = self.changed is None and not self.entry.committed
        if has_failed or not self._arena.has(self.entry):
            return False
        self._arena.acquire(self.entry)
        return True

    def retain(self) -> None:
        """Adds a writer, which has to call `release`."""
        self._arena.acquire(self.entry)
        self._num_writers += 1

    def release(self) -> None:
        """Ends the work of one writer, and releases its reference to the entry."""
        self._num_writers -= 1
        if not self._num_writers:
            self._end()
        self._arena.release(self.entry)

    def offer(self, start: int, stop: int) -> None:
        """Offers bytes that are written to readers, and starts to digest them in a thread."""
        assert self.changed is not None, "the writing has ended"
        self._digest((start, stop), 1)
        self.ranges.append((start, stop))
        self.changed.set_result(None)
        self.changed = asyncio.get_running_loop().create_future()

    def commit(self, digest: bytes = b"") -> None:
        """Marks the embedding complete.

        Args:
            digest: digest of the embedding. Empty if it has to be computed, in threads.
        """
        gaps = _gaps(self.ranges, self.entry.spec.size_bytes)
        self.ranges += gaps
        self.entry.digest = digest
        if not digest:
            self._digests.pending[self.entry] = asyncio.get_running_loop().create_future()
            for gap in gaps:
                self._digest(gap, num_threads())  # a reader may be waiting
            self._finish_if_digested()
        self._end()
        self._arena.commit(self.entry)

    def _end(self) -> None:
        if self.changed is not None:
            self.changed.set_result(None)
            self.changed = None

    def _digest(self, written: Range, max_jobs: int) -> None:
        """Starts to digest a range, in at most `max_jobs` threads."""
        if self._tensor is None:
            self._tensor = TensorDigest(self.view)
        loop, tensor = asyncio.get_running_loop(), self._tensor

        def digested(job: Future[None]) -> None:  # in the thread
            loop.call_soon_threadsafe(self._digested, job)

        for ranges in split_evenly(split_blocks(*written), max_jobs):
            self._arena.acquire(self.entry)
            self._num_jobs += 1
            self._digests.threads.submit(_digest, tensor, ranges).add_done_callback(digested)

    def _digested(self, job: Future[None]) -> None:
        """Releases the reference of a job that has ended, and may complete the digest."""
        job.result()  # a job raises nothing
        self._num_jobs -= 1
        self._arena.release(self.entry)
        self._finish_if_digested()

    def _finish_if_digested(self) -> None:
        pending = self._digests.pending.get(self.entry)
        if pending is not None and self._tensor is not None and not self._num_jobs:
            self.entry.digest = self._tensor.finish()
            del self._digests.pending[self.entry]
            pending.set_result(self.entry.digest)


def _digest(tensor: TensorDigest, ranges: Sequence[Range]) -> None:
    for start, stop in ranges:
        tensor.add(start, stop)


def _gaps(ranges: Sequence[Range], size: int) -> list[Range]:
    """Returns the parts of [0, size) that are in none of the ranges."""
    bounds = [0, *(bound for each in sorted(ranges) for bound in each), size]
    return [
        (stop, start) for stop, start in zip(bounds[::2], bounds[1::2], strict=True) if stop < start
    ]
