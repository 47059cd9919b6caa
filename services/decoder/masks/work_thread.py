"""A thread that works for sequences, one piece of work after the other, and how long a piece takes.

llguidance cannot be interrupted. What can be done about a piece of work that takes too long is to
notice it by the CPU time of its thread, which other processes of the machine do not prolong.
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


class WorkThread:
    """Owner of a thread.

    Args:
        name: name of the thread.
        slot: slot of the marks in which the sequence in work is noted.
        marks: marks of the process, from which the front learns what a dead process worked on.
        niceness: addition to the priority of the thread, as `os.nice` takes it.

    Attributes:
        number: number of the sequence in work; 0 if the thread is idle.
        source: grammar of that sequence; None if it has none.
        is_taken: whether a piece of work has taken too long, so that the thread gets no other one.
    """

    def __init__(self, name: str, slot: int, marks: Marks, niceness: int = 0) -> None:
        self._slot, self._marks, self._niceness = slot, marks, niceness
        self._executor = ThreadPoolExecutor(1, name, self._begin)
        self._clock = 0
        self._began_at = 0.0  # CPU time of the thread
        self.number = 0
        self.source: GrammarSource | None = None
        self.is_taken = False

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Does a piece of work that is no sequence's."""
        return self._executor.submit(work)

    def run(
        self, number: int, source: GrammarSource | None, work: Callable[[], Result]
    ) -> "asyncio.Future[Result]":
        """Does a piece of a sequence's work behind those before it."""

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
        """Returns the CPU seconds that the piece in work has taken; 0 if the thread is idle."""
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
