"""Shares of a bounded capacity among tenants, such as the places in a queue or bytes of memory."""

from collections import Counter

_RESERVED = 4  # a quarter is reserved for tenants below an equal share


class TenantCapacity:
    """Counts how much of a capacity each tenant uses.

    The last quarter of the capacity is for tenants below an equal share, so that one tenant uses at
    most three quarters. Callers without a key (tenant "") are not limited to that: where they are
    served, there are no other tenants.

    Args:
        most: the capacity, in any unit.

    Attributes:
        used: amount that all tenants use together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used_by: Counter[str] = Counter()
        self.used = 0

    def allows(self, tenant: str, amount: int) -> bool:
        """Returns whether a tenant may take this amount in addition."""
        most = self._most
        if tenant:
            active = len(self._used_by) + (tenant not in self._used_by)
            if self._used_by.get(tenant, 0) * max(2, active) >= self._most:
                most -= self._most // _RESERVED
        return self.used + amount <= most

    def take(self, tenant: str, amount: int) -> None:
        """Counts an amount as used, whether or not `allows` returns True for it."""
        self.used += amount
        self._used_by[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Counts an amount as free again."""
        self.used -= amount
        self._used_by[tenant] -= amount
        if not self._used_by[tenant]:
            del self._used_by[tenant]
