"""Division of the tenants' limits among gateways, by leases that Redis holds for all of them.

A request that fits into its gateway's leases waits for nothing. When a request does not fit, and a
few times a second for the tenants whose usage has changed, one command reports to Redis what the
gateway uses and obtains new leases, for all tenants and all waiting requests at once. A request
waits for `Times.wait` seconds at most.

Without Redis (none is configured, it does not answer, or it has just lost its data) the limits are
divided by the number of gateways. Usage from before the loss stays within the leases of that time,
so the sum never exceeds the limit; see `Quota.check_divided`. When Redis is back, all gateways
report their usage for `Times.settle` seconds before any lease grows, so that all have reported.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import RateLimited
from services.gateway.tenancy.lease_store import LeaseReply, LeaseReport, LeaseStore
from services.gateway.tenancy.quota import (
    KINDS,
    NOTHING,
    Amounts,
    Charge,
    Division,
    Quota,
)
from services.gateway.tenancy.tenants import Tenant

log = logging.getLogger(__name__)

# Each report asks for more than is needed: for the free amount, divided by this factor and by the
# number of gateways. So 10 gateways ask for a quarter of the free amount in total.
_HEADROOM = 4
_REPLY_TIMEOUT_S = 1.0
_SMALLEST: Amounts = (1,) * len(KINDS)
_FIRST_RETRY_S = 0.05
# The other gateways' leases on all tenants are read this often; they are used when Redis is lost.
_ALL_TENANTS_S = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """Periods of the lease protocol, in seconds. Tests divide all of them.

    Attributes:
        window: length of the windows in which requests, tokens and pixels count.
        sync: time between two reports while no request waits.
        settle: time after Redis is back until leases change. All gateways find Redis within it.
        alive: time without a report after which a gateway counts as dead and its amounts at a time
            are free.
        wait: longest time that a request waits for a lease.
        last_retry: longest time between two attempts to reach a Redis that does not answer.
    """

    window: float = 60.0
    sync: float = 0.25
    settle: float = 3.0
    alive: float = 5.0
    wait: float = 0.05
    last_retry: float = 1.0


@dataclass(slots=True)
class _Waiter:
    """A charge that waits for a reply of Redis."""

    charge: Charge
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Leases:
    """Leases of one gateway on all tenants' limits, for one event loop.

    Args:
        url: URL of Redis. Empty if there is none.
        gateways: number of gateways that share the limits until Redis has reported the number.
        times: periods of the protocol.
        clock: monotonic clock, in seconds.
        password_file: file with Redis's password, see `LeaseStore`.

    Attributes:
        division: current division of the limits. None while Redis counts for all gateways.
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
        self._active: set[str] = set()  # tenants whose usage has to be reported
        self._held_by_others: dict[str, list[int]] = {}
        self._reported: dict[str, LeaseReport] = {}  # last report that Redis has received
        self._all_tenants_at = self._sync_at = 0.0
        self._settles_at = -math.inf  # inf while Redis does not answer
        self._waiting: list[_Waiter] = []
        self._in_report: list[_Waiter] = []  # waiters whose charges are in the current report
        self._reply: asyncio.Task[LeaseReply] | None = None
        self._wake = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None

    @property
    def divided_by(self) -> int:
        """Number of gateways among which limits are divided. 1 while Redis counts for them."""
        return 1 if self.division is None else self.division.gateways

    @property
    def num_gateways(self) -> int:
        """Number of gateways that were alive at the last reply of Redis."""
        return self._gateways

    @property
    def active_tenants(self) -> Collection[str]:
        """Names of the tenants whose usage has to be reported to Redis."""
        return self._active

    def held_by_others(self, tenant: str) -> Amounts:
        """Returns the amount of each kind that other gateways held of a tenant's limits."""
        return self._held_by_others.get(tenant, NOTHING)

    def start(self) -> None:
        """Starts the task that reports to Redis. Waits for nothing."""
        if self._store is not None:
            self._reporter = asyncio.create_task(self._report_often(self._store))
        elif self.divided_by > 1:
            log.info(
                "tenants' limits are divided by %d gateways (GATEWAY_REPLICAS), because "
                "GATEWAY_REDIS_URL is not set",
                self.divided_by,
            )

    async def close(self) -> None:
        """Reports to Redis what remains in the windows, and disconnects."""
        if self._store is None:
            return
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.wait({self._reporter})
        if self.division is None:
            with suppress(Exception):
                async with asyncio.timeout(self._times.wait):
                    reports = [self._make_report(name, NOTHING) for name in self._active]
                    await self._store.report(reports)
        await self._store.close()

    def quota(self, tenant: Tenant) -> Quota:
        """Returns the quota of a tenant, with the limits that the tenant has now.

        The quota is created at the tenant's first request.
        """
        name, limits = tenant.name, tenant.limits.by_kind
        if (quota := self._quotas.get(name)) is None:
            quota = self._quotas[name] = Quota(name, limits, self._clock, self._times.window)
            quota.leased_by_others = list(self.held_by_others(name))
            if self.division is not None:
                quota.divide(self.division)
        quota.limits = limits
        return quota

    def headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """Returns the rate-limit headers for responses to a tenant."""
        return self.quota(tenant).headers(self.division)

    def has_room_for_line(self, tenant: Tenant) -> bool:
        """Returns whether a small line of a batch of a tenant would fit into half of each limit."""
        return self.quota(tenant).exceeded_half(_SMALLEST, self.division) is None

    async def charge(self, charge: Charge) -> None:
        """Takes a charge as soon as it fits, without waiting if it fits into the leases.

        Raises:
            RateLimited: the charge does not fit, and nothing was taken.
        """
        quota = charge.quota
        if charge.is_of_line:
            quota.check_half(charge.required, self.division)
        if self.division is not None:
            quota.check_divided(charge.required, self.division)
        elif (kind := quota.exceeded_kind(charge.required)) is not None:
            quota.check_last_refusal(kind, charge.required[kind])
            await self._wait(_Waiter(charge))
            return
        self._take(charge)

    def _take(self, charge: Charge) -> None:
        charge.take()
        if self._store is not None and charge.quota.is_limited:
            self._active.add(charge.quota.tenant)

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._wake.set()
        try:
            await _wait_for(waiter.done, self._times.wait)
        except asyncio.CancelledError:
            waiter.done.cancel()
            raise
        if not waiter.done.done():
            self._lose_redis(f"Redis did not answer within {self._times.wait * 1e3:g} ms")
        waiter.done.result()

    async def _report_often(self, store: LeaseStore) -> None:
        """Reports to Redis forever: when a request waits, and once in `Times.sync`."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._report(store)
            except Exception as error:
                reason = str(error) or type(error).__name__
                if self.division is not None and self._settles_at < math.inf:
                    self._log_division(self.division, reason)
                self._settles_at = math.inf
                self._lose_redis(reason)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._times.last_retry)
                continue
            retry_s = _FIRST_RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(self._times.sync):
                    await self._wake.wait()

    async def _report(self, store: LeaseStore) -> None:
        """Sends one report and applies the reply. Raises any exception if there is no reply."""
        self._wake.clear()
        self._in_report, self._waiting = self._waiting, []
        waiting: dict[str, list[int]] = {}
        for waiter in self._in_report:
            charge = waiter.charge
            sums = waiting.setdefault(charge.quota.tenant, [0] * len(KINDS))
            # Lines that exceed the half together must not lease what requests need.
            if charge.is_of_line and not waiter.done.done():
                try:
                    charge.quota.check_half(charge.required, self.division, sums)
                except RateLimited as error:
                    waiter.done.set_exception(error)
                    continue
            for kind, amount in enumerate(charge.required):
                sums[kind] += amount
        reports = [self._make_report(name, amounts) for name, amounts in waiting.items()]
        if (now := self._clock()) >= self._sync_at:
            self._sync_at = now + self._times.sync
            rest = (self._make_report(name, NOTHING) for name in self._active - waiting.keys())
            reports += [report for report in rest if self._reported.get(report.tenant) != report]
        if self.division is None:
            # An amount that this report gives back must not be used before the reply arrives.
            for report in reports:
                quota = self._quotas[report.tenant]
                quota.leases = list(map(min, quota.leases, report.wanted))
        all_tenants = now >= self._all_tenants_at
        sending = store.report(reports, all_tenants=all_tenants)
        self._reply = asyncio.create_task(sending)
        try:
            await _wait_for(self._reply, _REPLY_TIMEOUT_S)
            if not self._reply.done() or self._reply.cancelled():
                raise TimeoutError(f"Redis did not answer within {_REPLY_TIMEOUT_S:g} s")
            reply = self._reply.result()
        finally:
            self._reply.cancel()
        if all_tenants:
            self._all_tenants_at = now + min(_ALL_TENANTS_S, self._times.settle / 3)
        self._reported.update((report.tenant, report) for report in reports)
        self._apply_reply(reports, reply)

    def _make_report(self, tenant: str, waiting: Amounts) -> LeaseReport:
        """Returns the report about a tenant.

        Args:
            tenant: name of the tenant.
            waiting: sum of the amounts for which requests of the tenant wait.
        """
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
            if waiting[kind] or (used and quota.has_changed):
                free = max(0, limit - quota.leased_by_others[kind] - wanted[kind])
                wanted[kind] += free // (_HEADROOM * max(1, self._gateways))
        report = LeaseReport(tenant, limits, held, wanted, quota.has_refused)
        quota.has_changed = quota.has_refused = False
        return report

    def _apply_reply(self, reports: Sequence[LeaseReport], reply: LeaseReply) -> None:
        """Applies a reply of Redis, and decides on the charges that waited for the reply."""
        now = self._clock()
        if self._settles_at == math.inf:
            self._settles_at = now + self._times.settle
        is_settled = reply.age_s >= self._times.settle and now >= self._settles_at
        if not is_settled:
            self._divide("Redis has lost the leases or has only just come back")
            self._reported.clear()
        else:
            self._apply_leases(reports, reply)
        self._gateways = reply.gateways
        self._decide(has_reply=True)

    def _apply_leases(self, reports: Sequence[LeaseReport], reply: LeaseReply) -> None:
        if reply.held_by_others is not None:
            self._held_by_others = reply.held_by_others
            for name, quota in self._quotas.items():
                quota.leased_by_others = list(self.held_by_others(name))
        if self.division is not None:
            for quota in self._quotas.values():
                quota.leases = quota.used()
            self.division = None
            log.info("tenants' limits are counted in Redis, for %d gateways", reply.gateways)
        for report, (leases, others) in zip(reports, reply.rows, strict=True):
            quota = self._quotas[report.tenant]
            quota.leases, quota.leased_by_others = leases, others
            if not any((*leases, *quota.used(), report.has_refused)):
                self._active.discard(report.tenant)
                self._reported.pop(report.tenant, None)

    def _lose_redis(self, reason: str) -> None:
        """Divides the limits, since Redis cannot be used now."""
        self._divide(reason)
        self._reported.clear()
        if self._reply is not None:
            self._reply.cancel()
        self._decide(has_reply=False)

    def _divide(self, reason: str) -> None:
        """Begins a division of the limits, unless they are divided already."""
        if self.division is not None:
            return
        self.division = Division(max(1, self._gateways), self._clock())
        for quota in self._quotas.values():
            quota.divide(self.division)
        self._log_division(self.division, reason)

    def _log_division(self, division: Division, reason: str) -> None:
        log.warning(
            "tenants' limits are divided by %d gateways until Redis counts them: %s",
            division.gateways,
            reason,
        )

    def _decide(self, *, has_reply: bool) -> None:
        """Takes or refuses the charges of the current report, and without a reply all charges."""
        waiters, self._in_report = self._in_report, []
        if not has_reply or self.division is not None:
            waiters += self._waiting
            self._waiting = []
        for waiter in waiters:
            if waiter.done.done():
                continue
            try:
                self._take_or_refuse(waiter.charge)
            except RateLimited as error:
                waiter.done.set_exception(error)
            else:
                waiter.done.set_result(None)

    def _take_or_refuse(self, charge: Charge) -> None:
        """Takes a charge. Raises RateLimited if it does not fit."""
        quota, required = charge.quota, charge.required
        if charge.is_of_line:  # Other gateways may have taken it meanwhile.
            quota.check_half(required, self.division)
        if self.division is not None:
            quota.check_divided(required, self.division)
        elif (kind := quota.exceeded_kind(required, is_current=True)) is not None:
            quota.record_refusal(kind, required[kind])
            raise quota.refusal(kind, required[kind])
        self._take(charge)


async def _wait_for(
    future: asyncio.Future[None] | asyncio.Task[LeaseReply], timeout_s: float
) -> None:
    """Waits until a future is done or the time is over. Does not cancel it or raise its error.

    Afterwards the event loop gets a few more turns: if it was late, the reply is already in the
    socket's buffer and only has to be read.
    """
    await asyncio.wait({future}, timeout=timeout_s)
    turns = 0
    while not future.done() and turns < 10:
        turns += 1
        await asyncio.sleep(0)
