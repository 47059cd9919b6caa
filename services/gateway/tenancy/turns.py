"""Tenants take turns at what the gateway does one thing after another: its event loop and threads.

Many requests of one tenant would delay all others: each piece of work is short, but hundreds of
them are ready at once. So a request passes the `Turnstile` before anything is done with its body,
one in each pass of the event loop, and `FairThreads` take the work of tenants in fair order. Those
without a key are one tenant and take no turns, but at a turnstile for all: there each further chunk
of a long body or of a fetched image passes, so that the small work of others waits for one chunk
in each pass and not for one of every connection.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar

from services.common.fair_order import FairOrder
from services.common.threads import add_niceness
from services.gateway.tenancy.tenants import ANONYMOUS, Tenant

Result = TypeVar("Result")

_tenant: ContextVar[Tenant] = ContextVar("tenant", default=ANONYMOUS)


def bind_tenant(tenant: Tenant) -> None:
    """Sets whose work the running task does, and the tasks that it creates from now on."""
    _tenant.set(tenant)


class _Line:
    """Futures in fair order; those that were cancelled are passed over."""

    def __init__(self) -> None:
        self._order = FairOrder()
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    def join(self, tenant: Tenant, cost: float) -> "asyncio.Future[None]":
        """A future that `call_next` completes."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = self._order.place(tenant.name, weight=tenant.limits.weight, cost=cost)
        self._arrivals += 1
        heapq.heappush(self._heap, (place, self._arrivals, waiter))
        return waiter

    def call_next(self) -> bool:
        """Completes the future that is next; False: none waits."""
        while self._heap:
            place, _, waiter = heapq.heappop(self._heap)
            self._order.served(place)
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False


class Turnstile:
    """Lets one request pass in each pass of the event loop. Only the loop's thread uses it.

    Args:
        for_all: those without a key take turns, too.
    """

    def __init__(self, *, for_all: bool = False) -> None:
        self._for_all = for_all
        self._line = _Line()
        self._is_scheduled = False

    async def turn(self) -> None:
        """Waits for the running task's turn; at once if it needs none."""
        tenant = _tenant.get()
        if tenant is ANONYMOUS and not self._for_all:
            return
        waiter = self._line.join(tenant, 1.0)
        self._schedule()
        await waiter

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        if self._line.call_next():
            self._schedule()


class FairThreads:
    """Threads that take work in fair order. Only one event loop uses them.

    Args:
        number: of threads.
        name: of them.
        niceness: added to that of the process; see `add_niceness`.
    """

    def __init__(self, number: int, name: str, *, niceness: int = 0) -> None:
        self._pool = ThreadPoolExecutor(number, name, add_niceness, (niceness,))
        self._line = _Line()
        self._num_idle = number

    async def run(self, cost: float, call: Callable[..., Result], *arguments: object) -> Result:
        """`call(*arguments)` in a thread.

        Work that waits leaves the line when its caller is cancelled; work that runs keeps its
        thread until it ends.

        Args:
            cost: of the work, in a unit that is the same for all calls.
            call: what to do.
            arguments: of the call.
        """
        await self._thread(cost)
        loop = asyncio.get_running_loop()

        def ended(_: "Future[Result]") -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        work = self._pool.submit(call, *arguments)
        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Takes no more work. What runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _thread(self, cost: float) -> None:
        """Returns when a thread is the caller's."""
        if self._num_idle:
            self._num_idle -= 1
            return
        waiter = self._line.join(_tenant.get(), cost)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # it had got the thread already
            raise

    def _release(self) -> None:
        if not self._line.call_next():
            self._num_idle += 1
