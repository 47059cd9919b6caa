"""Threads that take the work of tenants in fair order."""

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from services.common.fair_order import FairOrder, Share

Job = TypeVar("Job")


class FairPool(Generic[Job]):
    """Any thread may submit.

    Args:
        work: done with each job, in one of the threads. It does not raise.
        workers: threads.
        name: of the threads.
    """

    def __init__(self, work: Callable[[Job], None], workers: int, name: str) -> None:
        self._work = work
        self._threads = ThreadPoolExecutor(workers, name)
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
