"""Compiles grammars in the threads of a mask process, in which tenants take turns.

A grammar with a stored verdict is not compiled in the compile process again, so its sequence has
waited for no turn there (`compile_pool`). The threads of a mask process therefore have queues of
their own, with the same order: by the CPU time that tenants have used, and batches behind requests.
"""

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.errors import Overloaded
from services.decoder.masks.compile_queue import CompileQueue
from services.decoder.masks.compiler import Compiled, Vocabulary, compile_grammar
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.grammar_memory import GrammarMemory
from services.decoder.masks.work_thread import WorkThread, is_failure

MAX_WAIT_S = 10.0  # longest wait of a sequence for its turn and for memory
_POLL_S = 0.05


class Waiter(NamedTuple):
    """A sequence that waits for its grammar.

    Attributes:
        number: the engine's number of the sequence.
        tenant: tenant in whose turn the grammar may be compiled, and which is then charged.
        background: True if the turns of this tenant come behind those of all other tenants.
    """

    number: int
    tenant: str
    background: bool = False


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that waits to be compiled, is being compiled or has been compiled. A queue has the
    grammar while a sequence waits and the compilation has not begun.

    Attributes:
        source: text of the grammar.
        thread: thread that compiles the grammar.
        done: future of the compiled grammar.
        waiters: sequences that wait for the grammar.
        has_begun: True once the thread has been given the grammar.
    """

    source: GrammarSource
    thread: WorkThread
    done: "asyncio.Future[Compiled]"
    waiters: list[Waiter] = field(default_factory=list[Waiter])
    has_begun: bool = False


class Compilations:
    """The queues of the grammars that wait for the threads of a mask process.

    Args:
        vocabulary: future of the vocabulary, which must be done before a sequence waits.
        memory: bound on the memory of grammars and matchers.
        max_wait_s: longest time that a sequence waits until its grammar begins to be compiled.
    """

    def __init__(
        self,
        vocabulary: "Future[Vocabulary]",
        memory: GrammarMemory,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._vocabulary, self._memory, self._max_wait_s = vocabulary, memory, max_wait_s
        self._queues: dict[WorkThread, CompileQueue[Compilation]] = {}
        self._workers: dict[WorkThread, asyncio.Task[None]] = {}  # one serves each queue with jobs
        self._num_running = 0

    async def wait(self, compilation: Compilation, waiter: Waiter) -> Compiled:
        """Returns the compiled grammar, for which the sequence waits in the queue. The grammar is
        compiled when the first of the waiting tenants has a turn. A tenant whose last waiting
        sequence is cancelled loses the place in the queue.

        Raises:
            Overloaded: the grammars of other sequences take all time or memory.
        """
        if compilation.done.done():
            return compilation.done.result()
        queue = self._queues.setdefault(compilation.thread, CompileQueue(is_bounded=False))
        if not compilation.has_begun and not _has_waiter_of(waiter.tenant, compilation):
            queue.put(compilation, waiter.tenant, background=waiter.background)
            self._serve(compilation.thread)
        compilation.waiters.append(waiter)
        try:
            await asyncio.wait([compilation.done], timeout=self._max_wait_s)
            if compilation in queue:
                message = "the grammars of other sequences take all time or memory"
                raise Overloaded(message, retry_after_s=2)
            return await asyncio.shield(compilation.done)
        finally:
            compilation.waiters.remove(waiter)
            if compilation in queue and not _has_waiter_of(waiter.tenant, compilation):
                queue.withdraw(compilation, waiter.tenant)

    def _serve(self, thread: WorkThread) -> None:
        """Starts the task that serves the queue of a thread, unless it runs."""
        worker = self._workers.get(thread)
        if worker is None or worker.done():
            self._workers[thread] = asyncio.create_task(self._work(thread, self._queues[thread]))

    async def _work(self, thread: WorkThread, queue: CompileQueue[Compilation]) -> None:
        """Compiles the grammars of a queue until the queue is empty. Only one grammar at a time is
        given to the thread, because the thread has no turns.
        """
        while len(queue):
            if not self._memory.has_room_beside(self._num_running):
                await asyncio.sleep(_POLL_S)  # freed memory has no event
                continue
            compilation = queue.take()
            queue.charge(await self._compile(compilation, thread))

    async def _compile(self, compilation: Compilation, thread: WorkThread) -> float:
        """Lets a thread compile a grammar. Returns the CPU seconds that it took."""
        compilation.has_begun = True
        source, number = compilation.source, compilation.waiters[0].number
        work = _Work(self._vocabulary.result(), source)
        self._num_running += 1
        try:
            outcome = await thread.run(number, source, work)
        finally:
            self._num_running -= 1
        if isinstance(outcome.result, BaseException):
            compilation.done.set_exception(outcome.result)
        else:
            compilation.done.set_result(outcome.result)
        return outcome.cpu_s


class _Outcome(NamedTuple):
    """The compiled grammar or the error of a compilation, and the CPU seconds that it took."""

    result: Compiled | BaseException
    cpu_s: float


class _Work(NamedTuple):
    """A compilation as a thread's piece of work."""

    vocabulary: Vocabulary
    source: GrammarSource

    def __call__(self) -> _Outcome:
        began = time.thread_time()
        try:
            result = compile_grammar(self.vocabulary, self.source)
        except BaseException as error:
            if not is_failure(error):
                raise
            result = error
        return _Outcome(result, time.thread_time() - began)


def _has_waiter_of(tenant: str, compilation: Compilation) -> bool:
    return any(waiter.tenant == tenant for waiter in compilation.waiters)
