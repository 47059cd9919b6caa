"""Store of entries that later requests name, in the Redis of all gateways of one installation.

An entry is a string with a time to live. The script of `bounded_entries` bounds the bytes of each
tenant.
"""

import logging
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.common.errors import Unavailable
from services.common.tenancy.bounded_entries import BOUNDED_ENTRIES, OVERHEAD_BYTES
from services.gateway.entry_store import LIFETIME_S, MAX_BYTES, MAX_TENANT_BYTES
from services.gateway.redis_script import RedisScript

log = logging.getLogger(__name__)

PREFIX = "triptych:kept:"
_TIMEOUT_S = 1.0


class RedisEntryStore:
    """Entries of all gateways that use one Redis.

    Args:
        url: URL of Redis, see `redis_login`.
        max_tenant_bytes: largest number of bytes of one tenant's entries.
        max_bytes: largest number of bytes of all entries.
        password_file: file with the password of the URL's user. None if the URL has the password.
        lifetime_s: seconds after its last use for which an entry is stored.
        pause_s: seconds after a failure for which Redis is not asked again, so that no response
            waits twice.
    """

    terms = (
        "Gateways keep what they have answered in Redis: an hour after the last use at most, until "
        "newer entries need the room or Redis restarts"
    )

    def __init__(
        self,
        url: str,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        max_bytes: int = MAX_BYTES,
        *,
        password_file: Path | None = None,
        lifetime_s: float = LIFETIME_S,
        pause_s: float = 1.0,
    ) -> None:
        self._max_bytes = max_tenant_bytes, max_bytes
        self._redis = RedisScript(
            url, password_file, BOUNDED_ENTRIES, connect_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S
        )
        self._lifetime_ms = round(lifetime_s * 1e3)
        self._pause_s = pause_s
        self._paused_until = 0.0

    async def get(self, tenant: str, name: str) -> bytes | None:
        """Returns an entry, and restarts its lifetime. None if there is no such entry.

        Raises:
            Unavailable: Redis does not answer.
        """
        return await self._run("get", tenant, name)

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        """Stores an entry, and returns whether it is stored."""
        size = len(data) + len(_entry(tenant, name)) + OVERHEAD_BYTES
        try:
            return bool(await self._run("put", tenant, name, size, *self._max_bytes, data))
        except Unavailable:
            return False

    async def delete(self, tenant: str, name: str) -> bool:
        """Deletes an entry, and returns whether there was one.

        Raises:
            Unavailable: Redis does not answer.
        """
        return bool(await self._run("delete", tenant, name))

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    async def _run(self, command: str, tenant: str, name: str, *more: object) -> Any:  # noqa: ANN401
        try:
            if time.monotonic() < self._paused_until:
                raise OSError("Redis failed a moment ago")
            entry = _entry(tenant, name)
            return await self._redis.run(PREFIX, command, entry, self._lifetime_ms, *more)
        except (RedisError, OSError) as error:
            if time.monotonic() >= self._paused_until:
                self._paused_until = time.monotonic() + self._pause_s
                log.warning("stored responses and images cannot be reached in Redis: %s", error)
            message = "stored responses and images cannot be reached now"
            raise Unavailable(message, retry_after_s=self._pause_s) from None


def _entry(tenant: str, name: str) -> bytes:
    return f"{tenant}/{name}".encode()
