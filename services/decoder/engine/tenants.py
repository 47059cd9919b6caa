"""Which tenant's sequence is admitted next, and who gives way: weighted fair queueing. Pure Python.

Each tenant has a counter of the tokens that it was served, divided by its weight; the waiting
tenant with the lowest counter is next ("Fairness in Serving Large Language Models", Sheng et al.,
2024: the virtual token counter). A tenant that comes back from idleness starts at the lowest
counter of the active ones: time without requests earns nothing. Within a tenant the order is that
of arrival.

Counters decide who is admitted; use decides who keeps what it has. What a tenant uses is its part
of the rows or of the KV blocks, whichever is larger, divided by its weight (dominant resource
fairness, Ghodsi et al., 2011). A tenant that uses much gives way, by preemption, to one that uses
less. With one tenant all of this is a plain queue.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.decoder.engine.sequence import Sequence

_MUCH = 2.0  # times what another tenant has
_NEWEST, _FIRST_GUESS = 0.1, 64.0  # of the mean length of completions


@dataclass(slots=True, eq=False)
class Tenant:
    """An active tenant: one with sequences that have not ended.

    Attributes:
        served: tokens computed for it and expected of its running sequences, divided by its weight.
        num_expected: tokens that are only expected.
        mean_completion: tokens of its completions, the latest counting most.
        num_sequences: that have not ended.
        num_rows: that its running sequences hold.
        waiting: its sequences without a row, in order.
    """

    weight: float
    served: float
    mean_completion: float = _FIRST_GUESS
    num_expected: int = 0
    num_sequences: int = 0
    num_rows: int = 0
    waiting: list[Sequence] = field(default_factory=list[Sequence])

    @property
    def paid(self) -> float:
        """`served` without what is only expected."""
        return self.served - self.num_expected / self.weight


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has, used and free."""

    num_rows: int
    num_blocks: int


class Tenants:
    """Owner of the queues of waiting sequences and of the tenants' counters."""

    def __init__(self) -> None:
        self._active: dict[str, Tenant] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._active.values():
            yield from tenant.waiting

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant has sequences."""
        return len(self._active) > 1

    def settled(self) -> set[str]:
        """The tenants that are no newcomers: those with running sequences, and those with many more
        sequences than another, whose rows are all free for a moment while their images are encoded.
        """
        fewest = min((tenant.num_sequences for tenant in self._active.values()), default=0)
        return {
            name
            for name, tenant in self._active.items()
            if tenant.num_rows or tenant.num_sequences > _MUCH * fewest
        }

    def arrived(self, sequence: Sequence) -> None:
        """Counts a new sequence; `wait` queues it."""
        tenant = self._active.get(sequence.tenant)
        if tenant is None:
            served = min((other.paid for other in self._active.values()), default=0.0)
            tenant = self._active[sequence.tenant] = Tenant(sequence.tenant_weight, served)
        tenant.weight = sequence.tenant_weight
        tenant.num_sequences += 1

    def ended(self, sequence: Sequence) -> None:
        """Forgets a sequence that neither waits nor holds a row."""
        tenant = self._active[sequence.tenant]
        tenant.num_sequences -= 1
        if not tenant.num_sequences:
            del self._active[sequence.tenant]

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence at its place."""
        insort(self._active[sequence.tenant].waiting, sequence, key=_place)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence from its queue."""
        self._active[sequence.tenant].waiting.remove(sequence)
        self._num_waiting -= 1

    def head(self) -> Sequence | None:
        """The sequence that is next; None: none waits."""
        if len(self._active) == 1:
            (tenant,) = self._active.values()
            return tenant.waiting[0] if tenant.waiting else None
        waiting = [tenant for tenant in self._active.values() if tenant.waiting]
        return min(waiting, key=_turn).waiting[0] if waiting else None

    def admitted(self, sequence: Sequence, num_computed: int) -> None:
        """Counts a row, and charges what the sequence will compute: the rest of its tokens and as
        many new ones as the tenant's completions had. Charged when they end, many sequences would
        be admitted before the first one counts.

        Args:
            sequence: with the tokens known so far.
            num_computed: of them, found in the prefix cache.
        """
        tenant = self._active[sequence.tenant]
        left = sequence.max_length - len(sequence.token_ids)
        tenant.num_rows += 1
        sequence.num_charged = round(min(tenant.mean_completion, left))
        sequence.num_known_at_admission = len(sequence.token_ids)
        tenant.num_expected += sequence.num_charged
        new = len(sequence.token_ids) - num_computed + sequence.num_charged
        tenant.served += new / tenant.weight

    def left(self, sequence: Sequence) -> None:
        """Counts a row that was returned, and corrects what was charged."""
        tenant = self._active[sequence.tenant]
        computed = len(sequence.token_ids) - sequence.num_known_at_admission
        tenant.num_rows -= 1
        tenant.num_expected -= sequence.num_charged
        tenant.served += (computed - sequence.num_charged) / tenant.weight
        tenant.mean_completion += _NEWEST * (sequence.num_generated - tenant.mean_completion)

    def take_turns(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The first of each tenant, then the second of each: no tenant's prompts are behind all of
        another's.
        """
        if not self.are_several:
            return list(sequences)
        seen: dict[str, int] = {}
        turns: list[tuple[int, int, Sequence]] = []
        for order, sequence in enumerate(sequences):
            turn = seen[sequence.tenant] = seen.get(sequence.tenant, -1) + 1
            turns.append((turn, order, sequence))
        return [sequence for _, _, sequence in sorted(turns, key=lambda entry: entry[:2])]

    def greediest(self, running: list[Sequence], room: "Room") -> list[Sequence]:
        """The running sequences of the tenant that uses most for its weight; empty: none has two.

        A tenant's only running sequence never gives way to another tenant.
        """
        usage = _Usage(self._active, running, room)
        tenants = [name for name, tenant in self._active.items() if tenant.num_rows > 1]
        worst = max(tenants, key=usage.of, default=None)
        return [s for s in running if s.tenant == worst]

    def gives_way(
        self, running: list[Sequence], room: "Room", head: Sequence, num_blocks: int
    ) -> Sequence | None:
        """The running sequence to preempt so that another tenant's may run.

        Args:
            running: all sequences that hold rows.
            room: the engine's.
            head: the sequence that wants to run.
            num_blocks: that it needs.

        Returns:
            The latest admitted, of the last priority, of a tenant that uses, for its weight and
            without that sequence, at least twice as much as the head's tenant will use with the
            head; so no two tenants preempt each other in turn, and what little is unfair is left to
            the counters, which cost nothing. None: there is none.
        """
        usage = _Usage(self._active, running, room)
        wanted = usage.of(head.tenant, 1, num_blocks)
        latest = {s.tenant: s for s in sorted(running, key=lambda s: (s.priority, s.admission))}
        found: list[tuple[float, Sequence]] = []
        for name, victim in latest.items():
            left = usage.of(name, -1, -len(victim.block_table))
            if name != head.tenant and self._active[name].num_rows > 1 and left >= _MUCH * wanted:
                found.append((left, victim))
        return max(found, key=lambda entry: entry[0])[1] if found else None

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError unless the counts are those of `sequences`, all that live."""
        names = {s.tenant for s in sequences}
        assert names == set(self._active), "a tenant without sequences"
        for name, tenant in self._active.items():
            own = [s for s in sequences if s.tenant == name]
            assert tenant.num_sequences == len(own)
            assert tenant.num_rows == sum(s.row >= 0 for s in own)
            assert tenant.waiting == sorted(tenant.waiting, key=_place)
        assert self._num_waiting == sum(1 for _ in self)


class _Usage:
    """What tenants use for their weight. Blocks that sequences share count for each."""

    def __init__(self, active: dict[str, Tenant], running: list[Sequence], room: Room) -> None:
        self._active, self._room = active, room
        self._blocks = dict.fromkeys(active, 0)
        for sequence in running:
            self._blocks[sequence.tenant] += len(sequence.block_table)

    def of(self, name: str, more_rows: int = 0, more_blocks: int = 0) -> float:
        """A tenant's use with `more_rows` and `more_blocks` beside what it has."""
        tenant, room = self._active[name], self._room
        rows = (tenant.num_rows + more_rows) / room.num_rows
        return max(rows, (self._blocks[name] + more_blocks) / room.num_blocks) / tenant.weight


def _place(sequence: Sequence) -> tuple[int, int]:
    """Of a sequence among its tenant's."""
    return sequence.priority, sequence.arrival


def _turn(tenant: Tenant) -> tuple[float, float]:
    """Of a tenant; with equal counters it is that of the one with fewer rows for its weight."""
    return tenant.served, tenant.num_rows / tenant.weight
