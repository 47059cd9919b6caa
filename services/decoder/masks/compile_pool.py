"""Checks grammars: finds out whether a grammar can be compiled, and whether that takes long.

A schema is first compiled in the quick lane, with a limit of CPU time that nearly all schemas meet.
A schema that exceeds the limit is compiled again in the slow lane. Grammars that clients write have
a lane of their own. Common schemas therefore never wait for hostile grammars of any tenant. In each
lane tenants take turns by the CPU time that they have used, and batches come behind all requests. A
grammar that several tenants wait for is compiled once, in the turn of the tenant that comes first.
Requests fail if their grammar cannot be compiled or ends its fork. Waiting too long for a turn is
an overload of the decoder.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from prometheus_client import Histogram

from services.common.errors import InvalidGrammar, Overloaded, ProcessLost, TriptychError
from services.common.process.channel import ChannelClosed, FrontChannel
from services.decoder.masks.compile_process import CompileProcess
from services.decoder.masks.compile_queue import CompileJob, CompileQueue, Waiters
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import (
    CLIENTS_LANE,
    LANES,
    QUICK_LANE,
    SLOW_LANE,
    Verdict,
)
from services.decoder.masks.verdicts import StoredVerdict, Verdicts, key_of

log = logging.getLogger(__name__)

MAX_WAIT_S = 10.0  # longest wait of a request for a verdict
# The process must answer within this time. It reads a vocabulary first, and limits each grammar.
_ANSWER_TIMEOUT_S = 60.0
_MAX_LOSSES = 2


@dataclass(slots=True, eq=False)
class _Lane:
    """A fork that compiles grammars in sequence, with a queue of jobs.

    Attributes:
        queue: jobs that wait.
        arrived: event that is set when a job arrives.
        job: job that is being compiled, which outlives the process. None if the lane is idle.
    """

    queue: CompileQueue[CompileJob] = field(default_factory=CompileQueue[CompileJob])
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    job: CompileJob | None = None

    def put(self, job: CompileJob, tenant: str, *, background: bool) -> None:
        """Adds a job to the jobs of a tenant, in the background if `background` is True.

        Raises:
            Overloaded: too many jobs wait.
        """
        self.queue.put(job, tenant, background=background)
        self.arrived.set()


class CompilePool:
    """Owner of the compile process and of the grammars that wait for it. It is used in one event
    loop.

    Args:
        process: the compile process.
        cpu_seconds: histogram of the CPU seconds of a compilation.
        verdicts: stored verdicts.
        max_wait_s: longest time that a request waits for a verdict.
    """

    def __init__(
        self,
        process: CompileProcess,
        cpu_seconds: Histogram,
        verdicts: Verdicts,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.process = process
        self._max_wait_s = max_wait_s
        self._cpu_seconds = cpu_seconds
        self._verdicts = verdicts
        self._lanes = [_Lane() for _ in LANES]
        self._jobs: dict[bytes, CompileJob] = {}  # waiting and running jobs, by key
        self._task = asyncio.create_task(self._work())

    @property
    def num_in_work(self) -> int:
        """Number of grammars that are being compiled."""
        return sum(lane.job is not None for lane in self._lanes)

    async def check(self, source: GrammarSource, tenant: str, *, background: bool = False) -> bool:
        """Compiles a grammar, unless its verdict is stored.

        Args:
            source: text of the grammar.
            tenant: tenant in whose turn the grammar may be compiled, and which is then charged.
            background: True if this turn comes behind the turns of all other tenants.

        Returns:
            Whether the compilation takes long.

        Raises:
            InvalidGrammar: the grammar cannot be compiled.
            Overloaded: too many grammars wait, or this grammar has waited too long.
            ProcessLost: two processes ended while they compiled the grammar.
        """
        key = key_of(source)
        if (known := self._verdicts.find(key)) is None:
            job = self._join(key, source, tenant, background=background)
            waiters = job.waiters[tenant]
            waiters.number += 1
            try:
                async with asyncio.timeout(self._max_wait_s):
                    known = await asyncio.shield(waiters.done)
            except TimeoutError:
                message = "grammars wait too long to be compiled"
                raise Overloaded(message, retry_after_s=2) from None
            finally:
                waiters.number -= 1
                if not waiters.number:
                    self._leave(job, tenant, waiters)
        if known.error:
            raise InvalidGrammar(known.error)
        return known.is_slow

    def refuse(self, source: GrammarSource, error: InvalidGrammar) -> None:
        """Refuses a grammar from now on, because it took too much work after its compilation."""
        self._verdicts.store(key_of(source), StoredVerdict(error.message))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.process.close()

    def _join(
        self, key: bytes, source: GrammarSource, tenant: str, *, background: bool
    ) -> CompileJob:
        """Returns the job of a grammar, with waiters of the tenant. A job that does not run yet
        gets a place among the tenant's own jobs, since it may be far behind in the backlog of
        another tenant that has sent the same grammar.

        Raises:
            Overloaded: too many jobs wait, either of all tenants or of this tenant.
        """
        lane: _Lane | None
        if (job := self._jobs.get(key)) is None:
            job = CompileJob(key, source)
            lane = self._lanes[CLIENTS_LANE if source.by_client else QUICK_LANE]
        else:
            lane = self._waits_in(job)
        if tenant not in job.waiters:
            if lane is not None:
                lane.put(job, tenant, background=background)
            done = asyncio.get_running_loop().create_future()
            job.waiters[tenant] = Waiters(done, background)
        self._jobs[key] = job
        return job

    def _leave(self, job: CompileJob, tenant: str, waiters: Waiters) -> None:
        """Removes waiters without requests. A waiting job loses the tenant's place, and is dropped
        with the last place. A running job continues, because its verdict is stored.
        """
        if job.waiters.get(tenant) is not waiters:  # they were refused a place in the slow lane
            return
        del job.waiters[tenant]
        if (lane := self._waits_in(job)) is not None:
            lane.queue.withdraw(job, tenant)
            if not job.waiters:
                del self._jobs[job.key]

    def _waits_in(self, job: CompileJob) -> _Lane | None:
        """Returns the lane that a job waits in. None if the job is running or done."""
        return next((lane for lane in self._lanes if job in lane.queue), None)

    async def _work(self) -> None:
        """Runs the process and serves its lanes. Restarts the process whenever it ends."""
        lanes = self._lanes
        while True:
            try:
                channels = await self.process.start()
            except OSError as error:
                log.error("the process that compiles grammars could not be started: %s", error)
                for lane in lanes:
                    if lane.job is not None:
                        self._fail(lane, ProcessLost("the grammar was not compiled"))
                await asyncio.sleep(self.process.launcher.retry_s)
                continue
            serving = [
                asyncio.create_task(self._serve(lane, channel))
                for lane, channel in zip(lanes, channels, strict=True)
            ]
            try:
                ended, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in serving:
                    task.cancel()
                await asyncio.gather(*serving, return_exceptions=True)
                for channel in channels:
                    channel.close()
            for task in ended:
                task.result()  # raises unexpected errors
            log.error("the process that compiles grammars has ended and is started again")

    async def _serve(self, lane: _Lane, channel: FrontChannel[Verdict]) -> None:
        """Serves a lane until the process ends. The job that was being compiled is tried again in
        the next process, unless the previous process has ended during this job, too.
        """
        while True:
            job = lane.job or await self._next(lane)
            if self.process.has_ended:  # the process has ended while the lane was idle
                return
            channel.send(job.source)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    verdict = await channel.receive()
            except (ChannelClosed, TimeoutError):
                job.num_losses += 1
                if job.num_losses >= _MAX_LOSSES:
                    self._fail(lane, ProcessLost("the grammar was not compiled"))
                return
            self._judge(lane, job, verdict)

    async def _next(self, lane: _Lane) -> CompileJob:
        """Waits for the lane's next job and begins it."""
        while not len(lane.queue):
            lane.arrived.clear()
            await lane.arrived.wait()
        lane.job = job = lane.queue.take()
        return job

    def _judge(self, lane: _Lane, job: CompileJob, verdict: Verdict) -> None:
        """Handles the verdict on a lane's job."""
        lane.queue.charge(verdict.cpu_s)
        lane.job = None
        job.cpu_s += verdict.cpu_s
        slow = self._lanes[SLOW_LANE]
        if verdict.timed_out and lane is self._lanes[QUICK_LANE]:
            self._put_in_slow_lane(job)
            return
        self._cpu_seconds.observe(job.cpu_s)
        known = StoredVerdict(verdict.error, is_slow=lane is slow)
        if verdict.died:
            self._verdicts.died(job.key, verdict.error)
        else:
            self._verdicts.store(job.key, known)
        del self._jobs[job.key]
        for waiters in job.waiters.values():
            waiters.done.set_result(known)

    def _put_in_slow_lane(self, job: CompileJob) -> None:
        """Gives a job a place in the slow lane for each tenant that waits for it. A tenant with too
        many jobs there fails alone.
        """
        for tenant, waiters in list(job.waiters.items()):
            try:
                self._lanes[SLOW_LANE].put(job, tenant, background=waiters.background)
            except Overloaded as error:
                del job.waiters[tenant]
                _fail(waiters, error)
        if not job.waiters:
            del self._jobs[job.key]

    def _fail(self, lane: _Lane, error: TriptychError) -> None:
        """Ends the lane's job with an error that is no verdict on the grammar."""
        job, lane.job = lane.job, None
        assert job is not None
        lane.queue.charge(0.0)
        del self._jobs[job.key]
        for waiters in job.waiters.values():
            _fail(waiters, error)


def _fail(waiters: Waiters, error: TriptychError) -> None:
    waiters.done.set_exception(error)
    waiters.done.exception()  # marks the error as retrieved, in case no request waits any more
