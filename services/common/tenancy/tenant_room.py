"""How much tenants may hold at once of something that is bounded: places in a queue, say."""

from collections import Counter

_RESERVED = 4  # a quarter is for tenants with less than their share


class TenantRoom:
    """Counts what tenants hold. The last quarter is only for those with less than an equal share,
    so that one tenant fills at most three quarters. Callers without a key ("") are not held to it:
    with them nobody else is there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held_by: Counter[str] = Counter()
        self.held = 0

    def has_room(self, tenant: str, amount: int) -> bool:
        """Whether a tenant may take this much more."""
        most = self._most
        if tenant:
            active = len(self._held_by) + (tenant not in self._held_by)
            if self._held_by.get(tenant, 0) * max(2, active) >= self._most:
                most -= self._most // _RESERVED
        return self.held + amount <= most

    def take(self, tenant: str, amount: int) -> None:
        """Counts it, whether or not there is room."""
        self.held += amount
        self._held_by[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Counts it no more."""
        self.held -= amount
        self._held_by[tenant] -= amount
        if not self._held_by[tenant]:
            del self._held_by[tenant]
