"""Redis as a tier of the embedding store: the embeddings of all pods.

A failure of Redis never fails a lookup: the next tier is asked instead.
"""

import time
from typing import TypeVar

from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.store import Lookup, Tier

Inputs = TypeVar("Inputs")


class RedisTier(Tier[Inputs]):
    """The embeddings in Redis.

    Args:
        cache: the client of Redis.
    """

    name = "redis"

    def __init__(self, cache: RedisCache) -> None:
        self._cache = cache

    async def find(self, lookup: Lookup[Inputs]) -> bool:
        """Reads the embedding, or only its header if no caller needs the bytes."""
        if not lookup.needs_bytes:
            start = time.monotonic()  # the event loop's clock has a resolution of 1 ms
            found = await self._cache.has(lookup.key, lookup.spec)
            lookup.seconds["lookup"] = time.monotonic() - start
            return found
        if (write := await lookup.place()) is None:
            return True
        digest = await self._cache.read(lookup.key, lookup.spec, write.view)
        if digest is not None:
            write.commit(digest)
        return digest is not None
