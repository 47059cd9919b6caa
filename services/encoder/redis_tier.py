"""The embeddings of all pods: what Redis holds, which pod computes what it lacks, and the
write-behind of new ones.

`Embeddings` alone uses it. It never fails because of Redis: without an answer this pod computes the
embedding, and a new one that cannot be written is dropped and counted.
"""

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter

from services.common.arena import ArenaEntry
from services.common.embedding import EmbeddingSpec
from services.common.embedding_cache import RedisCache
from services.encoder.memory_tier import MemoryTier

# A pod that holds a lock and delivers nothing for this long is not waited for.
_PEER_TIMEOUT_S = 3.0
_LOCK_TTL_S = 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.05
_WRITERS = 2
# Queued entries cannot be evicted from the arena, so they may hold only this share of it.
_MAX_QUEUED_SHARE = 0.25
# A write waits for readers of the same bytes: it would compete with them for memory bandwidth.
_UNREAD_TIMEOUT_S = 0.05


@dataclass(frozen=True, slots=True)
class Found:
    """Redis has the embedding.

    Attributes:
        joined: another pod has just computed it.
    """

    joined: bool = False


@dataclass(frozen=True, slots=True)
class Lock:
    """This pod computes the embedding; an empty `owner` means without a lock in Redis."""

    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class _Write:
    entry: ArenaEntry
    lock: Lock


class RedisTier:
    """Redis, as one pod uses it.

    Args:
        cache: shared by all pods.
        memory: where entries are read from and written to.
        dropped: counts entries that were not written.
    """

    def __init__(self, cache: RedisCache, memory: MemoryTier, dropped: Counter) -> None:
        self._cache = cache
        self._memory = memory
        self._dropped = dropped
        self._pod = os.urandom(8).hex()
        self._lock_numbers = itertools.count()
        self._queue: deque[_Write] = deque()
        self._queued_bytes = 0
        self._max_queued_bytes = int(memory.arena.size_bytes * _MAX_QUEUED_SHARE)
        self._num_writers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, key: bytes, spec: EmbeddingSpec, *, need_bytes: bool) -> Found | Lock:
        """Looks an embedding up; if it is absent, takes the lock or waits for the pod that has it.

        Args:
            key: of the image.
            spec: what the embedding must be; an entry of another shape is deleted.
            need_bytes: read it into memory, too.

        Returns:
            `Found`, or the lock under which this pod computes it, released by `unlock` or `put`.
        """
        if await self._read(key, spec, need_bytes=need_bytes):
            return Found()
        if lock := await self._try_lock(key):
            return lock
        if await self._wait_for_peer(key, spec, need_bytes=need_bytes):
            return Found(joined=True)
        return Lock()

    async def unlock(self, key: bytes, lock: Lock) -> None:
        """Releases the lock of a computation that has failed."""
        if lock.owner:
            await self._cache.unlock(key, lock.owner)

    def put(self, entry: ArenaEntry, lock: Lock) -> None:
        """Queues an entry for writing, and releases the lock once it is written. If the queue is
        full, or Redis is not available, the entry is dropped and counted.
        """
        full = self._queued_bytes + entry.spec.size_bytes > self._max_queued_bytes
        if not self._cache.available or (full and self._queued_bytes):
            self._dropped.inc()
            self._start(self.unlock(entry.key, lock))
            return
        self._memory.arena.acquire(entry)
        self._queued_bytes += entry.spec.size_bytes
        self._queue.append(_Write(entry, lock))
        if self._num_writers < _WRITERS:
            self._num_writers += 1
            self._start(self._write_queued())

    async def drain(self, timeout_s: float) -> None:
        """Waits for queued writes, then drops the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._queue:
            self._dropped.inc()
            self._dequeued(self._queue.popleft())

    async def close(self) -> None:
        """Closes the connections."""
        await self._cache.close()

    async def _read(self, key: bytes, spec: EmbeddingSpec, *, need_bytes: bool) -> bool:
        stored = await self._cache.header(key)
        if stored is None:
            return False
        if stored.spec != spec:
            await self._cache.delete(key)
            return False
        if not need_bytes:
            return True
        entry = await self._memory.reserve(key, spec)
        try:
            if not entry.committed:
                view = self._memory.arena.view(entry)
                if not await self._cache.read(key, stored, view):
                    return False
                entry.digest = stored.digest
                self._memory.commit(entry)
            return True
        finally:
            self._memory.release(entry)

    async def _try_lock(self, key: bytes) -> Lock | None:
        """None: another pod has the lock."""
        owner = f"{self._pod}:{next(self._lock_numbers)}".encode()
        try:
            return Lock(owner) if await self._cache.try_lock(key, owner, _LOCK_TTL_S) else None
        except asyncio.CancelledError:
            await self._cache.unlock(key, owner)  # it may have been granted
            raise

    async def _wait_for_peer(self, key: bytes, spec: EmbeddingSpec, *, need_bytes: bool) -> bool:
        """Waits for the pod that has the lock; False: it has failed, or takes too long."""
        pause_s = _FIRST_POLL_S
        deadline = asyncio.get_running_loop().time() + _PEER_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
            if lock := await self._try_lock(key):
                # The other pod stored its result before it released the lock, or has failed.
                await self.unlock(key, lock)
                return await self._read(key, spec, need_bytes=need_bytes)
        return False

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_queued(self) -> None:
        try:
            while self._queue:
                write = self._queue.popleft()
                try:
                    await self._write(write)
                finally:
                    self._dequeued(write)
        finally:
            self._num_writers -= 1

    async def _write(self, write: _Write) -> None:
        entry = write.entry
        digest = await self._memory.digest_of(entry)
        await self._memory.until_unread(entry, _UNREAD_TIMEOUT_S)
        view = self._memory.arena.view(entry)
        if not await self._cache.write(entry.key, entry.spec, digest, view):
            self._dropped.inc()
        await self.unlock(entry.key, write.lock)

    def _dequeued(self, write: _Write) -> None:
        self._queued_bytes -= write.entry.spec.size_bytes
        self._memory.release(write.entry)
