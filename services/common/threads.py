"""Threads beside an event loop, for work on borrowed memory that releases the interpreter lock.

Pools are their callers'; here is how many threads, from how many bytes on, and how to wait for
them.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence

# Work on at most this many bytes takes 0.2 to 0.3 ms and runs in the event loop: handing it to a
# thread would take longer.
INLINE_BYTES = 1 << 20
# More threads would compete for memory bandwidth and for the interpreter lock.
_MAX_THREADS = 4


def num_threads() -> int:
    """How many threads copy or digest in parallel on this machine."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def add_niceness(niceness: int) -> None:
    """To the calling thread alone: Linux counts threads where POSIX counts processes. Only for work
    that releases the interpreter lock: others would wait for it as long as the thread waits for a
    core.
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        niceness += os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


async def finished(jobs: "Sequence[asyncio.Future[None]]") -> None:
    """Waits for jobs in threads, and raises the first error. A cancelled caller still waits until
    all threads are done, because they use memory that the caller is about to release.
    """
    cancelled = False
    while any(not job.done() for job in jobs):
        try:
            await asyncio.wait(jobs)
        except asyncio.CancelledError:
            cancelled = True
    # Retrieves all of them, because asyncio reports an exception that is never retrieved.
    failures = [job.exception() for job in jobs]
    if cancelled:
        raise asyncio.CancelledError
    for failure in failures:
        if failure is not None:
            raise failure
