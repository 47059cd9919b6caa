"""What tenants name again later, in memory: within bounds, and for a while after its last use."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_ENTRY_BYTES = 256  # besides its name and data

Name = TypeVar("Name", str, bytes)


class TenantStore(Generic[Name]):
    """Each tenant has names of its own. An entry that is too old goes, and to make room for a newer
    one: within its tenant's bytes the least recently used goes first, and where all tenants
    together are over, that of the tenant with the most.

    Args:
        max_tenant_bytes, max_bytes: of one tenant, of all.
        ttl_s: since an entry's last use.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        max_tenant_bytes: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = min(max_tenant_bytes, max_bytes), max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # By tenant and name: data and when it was used, the least recently used first.
        self._entries: dict[str, OrderedDict[Name, tuple[bytes, float]]] = {}
        self._num_bytes: dict[str, int] = {}

    def get(self, tenant: str, name: Name) -> bytes | None:
        """An entry, whose time begins anew."""
        self._expire()
        entries = self._entries.get(tenant)
        if entries is None or name not in entries:
            return None
        data, _ = entries[name]
        entries[name] = data, self._clock()
        entries.move_to_end(name)
        return data

    def put(self, tenant: str, name: Name, data: bytes) -> bool:
        """Keeps an entry in place of one of that name; False: it is too large."""
        self._expire()
        self._forget(tenant, name)
        most_of_tenant, most = self._max_bytes
        size = _size(name, data)
        if size > most_of_tenant:
            return False
        while self._num_bytes.get(tenant, 0) + size > most_of_tenant:
            self._forget_oldest(tenant)
        while sum(self._num_bytes.values()) + size > most:
            self._forget_oldest(
                max(self._num_bytes, key=lambda t: self._num_bytes[t] + size * (t == tenant))
            )
        self._entries.setdefault(tenant, OrderedDict())[name] = data, self._clock()
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + size
        return True

    def delete(self, tenant: str, name: Name) -> bool:
        """Forgets an entry; returns whether there was one."""
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
