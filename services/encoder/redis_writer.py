"""Writes embeddings to Redis behind the answers."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter

from services.common.arena import ArenaEntry
from services.common.embedding_cache import RedisCache
from services.encoder.memory_tier import MemoryTier

_WORKERS = 2
# Queued entries cannot be evicted from the arena, so they may hold only a part of it.
_ARENA_SHARE = 4
# Readers go first: a write keeps a processor and memory busy while they wait for the bytes.
_READERS_FIRST_S = 0.05


@dataclass(frozen=True, slots=True)
class _Write:
    entry: ArenaEntry
    lock_owner: bytes  # empty: no lock to give back


class RedisWriter:
    """A bounded queue of entries to store; what does not fit is dropped and counted.

    Args:
        cache: where entries go.
        memory: where they come from.
        dropped: counts the entries that were not written.
    """

    def __init__(self, cache: RedisCache, memory: MemoryTier, dropped: Counter) -> None:
        self._cache = cache
        self._memory = memory
        self._dropped = dropped
        self._queue: deque[_Write] = deque()
        self._queued_bytes = 0
        self._max_bytes = memory.arena.size_bytes // _ARENA_SHARE
        self._workers: set[asyncio.Task[None]] = set()

    def put(self, entry: ArenaEntry, lock_owner: bytes) -> None:
        """Queues an entry; gives the lock back when it is stored or dropped."""
        full = self._queued_bytes + entry.spec.size_bytes > self._max_bytes
        if not self._cache.available or (full and self._queued_bytes):
            self._dropped.inc()
            if lock_owner:
                self._start(self._cache.unlock(entry.key, lock_owner))
            return
        self._memory.arena.acquire(entry)
        self._queued_bytes += entry.spec.size_bytes
        self._queue.append(_Write(entry, lock_owner))
        if len(self._workers) < _WORKERS:
            self._start(self._work())

    async def drain(self, timeout_s: float) -> None:
        """Lets queued writes end, then drops the rest."""
        if self._workers:
            await asyncio.wait(self._workers, timeout=timeout_s)
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        while self._queue:
            self._dropped.inc()
            self._release(self._queue.popleft())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._workers.add(task)
        task.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        while self._queue:
            write = self._queue.popleft()
            try:
                await self._store(write)
            finally:
                self._release(write)

    async def _store(self, write: _Write) -> None:
        entry = write.entry
        digest = await self._memory.digest_of(entry)
        await self._memory.until_unread(entry, _READERS_FIRST_S)
        view = self._memory.arena.view(entry)
        stored = await self._cache.write(entry.key, entry.spec, digest, view)
        if not stored:
            self._dropped.inc()
        if write.lock_owner:
            await self._cache.unlock(entry.key, write.lock_owner)

    def _release(self, write: _Write) -> None:
        self._queued_bytes -= write.entry.spec.size_bytes
        self._memory.release(write.entry)
