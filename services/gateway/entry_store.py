"""Store of entries that later requests name: responses of /v1/responses, and images with a `uuid`.

Each tenant has names of its own, so that no tenant finds another tenant's entries. An entry is
dropped an hour after its last use, or when the space is needed for a newer entry; see
`TenantStore`. The store of this file is in the gateway's memory. `redis_entry_store` shares its
entries among several gateways.
"""

import time
from collections.abc import Callable
from typing import Protocol

from services.common.tenancy.tenant_store import TenantStore
from services.gateway.media.images import StoredImages

LIFETIME_S = 3600.0
MAX_TENANT_BYTES, MAX_BYTES = 32 << 20, 128 << 20


class EntryStore(StoredImages, Protocol):
    """A store of responses and images."""

    async def delete(self, tenant: str, name: str) -> bool:
        """Deletes an entry, and returns whether there was one.

        Raises:
            Unavailable: the store does not answer.
        """
        ...

    async def close(self) -> None:
        """Closes the connections of the store."""
        ...


class MemoryEntryStore:
    """Entries of one gateway, in its memory.

    Args:
        max_tenant_bytes: largest number of bytes of one tenant's entries.
        max_bytes: largest number of bytes of all entries.
        clock: monotonic clock, in seconds.
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
        self._store = TenantStore[str](max_tenant_bytes, max_bytes, LIFETIME_S, clock)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all entries."""
        return self._store.num_bytes

    async def get(self, tenant: str, name: str) -> bytes | None:
        """Returns an entry, and restarts its lifetime. None if there is no such entry."""
        return self._store.get(tenant, name)

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        """Stores an entry, and returns whether it is stored."""
        return self._store.put(tenant, name, data)

    async def delete(self, tenant: str, name: str) -> bool:
        """Deletes an entry, and returns whether there was one."""
        return self._store.delete(tenant, name)

    async def close(self) -> None:
        """Does nothing, since the store has no connections."""
