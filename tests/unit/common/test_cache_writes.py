"""How an embedding is sent to Redis: by a thread, from borrowed memory."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.embeddings import embedding_cache
from services.common.embeddings.embedding import digest
from services.common.embeddings.embedding_cache import RedisCache
from tests.redis_server import RedisServer, redis_server  # noqa: F401
from tests.unit.common.test_embedding_cache import KEY, SPEC, body, cache, load, open_cache

__all__ = ["cache", "open_cache"]


async def test_a_memoryview_is_written_too(cache: RedisCache) -> None:
    data = body()
    assert await cache.write(KEY, SPEC, digest(data), memoryview(bytearray(data)))
    assert await load(cache) == data


async def test_a_cancelled_write_lets_go_of_its_memory_before_it_ends(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding_cache, "_WRITE_TIMEOUT_S", 0.5)
    cache = open_cache(redis_server.url)
    spec = replace(SPEC, num_tokens=(64 << 20) // SPEC.hidden // SPEC.num_features // 2)
    data = memoryview(bytearray(spec.size_bytes))
    redis_server.freeze()
    writing = asyncio.create_task(cache.write(KEY, spec, b"d" * 32, data))
    await asyncio.sleep(0.1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    data.release()  # no thread reads it any more
    redis_server.thaw()
