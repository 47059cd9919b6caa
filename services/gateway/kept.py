"""What clients name again later: answers of /v1/responses, and images with a `uuid`.

Each tenant has names of its own, so that another tenant's are not found. An entry goes an hour
after it was used last, or when a newer one takes its place, see `TenantStore`. Here entries are in
this process; `kept_redis` has them for several gateways.
"""

import time
from collections.abc import Callable
from typing import Protocol

from services.common.tenancy.tenant_store import TenantStore
from services.gateway.media.images import StoredImages

KEPT_S = 3600.0
MAX_TENANT_BYTES, MAX_BYTES = 32 << 20, 128 << 20


class Kept(StoredImages, Protocol):
    """A store of entries of both kinds."""

    async def delete(self, tenant: str, name: str) -> bool:
        """Forgets an entry; returns whether there was one. Raises as `get`."""
        ...

    async def close(self) -> None: ...


class MemoryKept:
    """Entries of one gateway, in its memory.

    Args:
        max_tenant_bytes, max_bytes: of one tenant, of all.
        clock: seconds, monotonic.
    """

    terms = (
        "Without Redis each gateway keeps what it has answered in its own memory: an hour after "
        "the last use at most, until newer entries need the room or the gateway restarts"
    )

    def __init__(
        self,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = TenantStore[str](max_tenant_bytes, max_bytes, KEPT_S, clock)

    async def get(self, tenant: str, name: str) -> bytes | None:
        return self._store.get(tenant, name)

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        return self._store.put(tenant, name, data)

    async def delete(self, tenant: str, name: str) -> bool:
        return self._store.delete(tenant, name)

    async def close(self) -> None:
        """See `Kept`."""
