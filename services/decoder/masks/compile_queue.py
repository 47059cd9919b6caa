"""The queue of grammars that wait to be compiled, ordered by weighted fair queueing of tenants.

The queue is plain state of the front process.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from services.common.errors import Overloaded
from services.common.tenancy.fair_order import FairOrder
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.verdicts import StoredVerdict

MAX_WAITING = 256
MAX_WAITING_OF_TENANT = 64


@dataclass(slots=True, eq=False)
class CompileJob:
    """A grammar that waits to be compiled, or is being compiled.

    Attributes:
        key: digest of the grammar.
        source: text of the grammar.
        tenant: tenant that is charged for the compilation.
        done: future of the verdict.
        num_waiting: number of requests that wait for the verdict.
        num_losses: number of processes that ended while they worked on the grammar.
        cpu_s: CPU seconds that compilations of the grammar have taken so far.
    """

    key: bytes
    source: GrammarSource
    tenant: str
    done: "asyncio.Future[StoredVerdict]"
    num_waiting: int = 0
    num_losses: int = 0
    cpu_s: float = 0.0


class CompileQueue:
    """Orders jobs by weighted fair queueing among tenants, whose unit is the CPU second.

    The cost of a job is known when the job is done. The tenant's next job then has its place after
    all the CPU time that the tenant has used. Jobs of one tenant stay in order.
    """

    def __init__(self) -> None:
        self._order = FairOrder()
        # By tenant, never empty. Of tenants with the same place, the first has its turn.
        self._jobs: dict[str, deque[CompileJob]] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        return self._num_jobs

    def put(self, job: CompileJob) -> None:
        """Adds a job after all other jobs of the same tenant.

        Raises:
            Overloaded: too many jobs wait, either of all tenants or of this tenant.
        """
        jobs = self._jobs.get(job.tenant, ())
        if self._num_jobs >= MAX_WAITING or len(jobs) >= MAX_WAITING_OF_TENANT:
            raise Overloaded("too many grammars wait to be compiled", retry_after_s=2)
        self._jobs.setdefault(job.tenant, deque()).append(job)
        self._num_jobs += 1

    def take(self) -> CompileJob:
        """Removes and returns the job whose turn it is. The queue must not be empty, and the job
        taken before must have been charged.
        """
        tenant = min(self._jobs, key=self._order.start)
        self._order.served(self._order.start(tenant))
        jobs = self._jobs.pop(tenant)
        job = jobs.popleft()
        self._num_jobs -= 1
        if jobs:
            self._jobs[tenant] = jobs  # behind the other tenants
        return job

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Charges a tenant for the job that was taken last, which must be done.

        Args:
            tenant: tenant of the job.
            cpu_s: CPU seconds that the job has taken.
        """
        self._order.charge(tenant, self._order.now, cost=cpu_s)
