"""Turns of tenants at the event loop and at threads."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import ClientDisconnect

from services.common.errors import DeadlineExceeded
from services.gateway.attempts import Mailbox
from services.gateway.http import exchange
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.tenants import ANONYMOUS, Limits, Tenant
from services.gateway.tenancy.turns import FairThreads, Turnstile, bind_tenant
from tests.slices import slice_ns

A, B = (Tenant(name, Limits(), shares_caches=False) for name in "ab")


def of(tenant: Tenant, work: Callable[[], Awaitable[object]]) -> "asyncio.Task[object]":
    """`work` in a task of the tenant's."""

    async def run() -> object:
        bind_tenant(tenant)
        return await work()

    return asyncio.create_task(run())


async def test_one_request_begins_in_each_pass_of_the_loop_and_tenants_take_turns() -> None:
    turnstile, begun, passes = Turnstile(), [], 0

    async def begin(name: str) -> None:
        await turnstile.turn()
        begun.append((name, passes))

    flood = [of(A, lambda: begin("a")) for _ in range(100)]
    await asyncio.sleep(0)
    other = of(B, lambda: begin("b"))
    while len(begun) < 101:
        await asyncio.sleep(0)
        passes += 1
    await asyncio.gather(*flood, other)
    times = [at for name, at in begun if name == "a"]
    assert len(set(times)) == len(times), "two in one pass"
    assert [name for name, _ in begun].index("b") <= 1, "it is behind nothing of its own"


async def test_what_began_beyond_a_pass_is_taken_off_the_room_of_the_next_ones() -> None:
    turnstile, loop = Turnstile(4.0), asyncio.get_running_loop()

    def waiters(tenant: Tenant, costs: list[float]) -> "list[asyncio.Future[None]]":
        found = [loop.create_future() for _ in costs]
        for waiter, cost in zip(found, costs, strict=True):
            turnstile.complete(waiter, tenant, cost)
        return found

    flood = waiters(A, [1.0] * 24)
    counts = [sum(waiter.done() for waiter in flood)]
    other = waiters(B, [6.0])
    assert other[0].done(), "at once, although the pass has no room left"
    while counts[-1] < 24:
        await asyncio.sleep(0)
        counts.append(sum(waiter.done() for waiter in flood))
    assert counts == [4, 4, 6, 10, 14, 18, 22, 24]


async def test_what_comes_until_an_answers_turn_is_taken_as_one() -> None:
    waiters: list[asyncio.Future[None]] = []
    mailbox = Mailbox[int](waiters.append)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    for item in range(5):
        mailbox.put(item)
    await asyncio.sleep(0)
    assert len(waiters) == 1 and not taking.done()
    waiters[0].set_result(None)
    assert await taking == list(range(5))


async def test_tenants_that_owe_nothing_are_bounded_too() -> None:
    turnstile, loop = Turnstile(), asyncio.get_running_loop()
    crowd = [Tenant(f"t{number}", Limits(), shares_caches=False) for number in range(100)]
    found = [loop.create_future() for _ in crowd]
    for tenant, waiter in zip(crowd, found, strict=True):
        turnstile.complete(waiter, tenant)
    assert 1 <= sum(waiter.done() for waiter in found) <= 8
    await asyncio.wait_for(asyncio.gather(*found), 5)


async def test_a_tenant_that_is_alone_has_longer_passes() -> None:
    turnstile, loop = Turnstile(2.0, alone=50.0), asyncio.get_running_loop()

    async def begun_at_once(tenant: Tenant) -> int:
        found = [loop.create_future() for _ in range(60)]
        for waiter in found:
            turnstile.complete(waiter, tenant)
        count = sum(waiter.done() for waiter in found)
        await asyncio.gather(*found)
        await asyncio.sleep(0)
        return count

    await begun_at_once(A)  # the first one is new
    turnstile._alone_at = loop.time()
    await begun_at_once(A)
    assert await begun_at_once(A) == 50
    assert await begun_at_once(B) == 2
    assert await begun_at_once(A) == 2


async def test_callers_without_a_key_do_not_wait() -> None:
    turnstile, passed = Turnstile(), 0

    async def begin() -> None:
        nonlocal passed
        await turnstile.turn()
        passed += 1

    tasks = [of(ANONYMOUS, begin) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert passed == 10
    await asyncio.gather(*tasks)


async def test_one_chunk_of_something_long_is_read_in_each_pass_by_whomever() -> None:
    admission, read = Admission(64), []

    async def begin() -> None:
        await admission.bulk_turn()
        read.append(passes)

    passes = 0
    tasks = [of(ANONYMOUS, begin) for _ in range(10)]
    while len(read) < 10:
        await asyncio.sleep(0)
        passes += 1
    assert len(set(read)) == 10, "two in one pass"
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("late", [False, True], ids=["closed", "late"])
async def test_requests_without_a_body_end_one_after_another(late, monkeypatch) -> None:
    """Hundreds may be closed, or be late, at the same moment."""
    monkeypatch.setattr(exchange, "BODY_START_S", 0.05)
    admission, ended = Admission(64), []

    async def receive() -> dict[str, str]:
        if late:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def read() -> None:
        with pytest.raises(DeadlineExceeded if late else ClientDisconnect):
            await exchange.read_body(
                {"headers": []}, receive, lambda count: None, admission.bulk_turn
            )
        ended.append(passes)

    passes = 0
    tasks = [of(ANONYMOUS, read) for _ in range(10)]
    if late:
        await asyncio.sleep(0.04)
    while len(ended) < 10:
        await asyncio.sleep(0)
        passes += 1
    assert len(set(ended)) > 8
    await asyncio.gather(*tasks)


async def test_threads_for_long_work_give_way() -> None:
    threads = FairThreads(1, "test", niceness=3)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        assert await threads.run(1, niceness_of_thread) == own + 3
        assert niceness_of_thread() == own
        assert await threads.run(1, slice_ns) > 10 * slice_ns()  # what wakes up goes first
    finally:
        threads.close()


def niceness_of_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_request_that_leaves_the_turnstile_delays_nobody() -> None:
    turnstile = Turnstile()
    gone = [of(A, turnstile.turn) for _ in range(5)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    passed = of(B, turnstile.turn)
    await asyncio.wait([passed], timeout=5)
    assert passed.done()
    await asyncio.gather(*gone, return_exceptions=True)
    passed = of(A, turnstile.turn)
    await asyncio.wait([passed], timeout=5)
    assert passed.done()


class Gate:
    """One thread that is busy until `open`."""

    def __init__(self) -> None:
        self.threads = FairThreads(1, "test")
        self.opened = threading.Event()
        self.done: list[str] = []
        self.holder = of(A, lambda: self.threads.run(1.0, self.opened.wait, 30))

    def work(self, tenant: Tenant, cost: float = 1.0) -> "asyncio.Task[object]":
        return of(tenant, lambda: self.threads.run(cost, self.done.append, tenant.name))


@pytest.fixture
async def gate() -> Gate:
    found = Gate()
    await asyncio.sleep(0)
    return found


async def test_threads_take_the_work_of_tenants_in_turn(gate: Gate) -> None:
    flood = [gate.work(A) for _ in range(50)]
    await asyncio.sleep(0)
    other = gate.work(B)
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(gate.holder, other, *flood)
    assert gate.done.index("b") <= 1 and len(gate.done) == 51


async def test_long_work_counts_for_more(gate: Gate) -> None:
    tasks = [gate.work(A, cost=10) for _ in range(5)]
    await asyncio.sleep(0)
    tasks += [gate.work(B) for _ in range(20)]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(gate.holder, *tasks)
    assert 1 <= gate.done[:12].count("a") <= 2


async def test_cancelled_work_leaves_the_line_and_no_thread_is_lost(gate: Gate) -> None:
    gone = [gate.work(A) for _ in range(5)]
    kept = gate.work(B)
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    gate.holder.cancel()  # its work keeps the thread
    await asyncio.sleep(0)
    assert not kept.done()
    gate.opened.set()
    await asyncio.wait_for(kept, 30)
    assert gate.done == ["b"]
    late = gate.work(A)
    await asyncio.wait_for(late, 30)


async def test_a_caller_that_is_cancelled_with_the_thread_in_hand_gives_it_back() -> None:
    threads = FairThreads(1, "test")
    await threads.run(1.0, int)
    threads._num_idle -= 1  # as by other work
    waiting = of(A, lambda: threads.run(1.0, int))
    await asyncio.sleep(0)
    threads._release()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await asyncio.wait_for(threads.run(1.0, int), 5) == 0


async def test_errors_reach_the_caller() -> None:
    def fail() -> None:
        raise ValueError("x")

    threads = FairThreads(2, "test")
    for _ in range(3):
        with pytest.raises(ValueError, match="x"):
            await threads.run(1.0, fail)
    threads.close()


async def test_another_tenant_waits_for_no_work_of_one_that_was_alone() -> None:
    turnstile, loop = Turnstile(2.0, alone=4.0), asyncio.get_running_loop()

    def waiters(tenant: Tenant, count: int) -> "list[asyncio.Future[None]]":
        found = [loop.create_future() for _ in range(count)]
        for waiter in found:
            turnstile.complete(waiter, tenant)
        return found

    waiters(A, 1)
    turnstile._alone_at = loop.time()
    await asyncio.sleep(0)
    flood = waiters(A, 100)
    assert sum(waiter.done() for waiter in flood) == 4, "no more than a pass has room for"
    other = waiters(B, 1)
    assert other[0].done(), "it is behind nothing of its own"
    await asyncio.gather(*flood)
