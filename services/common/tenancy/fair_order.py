"""In which order tenants are served where they wait for the same thing: weighted fair queueing.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). What waits gets a place, which is a time on
a clock that runs with the service: of the tenant's last piece of work, its cost over the tenant's
weight later, or now if the tenant has none. The lowest place is served next. A tenant that has
waited for nothing so far is behind nobody's backlog; with one tenant the order is that of arrival.
Pure: no clock of its own, no threads.
"""


class FairOrder:
    """Gives places. The caller keeps what waits, serves the lowest place first, and says so."""

    def __init__(self) -> None:
        self._now = 0.0  # the place that was served last
        self._ends: dict[str, float] = {}  # by tenant, of its last piece of work; all after now

    @property
    def now(self) -> float:
        """The place that was served last. A tenant that gets it is behind nothing of its own."""
        return self._now

    def start(self, tenant: str) -> float:
        """The place that a tenant's next piece of work would get now."""
        return max(self._now, self._ends.get(tenant, 0.0))

    def place(self, tenant: str, *, weight: float = 1.0, cost: float = 1.0) -> float:
        """The place of a new piece of work, behind all of the same tenant.

        Args:
            cost: of the work, in any unit that is the same for all.
        """
        start = self.start(tenant)
        self._ends[tenant] = start + cost / weight
        return start

    def charge(self, tenant: str, place: float, *, weight: float = 1.0, cost: float) -> None:
        """Adds a cost that is known only when the work has been done: the tenant's next pieces of
        work get later places.

        Args:
            place: where the work was served.
        """
        self._ends[tenant] = max(place, self._ends.get(tenant, 0.0)) + cost / weight

    def served(self, place: float) -> None:
        """Work at this place has left the queue to be done."""
        if place > self._now:
            self._now = place
            if len(self._ends) < 2:
                return  # a tenant alone, whose next place is no other for it
            self._ends = {name: end for name, end in self._ends.items() if end > place}
