"""Threads beside an event loop, for work on borrowed memory that releases the interpreter lock.

Pools are their callers'; here is how many threads, from how many bytes on, and how to wait for
them.
"""

import asyncio
import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Sequence

# Work on at most this many bytes takes 0.2 to 0.3 ms and runs in the event loop: handing it to a
# thread would take longer.
INLINE_BYTES = 1 << 20
# More threads would compete for memory bandwidth and for the interpreter lock.
_MAX_THREADS = 4
# sched_setattr(2), which neither Python nor most C libraries have, and its structure: size, policy,
# flags, niceness, priority, runtime, deadline, period.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
_KEEP_POLICY = 0x08
_LONG_SLICE_NS = 100_000_000  # the longest


def num_threads() -> int:
    """How many threads copy or digest in parallel on this machine."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def give_way(niceness: int) -> None:
    """Lowers the calling thread's share of the CPU, and lets whatever wakes up preempt it.

    To the calling thread alone: Linux counts threads where POSIX counts processes. Only for work
    that releases the interpreter lock: others would wait for it as long as the thread waits for a
    core.

    Args:
        niceness: added to the thread's.
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        niceness += os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        request_long_slices()


def request_long_slices() -> None:
    """Gives the calling thread its share of the CPU in slices of 100 ms (Linux 6.12 and later).

    A task that wakes up preempts the running one at once only if its own slice is shorter. If they
    are equal it waits for the other one's, in practice until the next tick, 4 ms; a request wakes
    up a dozen tasks. Niceness changes nothing of that where services share a machine: it counts
    within a cgroup, slices count across them. Older kernels ignore it; so does this function where
    the call is not allowed.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or sys.platform != "linux":
        return
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _SCHED_ATTR.pack(
        _SCHED_ATTR.size, 0, _KEEP_POLICY, niceness, 0, _LONG_SLICE_NS, 0, 0
    )
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


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
