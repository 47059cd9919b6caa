"""Which waiting sequence is admitted next, and which is preempted. Pure Python.

The tenant with the fewest rows for its weight is next, so that tenants that compete run as many
sequences as their weights say, and a quiet tenant's prompt is the first of the next step whatever
another has waiting. Within a tenant the order is that of priority and arrival. With one tenant all
of this is a plain queue. Quotas are the gateway's.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from services.decoder.engine.schedule.sequence import Sequence

latest = attrgetter("message.priority", "admission")  # the greatest is preempted first
_MUCH = 2  # times the rows of another tenant


class Admission:
    """Owner of the waiting sequences and of the tenants' counts of rows."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}  # by tenant, not empty
        self._rows = Counter[str]()

    def __len__(self) -> int:
        """Sequences that wait."""
        return sum([len(queue) for queue in self._queues.values()])

    @property
    def may_preempt(self) -> bool:
        """Whether sequences of several tenants run or wait, of which one may have to yield."""
        return len(self._rows.keys() | self._queues.keys()) > 1

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence: a new one, or one that was preempted."""
        queue = self._queues.setdefault(sequence.tenant, [])
        insort(queue, sequence, key=lambda s: (s.message.priority, s.arrival))

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]

    def head(self) -> Sequence | None:
        """The sequence that is next; None: none waits."""
        heads = [queue[0] for queue in self._queues.values()]
        return min(heads, key=lambda s: (self._use(s), s.arrival), default=None)

    def admitted(self, sequence: Sequence) -> None:
        """Takes the head, which was given a row, from its queue."""
        self.remove(sequence)
        self._rows[sequence.tenant] += 1

    def released(self, sequence: Sequence) -> None:
        """A row was returned."""
        self._rows[sequence.tenant] -= 1
        if not self._rows[sequence.tenant]:
            del self._rows[sequence.tenant]

    def precedes(self, head: Sequence, prefilling: Sequence) -> bool:
        """Whether the head's first chunk comes before another prompt's next one."""
        return head.tenant != prefilling.tenant and self._use(head) <= self._use(prefilling)

    def ordered(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Prompts that are under way, in the order in which a step computes them."""
        return sorted(prefilling, key=self._use) if len(self._rows) > 1 else list(prefilling)

    def victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence to preempt: of the tenant with most rows for its weight, the latest
        admitted of the last priority.
        """
        if len(self._rows) > 1:
            largest = max(running, key=self._use).tenant
            running = [s for s in running if s.tenant == largest]
        return max(running, key=latest)

    def yielding(self, head: Sequence, running: list[Sequence]) -> Sequence | None:
        """The running sequence that makes room for the head; None: none has to. Its tenant has at
        least twice as many rows for its weight as the head's will have, so that none is preempted
        in turn, and with one less still more than the head's has, so that the head is the next.
        """
        use = self._use(head)
        wanted = _MUCH * (use + 1 / head.message.tenant_weight)
        able = [
            sequence
            for sequence in running
            if sequence.tenant != head.tenant
            and self._use(sequence) >= wanted
            and (self._rows[sequence.tenant] - 1) / sequence.message.tenant_weight > use
        ]
        return self.victim(able) if able else None

    def _use(self, sequence: Sequence) -> float:
        """A tenant's rows for its weight."""
        return self._rows[sequence.tenant] / sequence.message.tenant_weight
