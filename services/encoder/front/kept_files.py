"""Files that clients have uploaded and name again: here, and in Redis for the other encoders.

The servicer alone uses it. A file's name is its digest and its tenant, so that no other tenant
finds it, an upload is idempotent, and what Redis returns can be checked.
"""

import asyncio

from blake3 import blake3

from services.common.embeddings.embedding_cache import RedisCache
from services.common.errors import NotFound, Overloaded, PayloadTooLarge
from services.common.tenancy.tenant_store import TenantStore
from services.common.threads import INLINE_BYTES

DIGEST_BYTES = 32
KEPT_S = 3600  # since a file's last use
MAX_BYTES = 256 << 20
_MAX_READS = 2  # of Redis at a time: how large a file is, and so its memory, is known afterwards
_MAX_WRITES = 1  # to Redis at a time: a file takes memory there before it has replaced others
_DOMAIN = "triptych 2026 kept file: name in Redis"
_TENANT_DOMAIN = "triptych 2026 kept file: tenant in Redis"


class KeptFiles:
    """Files by tenant and digest. One event loop owns it.

    Args:
        redis: shared by all encoders, and bounds the bytes of tenants. None if files end with this
            process.
        max_bytes: held here, of which one tenant has half; a larger file is not held.
    """

    def __init__(self, redis: RedisCache | None, max_bytes: int = MAX_BYTES) -> None:
        self._redis = redis
        self._max_bytes = max_bytes
        self._reads = asyncio.Semaphore(_MAX_READS)
        self._writes = asyncio.Semaphore(_MAX_WRITES)
        self._files = TenantStore[bytes](max_bytes // 2, max_bytes, KEPT_S)

    async def put(self, tenant: str, data: bytes) -> bytes:
        """Keeps a file; returns its digest.

        Raises:
            PayloadTooLarge: it is not held here, and Redis has not taken it.
        """
        digest = await _digest(data)
        is_kept = self._files.put(tenant, digest, data)
        if self._redis is not None:
            async with self._writes:
                is_kept |= await self._redis.write_file(_name(tenant, digest), data, KEPT_S)
        if not is_kept:
            raise PayloadTooLarge(
                f"at most {self._max_bytes // 2} bytes of a tenant's files are kept here"
            )
        return digest

    async def get(self, tenant: str, digest: bytes) -> bytes:
        """A file, whose time begins anew here.

        Raises:
            NotFound: this tenant has not uploaded it lately.
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
        raise NotFound("no such file is kept: upload it again")

    async def delete(self, tenant: str, digest: bytes) -> bool:
        """Forgets a file; returns whether there was one. Raises Overloaded: Redis may have it."""
        found = self._files.delete(tenant, digest)
        if self._redis is not None:
            if (was_there := await self._redis.delete_file(_name(tenant, digest))) is None:
                raise Overloaded("Redis, which may have the file, is away", retry_after_s=1)
            found |= was_there
        return found


async def _digest(data: bytes) -> bytes:
    """In a thread, unless it is short: 60 MiB take 10 ms and more."""
    hasher = blake3()
    if len(data) <= INLINE_BYTES:
        return hasher.update(data).digest(DIGEST_BYTES)
    return (await asyncio.to_thread(hasher.update, data)).digest(DIGEST_BYTES)


def _name(tenant: str, digest: bytes) -> bytes:
    """The file's name in Redis, `<tenant>/<file>`: both are hashes, which tell neither."""
    owner = blake3(tenant.encode(), derive_key_context=_TENANT_DOMAIN).hexdigest()[:32]
    file = blake3(digest + tenant.encode(), derive_key_context=_DOMAIN).hexdigest()
    return f"{owner}/{file}".encode()
