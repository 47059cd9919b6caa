"""Verdicts on grammars: can a grammar be compiled, and does that take long?

A grammar is first compiled in the quick lane, where it may take as much CPU time as nearly all
grammars need. If it takes more, it is compiled again in the slow lane, so that a common schema
never waits for a hostile grammar, whoever has sent it. In each lane tenants take turns by the CPU
time that they have used. A grammar that cannot be compiled, or ends its fork, is its request's
error; waiting for a turn is an overload of the decoder, never the grammar's fault.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import InvalidGrammar, Overloaded, ProcessLost, TriptychError
from services.common.process import children
from services.common.process.channel import ChannelClosed, FrontChannel
from services.decoder.masks.compile_process import CompileProcess
from services.decoder.masks.compile_queue import CompileJob, CompileQueue
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import Verdict
from services.decoder.masks.verdicts import Known, Verdicts, key_of

log = logging.getLogger(__name__)

_MAX_WAIT_S = 10.0  # for a verdict
# Within which the process answers: it reads a vocabulary first, and limits each grammar itself.
_PATIENCE_S = 60.0
_MAX_LOSSES = 2


@dataclass(slots=True, eq=False)
class _Lane:
    """A fork that compiles one grammar after the other, and the jobs that wait for it.

    Attributes:
        job: the job in work, which outlives the process; None if the lane is idle.
    """

    queue: CompileQueue = field(default_factory=CompileQueue)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    job: CompileJob | None = None

    def put(self, job: CompileJob) -> None:
        """Adds a job; raises Overloaded if too many wait."""
        self.queue.put(job)
        self.arrived.set()


class CompilePool:
    """Owner of the process that compiles, and of what waits for it. Used in the event loop.

    Args:
        observe: called with the CPU seconds of a compilation.
    """

    def __init__(
        self, process: CompileProcess, observe: Callable[[float], None], verdicts: Verdicts
    ) -> None:
        self.process = process
        self._observe = observe
        self._verdicts = verdicts
        self._quick, self._slow = _Lane(), _Lane()
        self._jobs: dict[bytes, CompileJob] = {}  # that wait or are in work
        self._task = asyncio.create_task(self._work())

    @property
    def num_in_work(self) -> int:
        """Number of grammars that are being compiled."""
        return sum(lane.job is not None for lane in (self._quick, self._slow))

    async def check(self, source: GrammarSource, tenant: str) -> bool:
        """Returns if the grammar can be compiled, and then whether that takes long.

        Args:
            tenant: tenant that is charged for the compilation.

        Raises:
            InvalidGrammar: the grammar cannot be compiled.
            Overloaded: too many grammars wait, or this one has waited too long.
            ProcessLost: two processes ended while they compiled the grammar.
        """
        key = key_of(source)
        if (known := self._verdicts.find(key)) is None:
            job = self._jobs.get(key) or self._enqueue(key, source, tenant)
            job.num_waiting += 1
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    known = await asyncio.shield(job.done)
            except TimeoutError:
                message = "grammars wait too long to be compiled"
                raise Overloaded(message, retry_after_s=2) from None
            finally:
                job.num_waiting -= 1
        if known.error:
            raise InvalidGrammar(known.error)
        return known.is_slow

    def refuse(self, source: GrammarSource, error: InvalidGrammar) -> None:
        """Has the next requests with a grammar fail as one did that could not follow it."""
        self._verdicts.keep(key_of(source), Known(error.message))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.process.close()

    def _enqueue(self, key: bytes, source: GrammarSource, tenant: str) -> CompileJob:
        done: asyncio.Future[Known] = asyncio.get_running_loop().create_future()
        job = CompileJob(key, source, tenant, done)
        self._quick.put(job)
        self._jobs[key] = job
        return job

    async def _work(self) -> None:
        """Keeps the process running, and its lanes at work."""
        lanes = self._quick, self._slow
        while True:
            try:
                channels = await self.process.start()
            except OSError as error:
                log.error("a process that compiles grammars was not started: %s", error)
                for lane in lanes:
                    if lane.job is not None:
                        self._fail(lane, ProcessLost("the grammar was not compiled"))
                await asyncio.sleep(children.RETRY_S)
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
                task.result()  # raises what is no end of the process
            log.error("a process that compiles grammars has ended")

    async def _serve(self, lane: _Lane, channel: FrontChannel[Verdict]) -> None:
        """Works until the process has ended. A job that was in work stays the lane's, to be tried
        in the next process, unless it was in work when the one before ended, too.
        """
        while True:
            job = lane.job or await self._next(lane)
            if self.process.has_ended:  # while the lane was idle
                return
            channel.send(job.source)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    verdict = await channel.receive()
            except (ChannelClosed, TimeoutError):
                job.num_losses += 1
                if job.num_losses >= _MAX_LOSSES:
                    self._fail(lane, ProcessLost("the grammar was not compiled"))
                return
            self._judge(lane, job, verdict)

    async def _next(self, lane: _Lane) -> CompileJob:
        """Waits for the lane's next job, which some request waits for, and begins it."""
        while True:
            while not len(lane.queue):
                lane.arrived.clear()
                await lane.arrived.wait()
            job = lane.queue.take()
            if job.num_waiting:
                lane.job = job
                return job
            lane.queue.charge(job.tenant, 0.0)
            del self._jobs[job.key]

    def _judge(self, lane: _Lane, job: CompileJob, verdict: Verdict) -> None:
        """A lane has done with a job."""
        lane.queue.charge(job.tenant, verdict.cpu_s)
        job.cpu_s += verdict.cpu_s
        if verdict.timed_out and lane is self._quick:
            try:
                self._slow.put(job)
            except Overloaded as error:
                self._fail(lane, error)
            lane.job = None
            return
        self._observe(job.cpu_s)
        known = Known(verdict.error, is_slow=lane is self._slow)
        if verdict.died:
            self._verdicts.died(job.key, verdict.error)
        else:
            self._verdicts.keep(job.key, known)
        lane.job = None
        del self._jobs[job.key]
        job.done.set_result(known)

    def _fail(self, lane: _Lane, error: TriptychError) -> None:
        """Ends the lane's job with an error, which says nothing about the grammar."""
        job, lane.job = lane.job, None
        assert job is not None
        lane.queue.charge(job.tenant, 0.0)
        del self._jobs[job.key]
        job.done.set_exception(error)
        job.done.exception()  # perhaps nothing waits for it any more
