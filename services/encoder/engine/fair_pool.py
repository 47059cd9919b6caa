"""Threads that take the work of tenants in fair order."""

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from services.common.tenancy.fair_order import FairOrder, Share
from services.common.threads import lower_priority

Job = TypeVar("Job")

# Of threads and processes for large images, which take seconds: all other work goes first.
LARGE_NICENESS = 10


def num_large_workers(num_workers: int) -> int:
    """Workers for large images, beside `num_workers` for all others."""
    return max(1, num_workers // 4)


class FairPool(Generic[Job]):
    """Any thread may submit.

    Args:
        work: done with each job, in one of the threads. It does not raise.
        workers: threads.
        name: of the threads.
        niceness: added to that of the process.
    """

    def __init__(
        self, work: Callable[[Job], None], workers: int, name: str, *, niceness: int = 0
    ) -> None:
        self._work = work
        self._threads = ThreadPoolExecutor(workers, name, lower_priority, (niceness,))
        self._lock = threading.Lock()
        self._order = FairOrder()
        self._waiting: list[tuple[float, int, Job]] = []  # a heap
        self._num_submitted = 0

    def submit(self, job: Job, share: Share, cost: float) -> None:
        """Queues a job."""
        with self._lock:
            self._num_submitted += 1
            place = self._order.place(share.tenant, weight=share.weight, cost=cost)
            heapq.heappush(self._waiting, (place, self._num_submitted, job))
        self._threads.submit(self._next)

    def shutdown(self) -> None:
        """Begins no more jobs; does not wait for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            place, _, job = heapq.heappop(self._waiting)
            self._order.served(place)
        self._work(job)
