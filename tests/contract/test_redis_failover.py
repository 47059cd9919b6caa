"""After a failover the former server lives on as a replica, and its address is another server's."""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.embeddings.embedding_cache import RedisCache
from services.gateway.redis_entry_store import RedisEntryStore
from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.redis_server import RedisServer


async def test_who_is_connected_to_a_replica_connects_anew() -> None:
    async def until(stores: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await stores():  # noqa: ASYNC110 - of others
                await asyncio.sleep(0.1)

    with RedisServer() as former, RedisServer() as new:
        kept = RedisEntryStore(former.url)
        cache = RedisCache(former.url, ttl_s=60, timeout_s=PATIENCE_S)
        assert await kept.put("tenant", "before", b"x")
        assert await cache.write_file(b"before", b"x", 60)
        with former.client() as was_primary, new.client() as primary:
            was_primary.replicaof("127.0.0.1", new.port)
            was_primary.config_set("port", free_port())  # its connections stay
            primary.config_set("port", former.port)
        await until(lambda: kept.put("tenant", "after", b"y"))
        await until(lambda: cache.write_file(b"after", b"y", 60))
        assert await kept.get("tenant", "after") == b"y"
        await kept.close()
        await cache.close()
