"""Tenants take turns at what the gateway does one thing after another: its event loop and threads.

Many requests of one tenant would delay all others: each piece of work is short, but hundreds of
them are ready at once, and a request needs some ten passes of the event loop. So a `Turnstile` lets
a bounded amount of work begin in each pass, and `FairThreads` take the work of tenants in fair
order. Those without a key are one tenant and take no turns, but at a turnstile for all: there each
further chunk of a long body or of a fetched image passes, so that the small work of others waits
for one chunk in each pass and not for one of every connection.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar

from services.common.fair_order import FairOrder
from services.common.threads import give_way
from services.gateway.tenancy.tenants import ANONYMOUS, Limits, Tenant

Result = TypeVar("Result")

_MAX_AHEAD = 8  # passes whose room is taken before
_ALONE_AFTER_S = 10.0

_tenant: ContextVar[Tenant] = ContextVar("tenant", default=ANONYMOUS)


# Callers whose key nobody knows.
STRANGERS = Tenant("?", Limits(), shares_caches=False)


def bind_tenant(tenant: Tenant) -> None:
    """Sets whose work the running task does, and the tasks that it creates from now on."""
    _tenant.set(tenant)


def bound_tenant() -> Tenant:
    """Whose work the running task does."""
    return _tenant.get()


class _Line:
    """Futures in fair order; those that are done, because they were cancelled, are passed over."""

    def __init__(self) -> None:
        self._order = FairOrder()
        self.heap: list[tuple[float, int, float, asyncio.Future[None]]] = []  # what waits
        self._arrivals = 0

    def place(self, tenant: Tenant, cost: float) -> float:
        """Of a new piece of work."""
        return self._order.place(tenant.name, weight=tenant.limits.weight, cost=cost)

    def owes_nothing(self, place: float) -> bool:
        """Whether the tenant of a new place has had less than its share of late."""
        return place <= self._order.now

    def served(self, place: float) -> None:
        """Work at this place has not had to join."""
        self._order.served(place)

    def join(self, place: float, cost: float, waiter: "asyncio.Future[None]") -> None:
        """Adds a future that `call_next` completes."""
        self._arrivals += 1
        heapq.heappush(self.heap, (place, self._arrivals, cost, waiter))

    def call_next(self) -> float | None:
        """Completes the future that is next; returns the cost of its work. None: none waits."""
        while self.heap:
            place, _, cost, waiter = heapq.heappop(self.heap)
            self._order.served(place)
            if not waiter.done():
                waiter.set_result(None)
                return cost
        return None


class Turnstile:
    """Lets a bounded amount of work begin in each pass of the event loop.

    Work of a tenant that has had less than its share of late begins at once, and later passes have
    less room for it. Only the loop's thread uses it.

    Args:
        per_pass: the cost of work that begins in a pass; the last piece may go beyond.
        alone: the same while one tenant has been the only one for some seconds; None: no more.
        for_all: those without a key take turns, too.
    """

    def __init__(
        self, per_pass: float = 1.0, alone: float | None = None, *, for_all: bool = False
    ) -> None:
        self._for_all = for_all
        self._shared = per_pass
        self._alone = self._per_pass = alone or per_pass
        self._latest = ""  # tenant
        self._alone_at = 0.0  # if no other comes; 0: it is
        self._line = _Line()
        self._spent = 0.0  # of this pass's room and of later ones'
        self._is_scheduled = False

    async def turn(self, cost: float = 1.0) -> None:
        """Waits for the turn of the running task's tenant; not at all if it needs none."""
        tenant = _tenant.get()
        if tenant is ANONYMOUS and not self._for_all:
            return
        if self._begins_alone(tenant, cost):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.complete(waiter, tenant, cost)
        if not waiter.done():
            await waiter

    def complete(self, waiter: "asyncio.Future[None]", tenant: Tenant, cost: float = 1.0) -> None:
        """Completes a future, for which work of a tenant's waits, in the tenant's turn."""
        if tenant is ANONYMOUS and not self._for_all:
            waiter.set_result(None)
            return
        if self._begins_alone(tenant, cost):
            waiter.set_result(None)
            return
        if tenant.name != self._latest:
            self._latest = tenant.name
            self._alone_at = asyncio.get_running_loop().time() + _ALONE_AFTER_S
            self._per_pass = self._shared
        line, spent, is_alone = self._line, self._spent, not self._alone_at
        is_free = not line.heap and spent < self._per_pass
        place = line.place(tenant, cost)
        is_owed = not is_alone and line.owes_nothing(place)
        if is_free or (is_owed and spent < _MAX_AHEAD * self._per_pass):
            line.served(place)
            self._begin(waiter, cost)
        else:
            line.join(place, cost, waiter)
            self._schedule()

    def _begins_alone(self, tenant: Tenant, cost: float) -> bool:
        """Begins work that has nobody to be fair to: without a place, which costs more than the
        rest. False: it needs one.
        """
        if self._alone_at or self._spent >= self._per_pass or self._line.heap:
            return False
        if tenant.name != self._latest:
            return False
        self._spent += cost
        if not self._is_scheduled:
            self._schedule()
        return True

    def _begin(self, waiter: "asyncio.Future[None]", cost: float) -> None:
        self._spent += cost
        waiter.set_result(None)
        self._schedule()

    def try_begin(self) -> bool:
        """Begins work of cost 1 if nothing waits and this pass has room: then nobody needs to know
        whose it is.
        """
        if self._line.heap or self._spent >= self._per_pass:
            return False
        self._spent += 1.0
        self._schedule()
        return True

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """A pass of the event loop."""
        self._is_scheduled = False
        if self._alone_at and asyncio.get_running_loop().time() >= self._alone_at:
            self._alone_at, self._per_pass = 0.0, self._alone
        self._spent = max(0.0, self._spent - self._per_pass)
        while self._spent < self._per_pass:
            cost = self._line.call_next()
            if cost is None:
                break
            self._spent += cost
        if self._spent or self._line.heap:
            self._schedule()


class FairThreads:
    """Threads that take work in fair order. Only one event loop uses them.

    Args:
        number: of threads.
        name: of them.
        niceness: added to that of the process; see `give_way`.
    """

    def __init__(self, number: int, name: str, *, niceness: int = 0) -> None:
        self._pool = ThreadPoolExecutor(number, name, give_way, (niceness,))
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
        try:
            return await asyncio.wrap_future(work)
        finally:
            del work  # it holds its error, whose traceback holds this frame

    def close(self) -> None:
        """Takes no more work. What runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _thread(self, cost: float) -> None:
        """Returns when a thread is the caller's."""
        if self._num_idle:
            self._num_idle -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.join(self._line.place(_tenant.get(), cost), cost, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # it had got the thread already
            raise

    def _release(self) -> None:
        if self._line.call_next() is None:
            self._num_idle += 1
