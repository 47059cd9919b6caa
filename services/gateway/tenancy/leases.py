"""How gateways divide tenants' limits: each has leases, and Redis has the leases of all.

A request that fits into its gateway's lease waits for nothing. Otherwise, and a few times a second
for what has changed, one command tells Redis what the gateway holds and brings back what it may
have, for all tenants and waiting requests at once. A request waits `Times.wait_s` at most.

Without Redis (there is none, it does not answer, or it has just begun anew) limits are divided by
the number of gateways. What was used before stays within the leases of before, so the sum is not
over the limit at any time; see `Quota.check_divided`. When Redis is back, gateways tell it what
they hold for a while before any of them asks for more: by then all have told.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import RateLimited
from services.gateway.tenancy.lease_store import Answer, Asked, LeaseStore
from services.gateway.tenancy.quota import (
    KINDS,
    NOTHING,
    Amounts,
    Clock,
    Division,
    Quota,
)
from services.gateway.tenancy.tenants import Tenant

log = logging.getLogger(__name__)

# A part of what is free goes to a gateway that has not asked for it: to 10 gateways a quarter.
_HEADROOM = 4
_ASK_TIMEOUT_S = 1.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
# Other tenants' leases are read so often; they matter when Redis is lost.
_ALL_TENANTS_S = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; trials divide them all.

    Attributes:
        window: how long requests count.
        sync: between two reports, if no request waits.
        settle: after Redis is back, until leases change. All gateways have found it by then.
        alive: after which a gateway that is not seen holds nothing at a time and is not counted.
        wait: what a request may wait for its lease.
    """

    window: float = 60.0
    sync: float = 0.25
    settle: float = 3.0
    alive: float = 5.0
    wait: float = 0.05


@dataclass(slots=True)
class _Waiter:
    quota: Quota
    take: Callable[[Amounts], None]
    amounts: Amounts
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Leases:
    """One gateway's leases, for one event loop.

    Args:
        url: of Redis; empty: there is none.
        gateways: among which limits are divided until Redis has told how many there are.
        clock: seconds, monotonic.
        password_file: as `LeaseStore`'s.

    Attributes:
        division: of the limits; None: gateways count together.
    """

    def __init__(
        self,
        url: str = "",
        gateways: int = 1,
        times: Times | None = None,
        clock: Clock = time.monotonic,
        password_file: Path | None = None,
    ) -> None:
        self._clock = clock
        self._times = times = times or Times()
        name = os.urandom(6).hex()
        self._store = (
            LeaseStore(url, name, times.window, times.alive, password_file) if url else None
        )
        self.division: Division | None = Division(gateways)
        self._gateways = gateways
        self._quotas: dict[str, Quota] = {}
        self._active: set[str] = set()  # tenants about whom Redis has to know
        self._of_others: dict[str, list[int]] = {}
        self._told: dict[str, Asked] = {}  # what it knows
        self._all_tenants_at = self._sync_at = 0.0
        self._settles_at = -math.inf  # inf: Redis does not answer
        self._waiting: list[_Waiter] = []
        self._asking: list[_Waiter] = []
        self._question: asyncio.Task[Answer] | None = None
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def divided_by(self) -> int:
        """Gateways among which limits are divided now; 1: they are counted together."""
        return 1 if self.division is None else self.division.gateways

    def start(self) -> None:
        """Begins to talk to Redis; waits for nothing."""
        if self._store is not None:
            self._keeper = asyncio.create_task(self._keep(self._store))
        elif self.divided_by > 1:
            log.info("without GATEWAY_REDIS_URL tenants' limits are divided by %d gateways "
                     "(GATEWAY_REPLICAS)", self.divided_by)  # fmt: skip

    async def close(self) -> None:
        """Tells Redis what remains in the windows, and disconnects."""
        if self._store is None:
            return
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self.division is None:
            with suppress(Exception):
                async with asyncio.timeout(self._times.wait):
                    await self._store.ask([self._row(name, NOTHING) for name in self._active])
        await self._store.close()

    def quota(self, tenant: Tenant) -> Quota:
        """A tenant's; made at its first request. Limits may have changed since."""
        name, limits = tenant.name, tenant.limits.of_kinds
        if (quota := self._quotas.get(name)) is None:
            quota = self._quotas[name] = Quota(name, limits, self._clock, self._times.window)
            quota.others = list(self._of_others.get(name, NOTHING))
            if self.division is not None:
                quota.divide(self.division)
        quota.limits = limits
        return quota

    def headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """What is left to a tenant, for its responses."""
        return self.quota(tenant).headers(self.division)

    async def charge(self, quota: Quota, take: Callable[[Amounts], None], amounts: Amounts) -> None:
        """Takes amounts of a quota, by `take`, as soon as they fit.

        Raises:
            RateLimited: they do not fit; nothing is taken.
        """
        if self.division is not None:
            quota.check_divided(amounts, self.division)
        elif (kind := quota.lacking(amounts)) is not None:
            quota.check_hold_off(kind, amounts[kind])
            await self._wait(_Waiter(quota, take, amounts))
            return
        take(amounts)
        self._activate(quota)

    def _activate(self, quota: Quota) -> None:
        if self._store is not None and quota.is_limited:
            self._active.add(quota.tenant)

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._wake.set()
        try:
            await _wait_for(waiter.done, self._times.wait)
        except asyncio.CancelledError:
            waiter.done.cancel()
            raise
        if not waiter.done.done():
            self._lose(f"it takes more than {self._times.wait * 1e3:g} ms")
        waiter.done.result()

    async def _keep(self, store: LeaseStore) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._ask(store)
            except Exception as error:
                reason = str(error) or type(error).__name__
                if self.division is not None and self._settles_at < math.inf:
                    self._tell_division(self.division, reason)
                self._settles_at = math.inf
                self._lose(reason)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            retry_s = _FIRST_RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(self._times.sync):
                    await self._wake.wait()

    async def _ask(self, store: LeaseStore) -> None:
        """One question and its answer; any exception: there was none."""
        self._wake.clear()
        self._asking, self._waiting = self._waiting, []
        waiting: dict[str, list[int]] = {}
        for waiter in self._asking:
            sums = waiting.setdefault(waiter.quota.tenant, [0] * len(KINDS))
            for kind, amount in enumerate(waiter.amounts):
                sums[kind] += amount
        rows = [self._row(name, amounts) for name, amounts in waiting.items()]
        if (now := self._clock()) >= self._sync_at:
            self._sync_at = now + self._times.sync
            news = (self._row(name, NOTHING) for name in self._active - waiting.keys())
            rows += [row for row in news if self._told.get(row.tenant) != row]
        if self.division is None:
            for row in rows:  # what is given back may not be used while the question is under way
                quota = self._quotas[row.tenant]
                quota.leases = list(map(min, quota.leases, row.wanted))
        all_tenants = now >= self._all_tenants_at
        asking = store.ask(rows, all_tenants=all_tenants)
        self._question = asyncio.create_task(asking)
        try:
            await _wait_for(self._question, _ASK_TIMEOUT_S)
            if not self._question.done() or self._question.cancelled():
                raise TimeoutError("it does not answer")
            answer = self._question.result()
        finally:
            self._question.cancel()
        if all_tenants:
            self._all_tenants_at = now + min(_ALL_TENANTS_S, self._times.settle / 3)
        self._told.update((row.tenant, row) for row in rows)
        self._hear(rows, answer)

    def _row(self, tenant: str, waiting: Amounts) -> Asked:
        """What is told and asked about a tenant."""
        quota = self._quotas[tenant]
        limits = [-1 if limit is None else limit for limit in quota.limits]
        held, wanted = list(NOTHING), list(NOTHING)
        for kind, (limit, used) in enumerate(zip(limits, quota.used(), strict=True)):
            if limit < 0:
                continue
            if self.division is not None:
                held[kind] = wanted[kind] = max(used, quota.bound(kind, self.division))
                continue
            held[kind] = used
            wanted[kind] = used + waiting[kind]
            if waiting[kind] or (used and quota.is_busy):
                free = max(0, limit - quota.others[kind] - wanted[kind])
                wanted[kind] += free // (_HEADROOM * max(1, self._gateways))
        asked = Asked(tenant, limits, held, wanted, quota.is_short)
        quota.is_busy = quota.is_short = False
        return asked

    def _hear(self, rows: Sequence[Asked], answer: Answer) -> None:
        now = self._clock()
        if self._settles_at == math.inf:
            self._settles_at = now + self._times.settle
        is_settled = answer.age_s >= self._times.settle and now >= self._settles_at
        if not is_settled:
            self._divide("it has begun anew")
            self._told.clear()
        else:
            self._apply(rows, answer)
        self._gateways = answer.gateways
        self._decide(heard=True)

    def _apply(self, rows: Sequence[Asked], answer: Answer) -> None:
        if answer.of_others is not None:
            self._of_others = answer.of_others
            for name, quota in self._quotas.items():
                quota.others = list(answer.of_others.get(name, NOTHING))
        if self.division is not None:
            for quota in self._quotas.values():
                quota.leases = quota.used()
            self.division = None
            log.info("tenants' limits are counted in Redis, for %d gateways", answer.gateways)
        for row, (leases, others) in zip(rows, answer.rows, strict=True):
            quota = self._quotas[row.tenant]
            quota.leases, quota.others = leases, others
            if not any((*leases, *quota.used(), row.is_short)):
                self._active.discard(row.tenant)
                self._told.pop(row.tenant, None)

    def _lose(self, reason: str) -> None:
        """Redis is of no use now."""
        self._divide(reason)
        self._told.clear()
        if self._question is not None:
            self._question.cancel()
        self._decide(heard=False)

    def _divide(self, reason: str) -> None:
        if self.division is not None:
            return
        self.division = Division(max(1, self._gateways), self._clock())
        for quota in self._quotas.values():
            quota.divide(self.division)
        self._tell_division(self.division, reason)

    def _tell_division(self, division: Division, reason: str) -> None:
        log.warning("tenants' limits are divided by %d gateways until Redis counts them: %s",
                    division.gateways, reason)  # fmt: skip

    def _decide(self, *, heard: bool) -> None:
        """Ends the waiting of those that were asked for; without an answer, of all."""
        waiters, self._asking = self._asking, []
        if not heard or self.division is not None:
            waiters += self._waiting
            self._waiting = []
        for waiter in waiters:
            if waiter.done.done():
                continue
            try:
                self._decide_one(waiter)
            except RateLimited as error:
                waiter.done.set_exception(error)
            else:
                waiter.done.set_result(None)

    def _decide_one(self, waiter: _Waiter) -> None:
        quota, amounts = waiter.quota, waiter.amounts
        if self.division is not None:
            quota.check_divided(amounts, self.division)
        elif (kind := quota.lacking(amounts, heard=True)) is not None:
            quota.hold_off(kind, amounts[kind])
            raise quota.refusal(kind, amounts[kind])
        waiter.take(amounts)
        self._activate(quota)


async def _wait_for(future: asyncio.Future[None] | asyncio.Task[Answer], timeout_s: float) -> None:
    """Waits until it is done, a while at most; neither cancels nor raises its error. If the event
    loop was late, the answer is in the socket's buffer: let it be read.
    """
    await asyncio.wait({future}, timeout=timeout_s)
    turns = 0
    while not future.done() and turns < 10:
        turns += 1
        await asyncio.sleep(0)
