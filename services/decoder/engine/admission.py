"""Which waiting sequence is admitted next: tenants by weight, each in its own order. Pure Python.

Start-time fair queueing (Goyal et al., 1996): a tenant's counter grows by the prompt tokens of each
sequence that is admitted, divided by its weight, and the lowest counter is next. A tenant that
comes back from idleness starts where the last admission did: time without requests earns nothing.

While several tenants are known, a part of the rows and blocks is kept for those that hold no row.
With bounded steps, a request of a quiet tenant waits for the step that is under way, and is the
first of the next one, whatever another tenant has waiting. Quotas are the gateway's.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator

from services.decoder.engine.sequence import Sequence

_KEPT = 16  # a sixteenth is for tenants without a row


class AdmissionPolicy:
    """Owner of the waiting sequences; with one tenant a queue by priority and arrival."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}  # by tenant, not empty
        self._counters: dict[str, float] = {}
        self._rows = Counter[str]()
        self._now = 0.0  # the counter that the last admission began at

    def __len__(self) -> int:
        """Sequences that wait."""
        return sum([len(queue) for queue in self._queues.values()])

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence: a new one, or one that was preempted."""
        tenant = sequence.tenant
        if tenant not in self._queues:
            self._queues[tenant] = []
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._now)
        insort(self._queues[tenant], sequence, key=lambda s: (s.priority, s.arrival))

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence from its queue."""
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]

    def head(self, free: float) -> Sequence | None:
        """The sequence that is next; None: none may be admitted.

        Args:
            free: share of the rows that are free or can be.
        """
        tenants = self._queues.keys()
        if len(self._counters) > 1 and free < 1 / _KEPT:
            tenants = [tenant for tenant in tenants if not self._rows[tenant]]
        if not tenants:
            return None
        return self._queues[min(tenants, key=self._counters.__getitem__)][0]

    def kept_share(self, sequence: Sequence) -> float:
        """The share of the blocks that its admission leaves free."""
        several = len(self._counters) > 1
        return 1 / _KEPT if several and self._rows[sequence.tenant] else 0.0

    def admitted(self, sequence: Sequence) -> None:
        """Takes the head, which was given a row, from its queue."""
        self.remove(sequence)
        tenant = sequence.tenant
        self._now = self._counters[tenant]
        self._counters[tenant] += sequence.num_prompt_tokens / sequence.tenant_weight
        self._rows[tenant] += 1

    def released(self, sequence: Sequence) -> None:
        """Counts a row that was returned."""
        self._rows[sequence.tenant] -= 1

    def precedes(self, head: Sequence, prefilling: Sequence) -> bool:
        """Whether the head's first chunk comes before another prompt's next one."""
        return self._counters[head.tenant] < self._counters[prefilling.tenant]

    def ordered(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Prompts that are under way, in the order in which a step computes them."""
        if len(self._counters) == 1:
            return list(prefilling)
        return sorted(prefilling, key=lambda s: self._counters[s.tenant])
