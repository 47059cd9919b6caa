"""Which waiting sequence is admitted next, and which is preempted. Pure Python."""

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from services.decoder.engine.sequence import Sequence

latest = attrgetter("priority", "admission")  # the greatest is preempted first


class AdmissionPolicy:
    """Owner of the waiting sequences: a queue by priority and arrival."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def may_preempt(self) -> bool:
        """Whether a running sequence may have to yield to a waiting one, see `must_yield`."""
        return False

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence: a new one, or one that was preempted."""
        insort(self._queue, sequence, key=lambda s: (s.priority, s.arrival))

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence from its queue."""
        self._queue.remove(sequence)

    def head(self) -> Sequence | None:
        """The sequence that is next; None: none waits."""
        return self._queue[0] if self._queue else None

    def admitted(self, sequence: Sequence) -> None:
        """Takes the head, which was given a row, from its queue."""
        self.remove(sequence)

    def released(self, sequence: Sequence) -> None:
        """A row was returned."""

    def precedes(self, head: Sequence, prefilling: Sequence) -> bool:
        """Whether the head's first chunk comes before another prompt's next one."""
        return False

    def ordered(self, prefilling: Iterable[Sequence]) -> list[Sequence]:
        """Prompts that are under way, in the order in which a step computes them."""
        return list(prefilling)

    def victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence to preempt."""
        return max(running, key=latest)

    def must_yield(self, victim: Sequence, head: Sequence) -> bool:
        """Whether a running sequence is to make room for the head."""
        return False
