"""The queue of grammars that wait to be compiled, ordered by weighted fair queueing of tenants.

The queue is plain state of the front process (`compile_pool`) or of a mask process
(`compilations`).
"""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.errors import Overloaded
from services.common.tenancy.fair_order import FairOrder
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.verdicts import StoredVerdict

MAX_WAITING = 256
# A batch adds no job when this many wait, so that there is always space for jobs of requests.
MAX_WAITING_FOR_BATCH = 128
MAX_WAITING_OF_TENANT = 64

Job = TypeVar("Job", bound=Hashable)


@dataclass(slots=True, eq=False)
class Waiters:
    """The requests of one tenant that wait for the verdict on a grammar.

    Attributes:
        done: future of the verdict.
        background: True if the tenant's turns come behind those of all other tenants.
        number: number of requests.
    """

    done: "asyncio.Future[StoredVerdict]"
    background: bool = False
    number: int = 0


@dataclass(slots=True, eq=False)
class CompileJob:
    """A grammar that waits to be compiled, or is being compiled.

    Attributes:
        key: digest of the grammar.
        source: text of the grammar.
        waiters: requests that wait for the verdict, by tenant. Every tenant has at least one.
        num_losses: number of processes that ended while they worked on the grammar.
        cpu_s: CPU seconds that compilations of the grammar have taken so far.
    """

    key: bytes
    source: GrammarSource
    waiters: dict[str, Waiters] = field(default_factory=dict[str, Waiters])
    num_losses: int = 0
    cpu_s: float = 0.0


class CompileQueue(Generic[Job]):
    """Orders jobs by weighted fair queueing among tenants, whose unit is the CPU second.

    The cost of a job is known when the job is done. The tenant's next job then has its place after
    all the CPU time that the tenant has used. Jobs of one tenant stay in order.

    A job that several tenants wait for has a place among the jobs of each of them. The job is taken
    once, at the place whose turn comes first, and the tenant of this place is charged for it. A
    tenant therefore never waits behind the backlog of another tenant that has sent the same grammar
    before.

    Args:
        is_bounded: True if the queue refuses jobs when many jobs wait.
    """

    def __init__(self, *, is_bounded: bool = True) -> None:
        self._is_bounded = is_bounded
        self._foreground, self._background = FairOrder(), FairOrder()
        # The jobs by tenant, never empty, in the order of their places. The inner dictionaries have
        # no values. Of tenants with the same place, the first has its turn.
        self._places: dict[str, dict[Job, None]] = {}
        self._behind: set[str] = set()  # the tenants whose places are in the background
        self._tenants: dict[Job, set[str]] = {}  # the tenants with a place, by job
        self._served = ""  # tenant in whose turn the last job was taken
        self._order = self._foreground  # order that this turn belonged to

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, job: Job) -> bool:
        return job in self._tenants

    def put(self, job: Job, tenant: str, *, background: bool = False) -> None:
        """Adds a job after all other jobs of a tenant. The job may wait for other tenants already.

        Args:
            job: the job.
            tenant: tenant that waits for the job.
            background: True if the tenant's turns come behind those of all other tenants. All jobs
                of a tenant are in the background, or none is.

        Raises:
            Overloaded: too many jobs wait, either of all tenants or of this tenant.
        """
        jobs = self._places.get(tenant, ())
        is_new = job not in self._tenants  # another place of a job adds no work
        max_waiting = MAX_WAITING_FOR_BATCH if background else MAX_WAITING
        is_full = (is_new and len(self) >= max_waiting) or len(jobs) >= MAX_WAITING_OF_TENANT
        if self._is_bounded and is_full:
            raise Overloaded("too many grammars wait to be compiled", retry_after_s=2)
        self._places.setdefault(tenant, {})[job] = None
        self._tenants.setdefault(job, set()).add(tenant)
        if background:
            self._behind.add(tenant)

    def withdraw(self, job: Job, tenant: str) -> None:
        """Removes a tenant's place of a job that waits. The job keeps the places of other tenants,
        and leaves the queue with the last place.
        """
        self._remove_place(job, tenant)
        tenants = self._tenants[job]
        tenants.remove(tenant)
        if not tenants:
            del self._tenants[job]

    def take(self) -> Job:
        """Removes and returns the job whose turn it is. The queue must not be empty, and the job
        taken before must have been charged.
        """
        self._served = tenant = min(self._places, key=self._turn)
        self._order = self._order_of(tenant)
        self._order.served(self._order.start(tenant))
        job = next(iter(self._places[tenant]))
        for each in self._tenants.pop(job):
            self._remove_place(job, each)
        if tenant in self._places:
            self._places[tenant] = self._places.pop(tenant)  # behind the other tenants
        return job

    def charge(self, cpu_s: float) -> None:
        """Charges the job that was taken last, which must be done, to the tenant in whose turn it
        was taken.

        Args:
            cpu_s: CPU seconds that the job has taken.
        """
        self._order.charge(self._served, self._order.now, cost=cpu_s)

    def _turn(self, tenant: str) -> tuple[bool, float]:
        return tenant in self._behind, self._order_of(tenant).start(tenant)

    def _order_of(self, tenant: str) -> FairOrder:
        return self._background if tenant in self._behind else self._foreground

    def _remove_place(self, job: Job, tenant: str) -> None:
        jobs = self._places[tenant]
        del jobs[job]
        if not jobs:
            del self._places[tenant]
            self._behind.discard(tenant)
