"""Limits of a tenant over several gateways: counted in a real Redis, divided without it.

Seconds are scaled. Gateways are their limiters alone, in one event loop. Where the end of a window
matters, a window takes two seconds; elsewhere none ends during a test.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import RateLimited
from services.gateway.tenancy.lease_store import LeaseReport, LeaseStore
from services.gateway.tenancy.leases import Leases, Times
from services.gateway.tenancy.quota import RUNNING, TOKENS
from services.gateway.tenancy.tenants import Limits, Tenant
from services.gateway.tenancy.usage import counting
from tests.noise import PATIENCE_S, async_least
from tests.redis_server import RedisServer

WINDOW_S = 2.0
TIMES = Times(window=WINDOW_S, sync=0.02, settle=0.4, alive=0.5, wait=0.05, last_retry=0.1)
# Tests whose subject is none of them: the machine's noise must end no window and no wait.
PATIENT = replace(TIMES, window=600.0, alive=600.0, wait=PATIENCE_S)
# Tests in which a window ends.
BRIEF = replace(TIMES, wait=PATIENCE_S)
# A test whose subject is: one wait differs from none by more than that noise.
LONG_WAIT = replace(TIMES, wait=0.2)
LIMIT = 20_000


def tenant(**limits: Any) -> Tenant:
    return Tenant("t", Limits(**limits), shares_caches=False)


class Clock:
    """The gateways' clock, which a test can set forward. Redis has its own."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


@asynccontextmanager
async def gateways(
    url: str,
    number: int = 1,
    times: Times = PATIENT,
    *,
    counted: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[list[Leases]]:
    """Gateways; with `counted`, as soon as they count together."""
    async with AsyncExitStack() as stack:
        found = [Leases(url, number, times, clock) for _ in range(number)]
        for leases in found:
            leases.start()
            stack.push_async_callback(leases.close)
        if counted:
            await until(lambda: all(leases.division is None for leases in found))
            await until(lambda: all(leases.num_gateways == number for leases in found))
        yield found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def use(leases: Leases, who: Tenant, tokens: int) -> None:
    """One request that uses all it asked for; raises RateLimited."""
    async with counting(leases, who) as usage:
        await usage.charge(tokens, 1, 0)
        usage.correct(tokens)


def num_questions(server: RedisServer) -> int:
    with server.client() as client:
        stats: Any = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


async def test_all_of_a_limit_is_at_the_gateway_that_is_asked(redis_server: RedisServer) -> None:
    async with gateways(redis_server.url, 4) as found:
        who = tenant(tokens_per_minute=1000)
        for _ in range(20):
            await use(found[0], who, 50)
        for leases in found:
            with pytest.raises(RateLimited, match="1000 tokens per minute"):
                await use(leases, who, 50)


async def test_after_a_window_all_of_a_limit_is_at_another_gateway(
    redis_server: RedisServer,
) -> None:
    async with gateways(redis_server.url, 4, BRIEF) as found:
        who = tenant(tokens_per_minute=1000)
        for _ in range(20):
            await use(found[0], who, 50)
        await asyncio.sleep(WINDOW_S)
        await until(lambda: not any(found[3].quota(who).leased_by_others))
        for _ in range(20):
            await use(found[3], who, 50)


async def test_what_was_used_before_redis_is_lost_counts_at_other_gateways(
    redis_server: RedisServer,
) -> None:
    """A tenant that moves when Redis goes finds no second limit there."""
    clock = Clock()
    async with gateways(redis_server.url, 2, clock=clock) as found:
        who = tenant(tokens_per_minute=1000)
        for _ in range(9):
            await use(found[0], who, 100)
        await until(lambda: sum(found[1].held_by_others("t")) >= 900)
        redis_server.stop()
        await until(lambda: found[1].division is not None)
        admitted = 0
        for _ in range(8):  # until shortly before the end of the window
            with pytest.raises(RateLimited) as refused:
                while True:
                    await use(found[1], who, 10)
                    admitted += 10
            assert 0 < (refused.value.retry_after_s or 0) <= PATIENT.window
            clock.skip(PATIENT.window / 10)
        assert 0 < admitted <= 100
        clock.skip(PATIENT.window)
        with pytest.raises(RateLimited, match="this gateway's share is 500"):
            for _ in range(11):
                await use(found[1], who, 50)


async def test_retry_after_is_when_a_like_part_of_all_gateways_has_left_the_window(
    redis_server: RedisServer,
) -> None:
    async with gateways(redis_server.url, 2) as found:
        who = tenant(tokens_per_minute=1000)
        first = time.monotonic()
        for leases in found:
            for _ in range(5):
                await use(leases, who, 100)
            quota = leases.quota(who)  # what the gateway has not used is given back
            await until(lambda quota=quota: quota.leases[TOKENS] == 500)
        last = before = time.monotonic()
        with pytest.raises(RateLimited) as refused:
            await use(found[0], who, 200)
        after = time.monotonic()
        # The tokens leave the window as late after they were used as it is long.
        left_s = (refused.value.retry_after_s or 0) - PATIENT.window
        assert first - after <= left_s <= last - before


async def test_a_redis_that_has_forgotten_opens_nothing(redis_server: RedisServer) -> None:
    async with gateways(redis_server.url, 2) as found:
        who = tenant(tokens_per_minute=1000)
        for _ in range(10):
            await use(found[0], who, 100)
        await until(lambda: sum(found[1].held_by_others("t")) >= 1000)
        start = time.monotonic()
        redis_server.flush()
        while time.monotonic() < start + WINDOW_S / 2:
            for leases in found:
                with pytest.raises(RateLimited):
                    await use(leases, who, 200)
            await asyncio.sleep(0.01)


async def test_gateways_that_all_want_more_come_to_hold_the_same(
    redis_server: RedisServer,
) -> None:
    async with gateways(redis_server.url, 2, BRIEF) as found:
        who = tenant(tokens_per_minute=1000)

        async def flood(leases: Leases) -> None:
            while True:
                try:
                    await use(leases, who, 20)
                except RateLimited:
                    await asyncio.sleep(0.01)

        def used() -> list[int]:
            return [leases.quota(who).tokens.used for leases in found]

        async with asyncio.TaskGroup() as group:
            floods = [group.create_task(flood(found[0]))]
            await until(lambda: used()[0] >= 900)  # it has all
            floods.append(group.create_task(flood(found[1])))
            # After some windows, however slow the machine is.
            await until(lambda: min(used()) >= 400 and sum(used()) >= 900)
            assert sum(used()) <= 1000
            for each in floods:
                each.cancel()


async def test_limits_at_a_time_are_of_all_gateways(redis_server: RedisServer) -> None:
    async with gateways(redis_server.url, 3) as found:
        who = tenant(max_requests=4, max_sequences=6)
        async with AsyncExitStack() as running:
            for index in (0, 0, 1, 2):
                usage = await running.enter_async_context(counting(found[index], who))
                await usage.charge(10, 1, 0)
            for index in range(3):
                with pytest.raises(RateLimited, match="4 requests at a time"):
                    await use(found[index], who, 10)
        await until(lambda: not any(leases.active_tenants for leases in found))
        await asyncio.sleep(0.12)  # what was refused is held off
        async with counting(found[1], who) as usage:
            await usage.charge(10, 6, 0)
            with pytest.raises(RateLimited, match="6 sequences at a time"):
                await use(found[2], who, 10)


async def test_what_a_dead_gateway_ran_is_free_again(redis_server: RedisServer) -> None:
    who = tenant(max_requests=1)
    async with gateways(redis_server.url, times=BRIEF) as (alive,):
        dead = LeaseStore(redis_server.url, "dead", WINDOW_S, BRIEF.alive)
        running = [0, 0, 0, 1, 0]
        while True:  # again if this process got no CPU for so long that the gateway was dead
            start = time.monotonic()
            await dead.report([LeaseReport("t", [-1, -1, -1, 1, -1], running, running)])
            try:
                await use(alive, who, 1)
            except RateLimited:
                break
        await dead.close()  # the gateway reports nothing more
        while True:
            try:
                await use(alive, who, 1)
                break
            except RateLimited:
                assert time.monotonic() - start < PATIENCE_S
                await asyncio.sleep(0.05)
        assert time.monotonic() - start > BRIEF.alive / 2


async def test_requests_within_a_lease_ask_nobody_and_floods_little(
    redis_server: RedisServer,
) -> None:
    slow = Times(window=60.0, sync=PATIENCE_S, settle=0.0, alive=600.0, wait=PATIENCE_S)
    async with gateways(redis_server.url, 1, slow) as (leases,):
        before = num_questions(redis_server)
        for _ in range(100):
            await use(leases, tenant(), 1000)
        assert num_questions(redis_server) == before
        who = tenant(tokens_per_minute=100_000, requests_per_minute=1000)
        for _ in range(100):
            await use(leases, who, 100)
        assert num_questions(redis_server) - before <= 2
        refused = 0
        for _ in range(1000):
            try:
                await use(leases, who, 1000)
            except RateLimited:
                refused += 1
        assert refused > 500
        assert num_questions(redis_server) - before < 200


async def test_a_request_asks_as_it_arrives_and_for_its_prompt_at_most(
    redis_server: RedisServer,
) -> None:
    slow = Times(window=60.0, sync=PATIENCE_S, settle=0.0, alive=600.0, wait=PATIENCE_S)
    who = tenant(
        tokens_per_minute=1000, requests_per_minute=2, pixels_per_minute=100, max_requests=2,
        max_sequences=2,
    )  # fmt: skip
    async with gateways(redis_server.url, 1, slow) as (leases,):
        before = num_questions(redis_server)
        async with counting(leases, who) as usage:
            await usage.charge(100, 1, 50)
        assert num_questions(redis_server) - before == 2


async def test_requests_that_wait_together_ask_together(redis_server: RedisServer) -> None:
    slow = Times(window=60.0, sync=PATIENCE_S, settle=0.0, alive=600.0, wait=PATIENCE_S)
    async with gateways(redis_server.url, 1, slow) as (leases,):
        before = num_questions(redis_server)
        who = tenant(tokens_per_minute=10_000)
        results = await asyncio.gather(
            *(use(leases, who, 300) for _ in range(40)), return_exceptions=True
        )
        assert sum(result is None for result in results) == 33
        assert all(isinstance(result, RateLimited | None) for result in results)
        assert num_questions(redis_server) - before <= 2


async def test_a_frozen_redis_delays_a_request_once_and_shortly(redis_server: RedisServer) -> None:
    async with gateways(redis_server.url, 2, LONG_WAIT) as (first, _):
        who = tenant(tokens_per_minute=LIMIT)
        numbers = itertools.count()

        async def lost() -> float:
            redis_server.thaw()
            await until(lambda: first.division is None)
            redis_server.freeze()
            start = time.monotonic()
            await use(first, replace(who, name=f"t{next(numbers)}"), LIMIT // 8)  # has no lease
            assert first.division is not None
            return time.monotonic() - start

        try:
            assert await async_least(lost, 0.35) <= 0.35

            async def next_one() -> float:
                start = time.monotonic()
                await use(first, who, 1)
                return time.monotonic() - start

            assert await async_least(next_one, 0.15) < 0.15
        finally:
            redis_server.thaw()


async def test_a_cancelled_request_takes_nothing(redis_server: RedisServer) -> None:
    async with gateways(redis_server.url, 1) as (leases,):
        who = tenant(tokens_per_minute=1000, max_requests=1)
        asking = asyncio.create_task(use(leases, who, 900))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        quota = leases.quota(who)
        await asyncio.sleep(5 * TIMES.sync)
        assert quota.meters[TOKENS].used == quota.meters[RUNNING].used == 0
        await use(leases, who, 900)


async def test_requests_that_fail_early_are_counted_at_all_gateways(
    redis_server: RedisServer,
) -> None:
    async with gateways(redis_server.url, 2) as found:
        who = tenant(requests_per_minute=10)
        for _ in range(10):
            async with counting(found[0], who):
                pass
        await until(lambda: sum(found[1].held_by_others("t")) == 10)
        with pytest.raises(RateLimited, match="10 requests per minute"):
            await use(found[1], who, 1)


async def test_a_request_larger_than_the_limit_fits_into_an_empty_window(
    redis_server: RedisServer,
) -> None:
    async with gateways(redis_server.url, 2) as found:
        who = tenant(tokens_per_minute=1000)
        await use(found[0], who, 5000)
        for leases in found:
            with pytest.raises(RateLimited):
                await use(leases, who, 10)


async def test_without_redis_limits_are_divided_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with gateways("", 4, counted=False) as found:
        assert "divided by 4 gateways" in caplog.text
        assert found[0].divided_by == 4
        who = tenant(tokens_per_minute=1000)
        for leases in found:
            for _ in range(5):
                await use(leases, who, 50)
            with pytest.raises(RateLimited, match="this gateway's share is 250"):
                await use(leases, who, 50)
        headers = dict(found[0].headers(who))
        assert headers[b"x-ratelimit-limit-tokens"] == b"250"
        assert headers[b"x-ratelimit-remaining-tokens"] == b"0"


async def test_a_redis_that_is_away_from_the_start_is_told_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.stop()
    async with gateways(redis_server.url, 2, counted=False) as found:
        await until(lambda: "divided by 2 gateways until Redis counts them" in caplog.text)
        await asyncio.sleep(0.3)
        assert len(caplog.records) == 2  # of each gateway
        with pytest.raises(RateLimited, match="this gateway's share is 5"):
            for _ in range(6):
                await use(found[0], tenant(requests_per_minute=10), 1)
        redis_server.start()
        await until(lambda: all(leases.divided_by == 1 for leases in found))


async def test_losing_redis_and_finding_it_is_told(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with gateways(redis_server.url, 2) as found:
        assert found[0].divided_by == 1 and "counted in Redis, for" in caplog.text
        redis_server.stop()
        await until(lambda: all(leases.divided_by == 2 for leases in found))
        assert "divided by 2 gateways until Redis counts them" in caplog.text
        await asyncio.to_thread(redis_server.start)
        await until(lambda: all(leases.divided_by == 1 for leases in found))


async def test_lines_of_all_gateways_take_half_of_a_limit(redis_server: RedisServer) -> None:
    """Each gateway's lines are refused by what the lines of the others have taken just now."""
    requests = tenant(tokens_per_minute=LIMIT)
    lines = replace(requests, is_background=True)
    async with gateways(redis_server.url, 3) as found:

        async def try_one(leases: Leases, who: Tenant) -> bool:
            try:
                await use(leases, who, 1000)
            except RateLimited:
                return False
            return True

        for _ in range(3):
            await asyncio.gather(*(try_one(leases, lines) for leases in found for _ in range(8)))
        used = sum(leases.quota(requests).used()[TOKENS] for leases in found)
        assert 1000 <= used <= LIMIT // 2
        # The other half is free for requests, as soon as the gateways have given back what they
        # had leased beyond their use.
        for _ in range((LIMIT - used) // 1000):
            async with asyncio.timeout(PATIENCE_S):
                while not await try_one(found[2], requests):  # noqa: ASYNC110
                    await asyncio.sleep(TIMES.sync)
