"""What clients name again later, in Redis: for all gateways of one installation.

An entry is a string with a time to live; `bounded_entries` bounds the bytes of tenants.
"""

import logging
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.common.errors import Unavailable
from services.common.tenancy.bounded_entries import BOUNDED_ENTRIES, OVERHEAD_BYTES
from services.gateway.kept import KEPT_S, MAX_BYTES, MAX_TENANT_BYTES
from services.gateway.redis_script import RedisScript

log = logging.getLogger(__name__)

PREFIX = "triptych:kept:"
_TIMEOUT_S = 1.0
# After a failure Redis is left alone for so long: no answer waits for it twice.
_SILENCE_S = 1.0


class RedisKept:
    """Entries of all gateways of one Redis.

    Args:
        url, password_file: of Redis, see `redis_login`.
        max_tenant_bytes, max_bytes: of one tenant, of all.
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
    ) -> None:
        self._max_bytes = max_tenant_bytes, max_bytes
        self._redis = RedisScript(
            url, password_file, BOUNDED_ENTRIES, connect_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S
        )
        self._silent_until = 0.0

    async def get(self, tenant: str, name: str) -> bytes | None:
        return await self._run("get", tenant, name)

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        size = len(data) + len(_entry(tenant, name)) + OVERHEAD_BYTES
        try:
            return bool(await self._run("put", tenant, name, size, *self._max_bytes, data))
        except Unavailable:
            return False

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(await self._run("delete", tenant, name))

    async def close(self) -> None:
        await self._redis.close()

    async def _run(self, what: str, tenant: str, name: str, *more: object) -> Any:  # noqa: ANN401
        try:
            if time.monotonic() < self._silent_until:
                raise OSError("it has just failed")
            entry = _entry(tenant, name)
            return await self._redis.run(PREFIX, what, entry, round(KEPT_S * 1e3), *more)
        except (RedisError, OSError) as error:
            if time.monotonic() >= self._silent_until:
                self._silent_until = time.monotonic() + _SILENCE_S
                log.warning("Redis does not keep what clients name later: %s", error)
            message = "what is kept for later requests cannot be reached now"
            raise Unavailable(message, retry_after_s=_SILENCE_S) from None


def _entry(tenant: str, name: str) -> bytes:
    return f"{tenant}/{name}".encode()
