"""Threads beside an event loop, for work on borrowed memory that releases the interpreter lock.

Callers have their own pools. This file says how many threads a pool has and how much work is worth
a thread, and waits for threads.
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

# Work on at most this many bytes takes 0.2 to 0.3 ms and runs in the event loop: starting it in a
# thread would take longer.
INLINE_BYTES = 1 << 20
# More threads would compete for memory bandwidth and for the interpreter lock.
_MAX_THREADS = 4
_PR_SET_NAME = 15
_MAX_NAME_BYTES = 15  # the kernel's limit


def num_threads() -> int:
    """Returns the number of threads that copy or digest in parallel on this machine."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def name_thread() -> None:
    """Gives the kernel the name that this thread has in Python, so that `top -H` and
    `/proc/PID/task/TID/comm` show it. From 3.14 on Python does so for each thread.
    """
    if sys.platform == "linux":
        name = threading.current_thread().name.encode()[:_MAX_NAME_BYTES]
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


class NamedThread(threading.Thread):
    """A thread that the kernel knows by its Python name."""

    def run(self) -> None:
        name_thread()
        super().run()


class WorkerThreads(ThreadPoolExecutor):
    """Threads for work that would block an event loop for too long."""

    async def run(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Runs `call(*arguments)` in a thread and returns the result. When the caller is cancelled,
        waiting work is dropped, and running work keeps its thread until the end.
        """
        return await asyncio.get_running_loop().run_in_executor(self, call, *arguments)

    def close(self) -> None:
        """Drops work that waits and accepts no more work. It does not wait for running work."""
        self.shutdown(wait=False, cancel_futures=True)


async def finished(jobs: "Sequence[asyncio.Future[Any]]") -> None:
    """Waits for jobs in threads and raises the first error. A cancelled caller still waits for all
    threads, because they use memory that the caller is about to release.
    """
    cancelled = False
    while any(not job.done() for job in jobs):
        try:
            await asyncio.wait(jobs)
        except asyncio.CancelledError:
            cancelled = True
    # Retrieves all exceptions, because asyncio reports an exception that is never retrieved.
    failures = [job.exception() for job in jobs]
    if cancelled:
        raise asyncio.CancelledError
    for failure in failures:
        if failure is not None:
            raise failure
