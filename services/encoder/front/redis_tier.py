"""Redis as a tier of the encoder, which also writes new embeddings there, for all pods.

A failure of Redis never fails a call: an embedding that cannot be written is dropped and counted.
"""

import asyncio

from prometheus_client import Counter

from services.common.embeddings.arena import Arena, ArenaEntry
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.embedding_write import EmbeddingWrite
from services.common.embeddings.redis_tier import RedisTier
from services.encoder.front.source_store import Work

_WRITERS = 2
# Queued entries cannot be evicted from the arena, so they may hold only this share of it.
_MAX_QUEUED_SHARE = 0.25
# A write waits for readers of the same bytes, which need the memory bandwidth more.
_UNREAD_TIMEOUT_S = 0.05
_UNREAD_POLL_S = 0.005


class WritableRedisTier(RedisTier[Work]):
    """The embeddings in Redis, and a queue of embeddings to be written there.

    Args:
        cache: the client of Redis.
        arena: memory of the embeddings.
        dropped: counter of embeddings that were not written.
    """

    def __init__(self, cache: RedisCache, arena: Arena, dropped: Counter) -> None:
        super().__init__(cache)
        self._arena = arena
        self._dropped = dropped
        self._queued_bytes = 0
        self._max_queued_bytes = int(arena.size_bytes * _MAX_QUEUED_SHARE)
        self._writers = asyncio.Semaphore(_WRITERS)
        self._tasks: set[asyncio.Task[bool]] = set()

    def put(self, write: EmbeddingWrite) -> None:
        """Queues a committed embedding; drops it if the queue is full or Redis does not answer."""
        entry = write.entry
        size_bytes = entry.spec.size_bytes
        is_full = self._queued_bytes + size_bytes > self._max_queued_bytes
        if not self._cache.available or (is_full and self._queued_bytes):
            self._dropped.inc()
            return
        self._arena.acquire(entry)
        self._queued_bytes += size_bytes
        task = asyncio.create_task(self._write(write))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._written(task, entry))

    async def drain(self, timeout_s: float) -> None:
        """Waits for queued embeddings, then drops the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, write: EmbeddingWrite) -> bool:
        async with self._writers:
            digest, entry = await write.digest(), write.entry
            await _until_unread(entry)
            return await self._cache.write(entry.key, entry.spec, digest, write.view)

    def _written(self, task: asyncio.Task[bool], entry: ArenaEntry) -> None:
        self._tasks.discard(task)
        self._queued_bytes -= entry.spec.size_bytes
        self._arena.release(entry)
        if task.cancelled() or not task.result():
            self._dropped.inc()


async def _until_unread(entry: ArenaEntry) -> None:
    """Waits until only the caller refers to the entry, for a bounded time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _UNREAD_TIMEOUT_S
    while entry.references > 1 and loop.time() < deadline:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(_UNREAD_POLL_S)
