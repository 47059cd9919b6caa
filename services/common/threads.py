"""Threads beside an event loop, for work that drops the interpreter lock on memory it is lent."""

import asyncio
import os
from collections.abc import Sequence

# What takes 0.2 to 0.3 ms for so many bytes is done in the event loop: a thread takes longer to
# begin and to come back from.
INLINE_BYTES = 1 << 20
# More would only wait for memory, and for the interpreter lock between their steps.
_MAX_THREADS = 4


def num_threads() -> int:
    """Threads that copy or digest at once on this machine."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


async def finished(jobs: "Sequence[asyncio.Future[None]]") -> None:
    """Waits for jobs in threads, and raises the first's error. A cancelled caller still waits until
    all threads are done, because they use what the caller would give away.
    """
    cancelled = False
    while any(not job.done() for job in jobs):
        try:
            await asyncio.wait(jobs)
        except asyncio.CancelledError:
            cancelled = True
    failures = [job.exception() for job in jobs]  # all are seen, so that none is reported as lost
    if cancelled:
        raise asyncio.CancelledError
    for failure in failures:
        if failure is not None:
            raise failure
