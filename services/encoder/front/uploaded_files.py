"""Files that clients have uploaded: stored in memory, and in Redis for the other encoders.

A file is named by its digest and its tenant. So another tenant cannot find it, a repeated upload
changes nothing, and a file from Redis can be checked.
"""

import asyncio
import time

from blake3 import blake3

from services.common.clock import Clock
from services.common.embeddings.embedding_cache import RedisCache
from services.common.errors import NotFound, Overloaded, PayloadTooLarge
from services.common.tenancy.tenant_store import TenantStore
from services.common.threads import INLINE_BYTES

DIGEST_BYTES = 32
TTL_S = 3600  # seconds that a file is stored after its last use
MAX_BYTES = 256 << 20
# Reads from Redis at a time: the size of a file, and so the memory, is known only afterwards.
_MAX_READS = 2
# Writes to Redis at a time: a file takes memory there before it has replaced other files.
_MAX_WRITES = 1
_DOMAIN = "triptych 2026 kept file: name in Redis"
_TENANT_DOMAIN = "triptych 2026 kept file: tenant in Redis"


class UploadedFiles:
    """Files by tenant and digest. One event loop uses them.

    Args:
        redis: the Redis that all encoders share, which bounds the bytes of tenants. None if files
            end with this process.
        max_bytes: the most bytes in this process, half of them for one tenant. A larger file is
            stored in Redis alone.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        redis: RedisCache | None,
        max_bytes: int = MAX_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        self._redis = redis
        self._max_bytes = max_bytes
        self._reads = asyncio.Semaphore(_MAX_READS)
        self._writes = asyncio.Semaphore(_MAX_WRITES)
        self._files = TenantStore[bytes](max_bytes // 2, max_bytes, TTL_S, clock)

    async def put(self, tenant: str, data: bytes) -> bytes:
        """Stores a file, and returns its digest.

        Raises:
            PayloadTooLarge: the file is too large for this process, and Redis has not taken it.
        """
        digest = await _digest(data)
        is_stored = self._files.put(tenant, digest, data)
        if self._redis is not None:
            async with self._writes:
                is_stored |= await self._redis.write_file(_name(tenant, digest), data, TTL_S)
        if not is_stored:
            raise PayloadTooLarge(
                "the file is too large: the files of a tenant may have at most "
                f"{self._max_bytes // 2} bytes together"
            )
        return digest

    async def get(self, tenant: str, digest: bytes) -> bytes:
        """Returns a file, and starts its time in this process anew.

        Raises:
            NotFound: this tenant has not uploaded the file lately.
        """
        if (data := self._files.get(tenant, digest)) is not None:
            return data
        if self._redis is not None:
            async with self._reads:
                if (data := self._files.get(tenant, digest)) is not None:  # read by another call
                    return data
                data = await self._redis.read_file(_name(tenant, digest), self._max_bytes)
                if data is not None and await _digest(data) == digest:
                    self._files.put(tenant, digest, data)
                    return data
        raise NotFound("the file is not stored, or no longer: upload it again")

    async def delete(self, tenant: str, digest: bytes) -> bool:
        """Deletes a file, and returns whether there was one.

        Raises:
            Overloaded: Redis, which may have the file, does not answer.
        """
        found = self._files.delete(tenant, digest)
        if self._redis is not None:
            if (was_there := await self._redis.delete_file(_name(tenant, digest))) is None:
                raise Overloaded("Redis, which may have the file, does not answer", retry_after_s=1)
            found |= was_there
        return found


async def _digest(data: bytes) -> bytes:
    """Returns a file's digest. A thread digests a long file: 60 MiB take 10 ms and more."""
    hasher = blake3()
    if len(data) <= INLINE_BYTES:
        return hasher.update(data).digest(DIGEST_BYTES)
    return (await asyncio.to_thread(hasher.update, data)).digest(DIGEST_BYTES)


def _name(tenant: str, digest: bytes) -> bytes:
    """Returns the file's name in Redis, `<tenant>/<file>`, of hashes that reveal neither."""
    owner = blake3(tenant.encode(), derive_key_context=_TENANT_DOMAIN).hexdigest()[:32]
    file = blake3(digest + tenant.encode(), derive_key_context=_DOMAIN).hexdigest()
    return f"{owner}/{file}".encode()
