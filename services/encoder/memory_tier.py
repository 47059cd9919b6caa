"""The embeddings in this pod's arena: reserving with patience, growth, digests, references."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from services.common.arena import Arena, ArenaEntry
from services.common.embedding import EmbeddingSpec, TensorDigest, share_out, split_blocks
from services.common.errors import Overloaded
from services.common.threads import num_threads

# Embeddings that are read leave their room when they are; the largest take seconds to encode each.
_RESERVE_TIMEOUT_S = 60.0
_CLOSE_ATTEMPTS = 50
Range = tuple[int, int]  # bytes of the tensor, [start, stop)


@dataclass(slots=True)
class _Growth:
    """What is there of an embedding that is not complete or not digested yet.

    Attributes:
        ranges: in the order they came.
        change: done when there is more, or will be no more.
        num_digesting: parts of these ranges that threads are digesting.
        finished: ends in the digest; made by `commit`.
    """

    digest: TensorDigest
    change: asyncio.Future[None]
    ranges: list[Range] = field(default_factory=list[Range])
    num_digesting: int = 0
    finished: asyncio.Future[bytes] | None = None


class MemoryTier:
    """An `Arena` whose users may wait for room, and read what is not complete. One event loop owns
    it.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._changed = asyncio.Event()
        self._growths: dict[ArenaEntry, _Growth] = {}
        # Not the event loop's own: its futures would take the loop longer than this takes threads.
        self._threads = ThreadPoolExecutor(num_threads(), "digest")

    def get(self, key: bytes) -> ArenaEntry | None:
        """A complete entry; `arena.acquire` it before yielding to the event loop."""
        return self.arena.get(key)

    def try_hold(self, entry: ArenaEntry) -> bool:
        """Takes a reference to an entry that is complete or comes about; False: it does so no more,
        or has made room for another one.
        """
        readable = self.arena.has(entry) and (entry.committed or entry in self._growths)
        if readable:
            self.arena.acquire(entry)
        return readable

    def release(self, entry: ArenaEntry) -> None:
        """Gives a reference back and wakes those who wait for room."""
        self.arena.release(entry)
        self._wake()

    def begin(self, entry: ArenaEntry) -> None:
        """The writer of a held entry begins; `commit` or `abandon` follows."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._growths[entry] = _Growth(TensorDigest(self.arena.view(entry)), change)

    def extend(self, entry: ArenaEntry, start: int, stop: int) -> None:
        """Bytes of an entry that has begun are there, before it is complete: readers may have them,
        and a thread digests them.
        """
        growth = self._growths[entry]
        self._add(entry, growth, (start, stop), 1)
        growth.change.set_result(None)
        growth.change = asyncio.get_running_loop().create_future()

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the bytes complete; where their digest is not known, threads make it of those that
        they have not had yet.
        """
        if not entry.digest:
            growth = self._growths[entry]
            growth.finished = asyncio.get_running_loop().create_future()
            for gap in _gaps(growth.ranges, entry.spec.size_bytes):
                self._add(entry, growth, gap, num_threads())  # a reader waits for it
            growth.change.set_result(None)
            self._finish_if_digested(entry, growth)
        self.arena.commit(entry)
        self._wake()

    def abandon(self, entry: ArenaEntry) -> None:
        """An entry that has begun will never be complete; its writer still gives its reference
        back.
        """
        self._growths.pop(entry).change.set_result(None)

    def ranges(self, entry: ArenaEntry) -> list[Range]:
        """What is there of a held entry that is committed or has begun, in the order it came. The
        list grows while the entry does.
        """
        if growth := self._growths.get(entry):
            return growth.ranges
        return [(0, entry.spec.size_bytes)]

    def change(self, entry: ArenaEntry) -> "asyncio.Future[None] | None":
        """Done when there is more of an entry that has begun, or will be no more; None: it is
        complete, or abandoned. Not to be cancelled: all readers share it.
        """
        growth = self._growths.get(entry)
        return None if growth is None else growth.change

    async def digest_of(self, entry: ArenaEntry) -> bytes:
        """The digest of a committed, held entry; computed once."""
        if (growth := self._growths.get(entry)) and growth.finished:
            return await asyncio.shield(growth.finished)
        return entry.digest

    async def until_unread(self, entry: ArenaEntry, timeout_s: float) -> None:
        """Returns when nobody but the caller refers to the entry, or after that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while entry.references > 1:
                    await self._changed.wait()

    async def reserve(self, key: bytes, spec: EmbeddingSpec) -> ArenaEntry:
        """Room for an embedding, or its complete entry if one appeared meanwhile.

        Returns:
            An entry; if it is not committed, the caller is its writer and holds a reference.

        Raises:
            Overloaded: there was no room for too long.
        """
        deadline = asyncio.get_running_loop().time() + _RESERVE_TIMEOUT_S
        while True:
            if entry := self.arena.get(key):
                return entry
            try:
                if entry := self.arena.try_reserve(key, spec):
                    return entry
            except KeyError:
                pass  # a cancelled job still writes there
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                raise Overloaded("no memory for the embedding", retry_after_s=1.0) from None

    async def close(self) -> None:
        """Waits for running digests and unmaps the memory."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.sleep(0)  # what the threads leave to this loop
        self._growths.clear()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that is done still drops its view; what it leaves ends with the process.
                await asyncio.sleep(0.01)

    def _add(self, entry: ArenaEntry, growth: _Growth, where: Range, max_parts: int) -> None:
        growth.ranges.append(where)
        loop = asyncio.get_running_loop()

        def digested(job: Future[None]) -> None:  # in the thread
            loop.call_soon_threadsafe(self._digested, entry, growth, job)

        for share in share_out(split_blocks(*where), max_parts):
            self.arena.acquire(entry)
            growth.num_digesting += 1
            self._threads.submit(_add_all, growth.digest, share).add_done_callback(digested)

    def _digested(self, entry: ArenaEntry, growth: _Growth, job: Future[None]) -> None:
        """A thread is done with a part; gives back the reference that `_add` took."""
        job.result()  # it raises nothing
        growth.num_digesting -= 1
        self.release(entry)
        self._finish_if_digested(entry, growth)

    def _finish_if_digested(self, entry: ArenaEntry, growth: _Growth) -> None:
        if growth.finished is not None and growth.num_digesting == 0:
            entry.digest = growth.digest.finish()
            del self._growths[entry]
            growth.finished.set_result(entry.digest)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _add_all(digest: TensorDigest, ranges: list[Range]) -> None:
    for start, stop in ranges:
        digest.add(start, stop)


def _gaps(ranges: list[Range], size: int) -> list[Range]:
    """What is missing of [0, size)."""
    edges = [0, *(edge for each in sorted(ranges) for edge in each), size]
    return [
        (stop, start) for stop, start in zip(edges[::2], edges[1::2], strict=True) if stop < start
    ]
