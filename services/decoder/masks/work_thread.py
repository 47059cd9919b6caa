"""A thread that runs pieces of work in sequence, and measures their CPU time.

llguidance cannot be interrupted. A piece of work that takes too long can only be detected, by the
CPU time of its thread, which does not depend on the load of the machine.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.rows import Marks

Result = TypeVar("Result")
Work = Callable[[], Result]


class WorkThread:
    """A thread with a queue of work.

    Args:
        name: name of the thread.
        slot: slot of the marks for the sequence that the thread works on.
        marks: marks of the process. After the death of the process, the front finds in them which
            sequences the process worked on.
        niceness: addition to the priority of the thread, as `os.nice` takes it.

    Attributes:
        number: number of the sequence that the thread works on. 0 if the thread is idle.
        source: grammar of this sequence. None if the sequence has no grammar.
        is_stuck: True if a piece of work has taken too long. The thread then gets no more work.
    """

    def __init__(self, name: str, slot: int, marks: Marks, niceness: int = 0) -> None:
        self._slot, self._marks, self._niceness = slot, marks, niceness
        self._executor = ThreadPoolExecutor(1, name, self._begin)
        self._clock = 0
        self._began_at = 0.0  # CPU time of the thread when the piece began
        self.number = 0
        self.source: GrammarSource | None = None
        self.is_stuck = False

    def submit(self, work: Work[Result]) -> "Future[Result]":
        """Queues work that belongs to no sequence, and returns its future."""
        return self._executor.submit(work)

    def run(
        self, number: int, source: GrammarSource | None, work: Work[Result]
    ) -> "asyncio.Future[Result]":
        """Queues work of a sequence.

        Args:
            number: the engine's number of the sequence.
            source: grammar of the sequence. None if the sequence has no grammar.
            work: function to run in the thread.

        Returns:
            A future of the result.
        """

        def piece() -> Result:
            self._began_at, self.source = time.thread_time(), source
            self.number = number
            try:
                with self._marks.during(self._slot, number):
                    return work()
            finally:
                self.number = 0

        return asyncio.get_running_loop().run_in_executor(self._executor, piece)

    def used_s(self) -> float:
        """Returns the CPU seconds of the current piece of work. 0 if the thread is idle."""
        if not self.number:
            return 0.0
        return max(0.0, time.clock_gettime(self._clock) - self._began_at)

    def close(self) -> None:
        """Ends the thread when it is idle."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)


def is_failure(error: BaseException) -> bool:
    """Returns whether an error is a failure of the work, which ends only its sequence. Such errors
    include pyo3's `PanicException`, which derives from BaseException.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
