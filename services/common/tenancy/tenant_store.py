"""Entries that tenants store and name again later, in memory and within bounds."""

import time
from collections import OrderedDict
from typing import Generic, TypeVar

from services.common.clock import Clock

_ENTRY_BYTES = 256  # counted for an entry in addition to its name and data

Name = TypeVar("Name", str, bytes)


class TenantStore(Generic[Name]):
    """A store in which each tenant has names of its own.

    Entries expire some time after their last use. A tenant at its limit loses its least recently
    used entries. If all tenants together reach the limit, the tenant with the most bytes does.

    Args:
        max_tenant_bytes: largest number of bytes of one tenant.
        max_bytes: largest number of bytes of all tenants.
        ttl_s: time to live of an entry after its last use.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        max_tenant_bytes: int,
        max_bytes: int,
        ttl_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_bytes = min(max_tenant_bytes, max_bytes), max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # Data and time of the last use, by tenant and name, the least recently used first.
        self._entries: dict[str, OrderedDict[Name, tuple[bytes, float]]] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all entries, expired entries included until they are dropped."""
        return sum(self._num_bytes.values())

    def get(self, tenant: str, name: Name) -> bytes | None:
        """Returns an entry, whose time to live begins again, or None if there is no such entry."""
        self._expire()
        entries = self._entries.get(tenant)
        if entries is None or name not in entries:
            return None
        data, _ = entries[name]
        entries[name] = data, self._clock()
        entries.move_to_end(name)
        return data

    def put(self, tenant: str, name: Name, data: bytes) -> bool:
        """Stores an entry, which replaces an entry of the same name.

        Returns:
            Whether the entry was stored. False if it alone is over a limit.
        """
        self._expire()
        self._forget(tenant, name)
        most_of_tenant, most = self._max_bytes
        size = _size(name, data)
        if size > most_of_tenant:
            return False
        while self._num_bytes.get(tenant, 0) + size > most_of_tenant:
            self._forget_oldest(tenant)
        while self.num_bytes + size > most:
            self._forget_oldest(
                max(self._num_bytes, key=lambda t: self._num_bytes[t] + size * (t == tenant))
            )
        self._entries.setdefault(tenant, OrderedDict())[name] = data, self._clock()
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + size
        return True

    def delete(self, tenant: str, name: Name) -> bool:
        """Deletes an entry and returns whether it existed."""
        self._expire()
        return self._forget(tenant, name)

    def _expire(self) -> None:
        last = self._clock() - self._ttl_s
        for tenant, entries in list(self._entries.items()):
            while entries and next(iter(entries.values()))[1] < last:
                self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._entries[tenant])))

    def _forget(self, tenant: str, name: Name) -> bool:
        entries = self._entries.get(tenant)
        if entries is None or name not in entries:
            return False
        data, _ = entries.pop(name)
        self._num_bytes[tenant] -= _size(name, data)
        if not entries:
            del self._entries[tenant], self._num_bytes[tenant]
        return True


def _size(name: str | bytes, data: bytes) -> int:
    return _ENTRY_BYTES + len(name) + len(data)
