"""Whether a grammar can be compiled: asked of a process that may die of it.

Tenants take turns. A grammar that cannot be compiled, or ends its process, is its request's error;
waiting for a turn is an overload of the decoder, never the grammar's fault.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
from blake3 import blake3

from services.common.errors import InvalidGrammar, Overloaded, ProcessLost, TriptychError
from services.common.process import children
from services.common.process.channel import ChannelClosed, FrontChannel, create_socket_pair
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import MaskSettings, Verdict

log = logging.getLogger(__name__)

_WORKER = "services.decoder.masks.compile_worker"
_MAX_WAITING = 256
_MAX_WAITING_OF_TENANT = 64
_MAX_WAIT_S = 10.0
# Of the process, which limits each grammar itself; a vocabulary is read first.
_PATIENCE_S = 60.0
_MAX_DEATHS = 2
_KNOWN = 4096  # grammars whose verdicts are kept


@dataclass(slots=True, eq=False)
class _Job:
    key: bytes
    source: GrammarSource
    done: "asyncio.Future[Verdict]"
    started: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    num_deaths: int = 0  # of processes, while they worked on it


class CompilePool:
    """Owner of the process, and of what waits for it. Used in the event loop.

    Args:
        observe: called with the CPU seconds of a compilation.
    """

    def __init__(self, settings: MaskSettings, observe: Callable[[float], None]) -> None:
        self._settings = settings
        self._observe = observe
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, whose turn first
        self._num_waiting = 0
        self._arrived = asyncio.Semaphore(0)
        self._jobs: dict[bytes, _Job] = {}  # that wait or are in work
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self.process: asyncio.subprocess.Process | None = None
        self._task = asyncio.create_task(self._work())

    async def check(self, source: GrammarSource, tenant: str) -> None:
        """Returns if the grammar can be compiled.

        Raises:
            InvalidGrammar: it cannot.
            Overloaded: too many wait, or it has waited too long.
            ProcessLost: two processes ended while they compiled it.
        """
        key = _key(source)
        if (error := self._known.get(key)) is not None:
            self._known.move_to_end(key)
        else:
            job = self._jobs.get(key) or self._enqueue(key, source, tenant)
            job.num_waiting += 1
            try:
                if not job.started.is_set():
                    async with asyncio.timeout(_MAX_WAIT_S):
                        await job.started.wait()
                error = (await asyncio.shield(job.done)).error
            except TimeoutError:
                message = "grammars wait too long to be compiled"
                raise Overloaded(message, retry_after_s=2) from None
            finally:
                job.num_waiting -= 1
        if error:
            raise InvalidGrammar(error)

    def refuse(self, source: GrammarSource, error: InvalidGrammar) -> None:
        """Has the next requests with a grammar fail as one did that could not follow it."""
        self._know(_key(source), error.message)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await children.end(self.process)

    def _enqueue(self, key: bytes, source: GrammarSource, tenant: str) -> _Job:
        queue = self._queues.get(tenant)
        if self._num_waiting >= _MAX_WAITING or (queue and len(queue) >= _MAX_WAITING_OF_TENANT):
            raise Overloaded("too many grammars wait to be compiled", retry_after_s=2)
        job = self._jobs[key] = _Job(key, source, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(job)
        self._num_waiting += 1
        self._arrived.release()
        return job

    async def _next(self) -> _Job:
        while True:
            await self._arrived.acquire()
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            self._num_waiting -= 1
            if queue:
                self._queues[tenant] = queue  # behind the others
            if job.num_waiting:
                return job
            del self._jobs[job.key]  # its requests have ended

    async def _work(self) -> None:
        job: _Job | None = None
        while True:
            try:
                channel = await self._start()
            except OSError as error:
                log.error("a process that compiles grammars was not started: %s", error)
                if job is not None:
                    self._finish(job, ProcessLost("the grammar was not compiled"))
                    job = None
                await asyncio.sleep(children.RETRY_S)
                continue
            with closing(channel):
                job = await self._serve(channel, job)

    async def _serve(self, channel: FrontChannel[Verdict], job: _Job | None) -> _Job | None:
        """Works until the process has ended, of something else than a grammar: the job that is to
        be tried in the next one.
        """
        while True:
            job = job or await self._next()
            assert self.process is not None
            if self.process.returncode is not None:  # it ended while it was idle
                return job
            job.started.set()
            try:
                channel.send(job.source)
                async with asyncio.timeout(_PATIENCE_S):
                    verdict = await channel.receive()
            except (ChannelClosed, TimeoutError):
                log.error("a process that compiles grammars has ended")
                job.num_deaths += 1
                if job.num_deaths < _MAX_DEATHS:
                    return job
                self._finish(job, ProcessLost("the grammar was not compiled"))
                return None
            self._observe(verdict.cpu_s)
            self._finish(job, verdict)
            job = None

    def _finish(self, job: _Job, result: Verdict | TriptychError) -> None:
        del self._jobs[job.key]
        if isinstance(result, TriptychError):
            job.done.set_exception(result)
            job.done.exception()  # perhaps nothing waits for it any more
            return
        job.done.set_result(result)
        if not result.died:  # perhaps of something else
            self._know(job.key, result.error)

    def _know(self, key: bytes, error: str) -> None:
        self._known[key] = error
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    async def _start(self) -> FrontChannel[Verdict]:
        """Raises OSError, as `children.start` does."""
        await children.end(self.process)
        front_end, end = create_socket_pair()
        try:
            with end:
                settings = msgspec.json.encode(self._settings)
                self.process = await children.start(_WORKER, settings, end.fileno())
            return await FrontChannel[Verdict].open(front_end, Verdict)
        except BaseException:
            front_end.close()
            raise


def _key(source: GrammarSource) -> bytes:
    return blake3(msgspec.msgpack.encode(source)).digest()
