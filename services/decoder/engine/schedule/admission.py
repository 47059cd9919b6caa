"""Admission: the order in which sequences get a row and lose it. Pure Python.

A row is a running sequence's place in the runner's tables. The tenant with the fewest rows for its
weight is next. So tenants that compete run as many sequences as their weights say, and the prompt
of a quiet tenant is the first of the next step, however many prompts another tenant has waiting.
Within a tenant, sequences are ordered by priority, then by arrival, or by `fair_queue` if the model
is one for search. With one tenant, all of this is a plain queue. Sequences in the background come
behind all others, whosever they are, and are the first to be preempted. Quotas are the gateway's.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from operator import attrgetter

from services.decoder.engine.schedule.fair_queue import FairQueue
from services.decoder.engine.schedule.sequence import Sequence

# The greatest is preempted first.
latest = attrgetter("message.background", "message.priority", "admission")
# A tenant's sequence yields its row to a tenant that has fewer than half as many rows.
_YIELD_FACTOR = 2
# Added to the use of a tenant's background sequences: more than any tenant's rows for its weight.
_BACKGROUND_USE = 1e9


class Admission:
    """Owner of the waiting sequences and of the rows.

    Args:
        num_rows: number of sequences that may run at once.
        fair: True if the requests of a tenant are ordered by `fair_queue`.

    Attributes:
        free_rows: rows that no sequence holds.
        prefers_overdue: True while sequences of overdue requests (`fair_queue`) come before the
            others of their tenant and priority.
    """

    def __init__(self, num_rows: int, *, fair: bool = False) -> None:
        self._fair_queue = FairQueue() if fair else None
        self.prefers_overdue = False
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._queues: dict[str, list[Sequence]] = {}  # by tenant, not empty
        self._num_rows = Counter[str]()  # by tenant

    def __len__(self) -> int:
        """Returns the number of waiting sequences."""
        return sum([len(queue) for queue in self._queues.values()])

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the waiting sequences, tenant by tenant."""
        return chain.from_iterable(self._queues.values())

    @property
    def has_free_row(self) -> bool:
        """True if a sequence could get a row."""
        return bool(self.free_rows)

    @property
    def has_foreground(self) -> bool:
        """True if a waiting sequence is not in the background."""
        return any([not queue[0].message.background for queue in self._queues.values()])

    @property
    def may_preempt(self) -> bool:
        """True if sequences of several tenants run or wait, so that one may have to yield."""
        return len(self._num_rows.keys() | self._queues.keys()) > 1

    def arrived(self, sequence: Sequence) -> None:
        """Notes a new sequence, before it waits."""
        if (fair := self._fair_queue) is not None:
            request, num_tokens = sequence.message.request, sequence.num_prompt_tokens
            sequence.flow = fair.add(sequence.tenant, request, num_tokens)

    def planned(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes that a step computes so many tokens of a sequence's prompt."""
        if self._fair_queue is not None and sequence.flow is not None:
            self._fair_queue.advance(sequence.flow, num_tokens)

    def finished(self, sequence: Sequence) -> None:
        """Notes that a sequence has finished."""
        if self._fair_queue is not None:
            is_cut = sequence.num_computed_tokens < sequence.num_prompt_tokens
            self._fair_queue.remove(sequence.tenant, sequence.message.request, is_cut=is_cut)

    @property
    def has_overdue(self) -> bool:
        """True if a request is overdue (`fair_queue`)."""
        return self._fair_queue is not None and self._fair_queue.has_overdue

    def is_overdue(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's request is overdue (`fair_queue`)."""
        fair, flow = self._fair_queue, sequence.flow
        return fair is not None and flow is not None and fair.is_overdue(flow)

    def wait(self, sequence: Sequence) -> None:
        """Queues a new or a preempted sequence."""
        queue = self._queues.setdefault(sequence.tenant, [])
        insort(queue, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue."""
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]

    def head(self) -> Sequence | None:
        """Returns the sequence that is admitted next, or None if no sequence waits."""
        if self._fair_queue is not None and self._fair_queue.take_change():
            for queue in self._queues.values():
                queue.sort(key=_turn)
        heads = [self._first(queue) for queue in self._queues.values()]
        return min(heads, key=lambda s: (self._use(s), s.arrival), default=None)

    def admit(self, sequence: Sequence) -> None:
        """Takes the head out of the queue and gives it a row."""
        self.remove(sequence)
        self._num_rows[sequence.tenant] += 1
        if not sequence.num_preemptions:
            self.planned(sequence, sequence.num_cached_tokens)
        sequence.row = self.free_rows.pop()

    def release_row(self, sequence: Sequence) -> None:
        """Takes the sequence's row back."""
        self._num_rows[sequence.tenant] -= 1
        if not self._num_rows[sequence.tenant]:
            del self._num_rows[sequence.tenant]
        self.free_rows.append(sequence.row)
        sequence.row = -1

    def precedes(self, head: Sequence, prefilling: Sequence) -> bool:
        """Returns whether the head's first chunk comes before another prompt's next chunk."""
        if head.tenant == prefilling.tenant:
            return self._fair_queue is not None and self._place(head) < self._place(prefilling)
        return self._use(head) <= self._use(prefilling)

    def ordered(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Returns prompts under way in the order in which a step computes them."""
        found = list(prefilling)
        if self._fair_queue is not None:
            found.sort(key=self._place)
        return sorted(found, key=self._use) if len(self._num_rows) > 1 else found

    def victim(self, running: list[Sequence]) -> Sequence:
        """Returns the running sequence to preempt next.

        The sequence belongs to the tenant with the most rows for its weight. Within the tenant it
        has the last priority, and within the priority it was admitted last.
        """
        if len(self._num_rows) > 1:
            largest = max(running, key=self._use).tenant
            running = [s for s in running if s.tenant == largest]
        return max(running, key=latest)

    def yielding(self, head: Sequence, running: list[Sequence]) -> Sequence | None:
        """Returns the sequence that yields its row to the head, or None if no tenant yields a row.

        A tenant yields a row under two conditions. For its weight, the tenant has at least twice as
        many rows as the head's tenant will have, so that the head is not preempted in turn. And
        afterwards the tenant still has more rows than the head's tenant has now, so that the head
        is admitted next.
        """
        use = self._use(head)
        wanted = _YIELD_FACTOR * (use + 1 / head.message.tenant_weight)
        able = [
            sequence
            for sequence in running
            if sequence.tenant != head.tenant
            and self._use(sequence) >= wanted
            and self._use(sequence) - 1 / sequence.message.tenant_weight > use
        ]
        return self.victim(able) if able else None

    def _first(self, queue: list[Sequence]) -> Sequence:
        """Returns the first sequence of a tenant's queue."""
        first = queue[0]
        if self.prefers_overdue:
            alike = takewhile(lambda s: s.message.priority == first.message.priority, queue)
            first = min(filter(self.is_overdue, alike), key=self._place, default=first)
        return first

    def _place(self, sequence: Sequence) -> tuple[int, bool, float, int]:
        """Returns the key that orders the sequences of a tenant at present."""
        priority, tag, arrival = _turn(sequence)
        if self.prefers_overdue and sequence.flow is not None and self.is_overdue(sequence):
            return priority, False, sequence.flow.due, arrival
        return priority, True, tag, arrival

    def _use(self, sequence: Sequence) -> float:
        """Returns the number of rows that the sequence's tenant holds, divided by its weight. The
        sequences of a tenant all run in the background, or none does.
        """
        use = self._num_rows[sequence.tenant] / sequence.message.tenant_weight
        return use + _BACKGROUND_USE * sequence.message.background


def _turn(sequence: Sequence) -> tuple[int, float, int]:
    """Returns the key that orders the waiting sequences of a tenant."""
    tag = 0.0 if sequence.flow is None else sequence.flow.finish_tag
    return sequence.message.priority, tag, sequence.arrival
