"""What clients name again later: answers of /v1/responses, and images with a `uuid`.

Each tenant has names of its own, so that another tenant's are not found. An entry goes an hour
after it was used last, or when a newer one takes its place: within its tenant's bytes the least
recently used goes first, and where all tenants together are over, that of the tenant with the most.
Here entries are in this process; `kept_redis` has them for several gateways.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

KEPT_S = 3600.0
MAX_TENANT_BYTES, MAX_BYTES = 32 << 20, 128 << 20


class Kept(Protocol):
    """A store of entries.

    Attributes:
        terms: when an entry is no longer found, for the error that says so.
    """

    terms: str

    async def get(self, tenant: str, name: str) -> bytes | None:
        """An entry, whose hour begins anew. Raises Unavailable: the store does not answer."""
        ...

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        """Keeps an entry in place of one of that name; returns whether it is kept."""
        ...

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
        self._max_bytes = min(max_tenant_bytes, max_bytes), max_bytes
        self._clock = clock
        # By tenant and name: data and when it was used, the least recently used first.
        self._entries: dict[str, OrderedDict[str, tuple[bytes, float]]] = {}
        self._num_bytes: dict[str, int] = {}

    async def get(self, tenant: str, name: str) -> bytes | None:
        self._expire()
        entries = self._entries.get(tenant)
        if entries is None or name not in entries:
            return None
        data, _ = entries[name]
        entries[name] = data, self._clock()
        entries.move_to_end(name)
        return data

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        self._expire()
        self._forget(tenant, name)
        most_of_tenant, most = self._max_bytes
        size = _size(name, data)
        if size > most_of_tenant:
            return False
        while self._num_bytes.get(tenant, 0) + size > most_of_tenant:
            self._forget_oldest(tenant)
        while sum(self._num_bytes.values()) + size > most:
            self._forget_oldest(max(self._num_bytes, key=lambda t: self._num_bytes[t]))
        self._entries.setdefault(tenant, OrderedDict())[name] = data, self._clock()
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + size
        return True

    async def delete(self, tenant: str, name: str) -> bool:
        self._expire()
        return self._forget(tenant, name)

    async def close(self) -> None:
        """See `Kept`."""

    def _expire(self) -> None:
        last = self._clock() - KEPT_S
        for tenant, entries in list(self._entries.items()):
            while entries and next(iter(entries.values()))[1] < last:
                self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._entries[tenant])))

    def _forget(self, tenant: str, name: str) -> bool:
        entries = self._entries.get(tenant)
        if entries is None or name not in entries:
            return False
        data, _ = entries.pop(name)
        self._num_bytes[tenant] -= _size(name, data)
        if not entries:
            del self._entries[tenant], self._num_bytes[tenant]
        return True


def _size(name: str, data: bytes) -> int:
    return 256 + len(name) + len(data)
