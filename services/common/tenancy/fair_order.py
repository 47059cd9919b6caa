"""Weighted fair queueing: the order in which tenants are served that wait for the same thing.

The algorithm is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each piece of work that
waits gets a place, which is its virtual start time. The place is that of the tenant's previous
piece of work plus the cost of the previous piece over the tenant's weight, or the current virtual
time if the tenant has nothing waiting. The lowest place is served next.

A tenant without waiting work is never behind the backlog of another tenant. Therefore work that
leaves the queue without being done is given back with `refund`. A report with `served` would take
the virtual time past waiting work with lower places.

With a single tenant the order is the order of arrival. For example, if `a` submits three pieces of
cost 1 at virtual time 0 and `b` submits one afterwards, the places are a: 0, 1, 2 and b: 0, so `b`
is served second.

Work in the background has an order of its own behind all other work.
"""

# First place of the work in the background. Floats of this size still tell costs of 16 apart.
_BEHIND = 2.0**56


class FairOrder:
    """Assigns places. The caller keeps the queue, serves the lowest place first, and reports that
    with `served`.
    """

    def __init__(self) -> None:
        self._now = 0.0  # virtual time: the place that was served last
        self._ends: dict[str, float] = {}  # end of each tenant's last piece of work, all after now
        self._behind: FairOrder | None = None  # order of the work in the background

    @property
    def now(self) -> float:
        """Virtual time, which is the place that was served last."""
        return self._now

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose last piece of work ends after the virtual time."""
        return len(self._ends)

    def start(self, tenant: str) -> float:
        """Returns the place that the tenant's next piece of work would get now."""
        return max(self._now, self._ends.get(tenant, 0.0))

    def place(
        self, tenant: str, *, weight: float = 1.0, cost: float = 1.0, background: bool = False
    ) -> float:
        """Returns the place of a new piece of work, behind the tenant's other pieces of work.

        Args:
            weight: weight of the tenant.
            cost: cost of the work, in a unit that is the same for all tenants.
            background: true for work that comes behind all other work.
        """
        if background:
            self._behind = self._behind or FairOrder()
            return _BEHIND + self._behind.place(tenant, weight=weight, cost=cost)
        start = self.start(tenant)
        self._ends[tenant] = start + cost / weight
        return start

    def charge(self, tenant: str, place: float, *, weight: float = 1.0, cost: float) -> None:
        """Adds a cost that is known only after the work. The tenant's next pieces of work get later
        places.

        Args:
            place: place at which the work was served.
            weight: weight of the tenant.
            cost: cost of the work, in a unit that is the same for all tenants.
        """
        if self._behind is not None and place >= _BEHIND:
            self._behind.charge(tenant, place - _BEHIND, weight=weight, cost=cost)
            return
        self._ends[tenant] = max(place, self._ends.get(tenant, 0.0)) + cost / weight

    def refund(self, tenant: str, place: float, *, weight: float = 1.0, cost: float = 1.0) -> None:
        """Takes back the cost of work that has left the queue without being done. The tenant's next
        pieces of work get earlier places. Waiting work keeps its place.

        Args:
            place: place of the work.
            weight: weight of the tenant.
            cost: cost with which the work was placed.
        """
        if self._behind is not None and place >= _BEHIND:
            self._behind.refund(tenant, place - _BEHIND, weight=weight, cost=cost)
            return
        # The part of the cost before the virtual time delays no work of the tenant any more.
        refunded = min(cost / weight, place + cost / weight - self._now)
        if refunded > 0 and tenant in self._ends:
            self._ends[tenant] -= refunded
            if self._ends[tenant] <= self._now:
                del self._ends[tenant]

    def served(self, place: float) -> None:
        """Records that the work at a place has left the queue and is being done."""
        if self._behind is not None and place >= _BEHIND:
            self._behind.served(place - _BEHIND)
            return
        if place > self._now:
            self._now = place
            if len(self._ends) < 2:
                return  # the order of a single tenant does not depend on the old ends
            self._ends = {name: end for name, end in self._ends.items() if end > place}
