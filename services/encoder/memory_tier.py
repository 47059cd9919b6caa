"""The embeddings in this pod's arena: reserving with patience, digests, references."""

import asyncio
from contextlib import suppress
from itertools import chain

from services.common.arena import Arena, ArenaEntry
from services.common.embedding import EmbeddingSpec, block_digests, join_digests, split_blocks
from services.common.errors import Overloaded

_RESERVE_TIMEOUT_S = 5.0
_CLOSE_ATTEMPTS = 50
_DIGEST_THREADS = 4  # of one embedding; a reader that has copied it waits for the digest


class MemoryTier:
    """An `Arena` whose users may wait for room. One event loop owns it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._changed = asyncio.Event()
        self._digests: dict[bytes, asyncio.Task[bytes]] = {}

    def get(self, key: bytes) -> ArenaEntry | None:
        """A complete entry; `arena.acquire` it before yielding to the event loop."""
        return self.arena.get(key)

    def release(self, entry: ArenaEntry) -> None:
        """Gives a reference back and wakes those who wait for room."""
        self.arena.release(entry)
        self._wake()

    def commit(self, entry: ArenaEntry) -> None:
        """Marks the bytes complete and starts to digest them in a thread."""
        self.arena.commit(entry)
        if not entry.digest:
            self.arena.acquire(entry)
            task = asyncio.create_task(self._digest(entry))
            self._digests[entry.key] = task
            task.add_done_callback(lambda _: self._digests.pop(entry.key, None))
        self._wake()

    async def digest_of(self, entry: ArenaEntry) -> bytes:
        """The digest of a committed, held entry; computed once."""
        if task := self._digests.get(entry.key):
            return await asyncio.shield(task)
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
        await asyncio.gather(*self._digests.values(), return_exceptions=True)
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                return self.arena.close()
            except BufferError:
                # A thread that is done still drops its view; what it leaves ends with the process.
                await asyncio.sleep(0.01)

    async def _digest(self, entry: ArenaEntry) -> bytes:
        """Releases the reference that `commit` took."""
        try:
            parts = split_blocks(self.arena.view(entry), _DIGEST_THREADS)
            jobs = [asyncio.to_thread(block_digests, part) for part in parts]
            entry.digest = join_digests(chain.from_iterable(await asyncio.gather(*jobs)))
        finally:
            self.release(entry)
        return entry.digest

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
