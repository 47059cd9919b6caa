"""The Redis tier: embeddings of all pods, and the delayed writing of new ones.

`Embeddings` uses it. A failure of Redis never fails a call: without an answer this pod computes the
embedding, and a new embedding that cannot be written is dropped and counted.
"""

import asyncio

from prometheus_client import Counter

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_cache import RedisCache
from services.encoder.front.memory_tier import MemoryTier

_WRITERS = 2
# Queued entries cannot be evicted from the arena, so they may hold only this share of it.
_MAX_QUEUED_SHARE = 0.25
# A write waits for readers of the same bytes, which need the memory bandwidth more.
_UNREAD_TIMEOUT_S = 0.05


class RedisTier:
    """The embeddings in Redis, which all pods share.

    Args:
        cache: the client of Redis.
        memory: the tier that embeddings are read into and written from.
        dropped: counter of entries that were not written.
    """

    def __init__(self, cache: RedisCache, memory: MemoryTier, dropped: Counter) -> None:
        self._cache = cache
        self._memory = memory
        self._dropped = dropped
        self._queued_bytes = 0
        self._max_queued_bytes = int(memory.arena.size_bytes * _MAX_QUEUED_SHARE)
        self._writers = asyncio.Semaphore(_WRITERS)
        self._writes: set[asyncio.Task[bool]] = set()

    async def has(self, key: bytes, spec: EmbeddingSpec) -> bool:
        """Returns whether Redis has an embedding."""
        return await self._cache.has(key, spec)

    async def read(self, entry: ArenaEntry) -> bool:
        """Reads an embedding into its entry. Returns whether Redis has it."""
        view = self._memory.arena.view(entry)
        return await self._cache.read(entry.key, entry.spec, view) is not None

    def put(self, entry: ArenaEntry) -> None:
        """Queues an entry for writing; drops it if the queue is full or Redis does not answer."""
        size_bytes = entry.spec.size_bytes
        is_full = self._queued_bytes + size_bytes > self._max_queued_bytes
        if not self._cache.available or (is_full and self._queued_bytes):
            self._dropped.inc()
            return
        self._memory.arena.acquire(entry)
        self._queued_bytes += size_bytes
        write = asyncio.create_task(self._write(entry))
        self._writes.add(write)
        write.add_done_callback(lambda write: self._written(write, entry))

    async def drain(self, timeout_s: float) -> None:
        """Waits for queued writes, then drops the rest."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=timeout_s)
        for write in self._writes:
            write.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)

    async def _write(self, entry: ArenaEntry) -> bool:
        async with self._writers:
            digest = await self._memory.digest_of(entry)
            await self._memory.until_unread(entry, _UNREAD_TIMEOUT_S)
            view = self._memory.arena.view(entry)
            return await self._cache.write(entry.key, entry.spec, digest, view)

    def _written(self, write: asyncio.Task[bool], entry: ArenaEntry) -> None:
        self._writes.discard(write)
        self._queued_bytes -= entry.spec.size_bytes
        self._memory.arena.release(entry)
        if write.cancelled() or not write.result():
            self._dropped.inc()
