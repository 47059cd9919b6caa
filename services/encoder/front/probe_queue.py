"""The queue of the video files whose facts are read next, fair among tenants.

Small files may take seconds to read, and their time is only known afterwards. Therefore tenants
take turns according to the time that their earlier files have taken. A tenant never occupies all
workers: reading a file cannot be interrupted, and the first file of another tenant must not wait.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.embeddings.shared_task import retrieve_exception
from services.common.tenancy.fair_order import FairOrder
from services.common.threads import name_thread
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.clips.questions import Facts
from services.encoder.front.admission import Share


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """A file that waits or is being read.

    Attributes:
        file: address of the file.
        share: tenant that has sent the file.
        waits_since: time of the clock at which the file was queued.
        facts: future of the file's facts. It is cancelled when no caller waits for the facts.
    """

    file: MemoryAddress
    share: Share
    waits_since: float
    facts: asyncio.Future[Facts] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ProbeQueue:
    """Reads the facts of files in worker processes. One event loop uses it.

    Args:
        pool: the worker processes, which the queue closes.
        max_running: most files that are read at the same time. The files of one tenant occupy one
            worker less, but at least one. Callers without a key may occupy all workers, because a
            server without keys has no other tenants.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self, pool: ClipPool, max_running: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._max_running = max_running
        self._clock = clock
        self._order = FairOrder()
        self._waiting: dict[str, deque[_Probe]] = {}  # by tenant
        self._running: Counter[str] = Counter()  # by tenant
        self._threads = ThreadPoolExecutor(max_running, "probe", name_thread)

    async def probe(self, file: MemoryAddress, share: Share) -> Facts:
        """Reads a file when its tenant's turn has come.

        Raises:
            InvalidVideo: the file is not a video that can be decoded here.
            VideoNotHeld: the file was closed.
            Overloaded: no worker can be started.
        """
        probe = _Probe(file, share, self._clock())
        self._waiting.setdefault(share.tenant, deque()).append(probe)
        self._start()
        return await probe.facts

    def close(self) -> None:
        """Waits for the files that are being read, and ends the workers."""
        self._threads.shutdown()
        self._pool.close()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running.total() < self._max_running:
            if (probe := self._next()) is None:
                return
            tenant, begun = probe.share.tenant, self._clock()
            place = self._order.start(tenant)
            self._order.served(place)
            self._running[tenant] += 1
            reading = loop.run_in_executor(self._threads, self._pool.probe, probe.file)
            reading.add_done_callback(partial(self._end, probe, place, begun))

    def _next(self) -> _Probe | None:
        """Removes the next file from the queue. Returns None if no file may be read now."""
        first: list[tuple[float, float, str]] = []
        for tenant, waiting in list(self._waiting.items()):
            while waiting and waiting[0].facts.done():
                waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
            elif not tenant or self._running[tenant] < max(1, self._max_running - 1):
                first.append((self._order.start(tenant), waiting[0].waits_since, tenant))
        return self._waiting[min(first)[2]].popleft() if first else None

    def _end(
        self, probe: _Probe, place: float, begun: float, reading: asyncio.Future[Facts]
    ) -> None:
        share, taken_s = probe.share, self._clock() - begun
        self._order.charge(share.tenant, place, weight=share.weight, cost=taken_s)
        self._running -= Counter((share.tenant,))
        retrieve_exception(reading)
        if not probe.facts.done():
            if (error := reading.exception()) is not None:
                probe.facts.set_exception(error)
            else:
                probe.facts.set_result(reading.result())
        self._start()
