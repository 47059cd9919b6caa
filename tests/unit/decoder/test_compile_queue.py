"""The order in which grammars are compiled: tenants' turns, by the CPU seconds they have used."""

import asyncio

import pytest

from services.common.errors import Overloaded
from services.decoder.masks.compile_queue import (
    MAX_WAITING,
    MAX_WAITING_OF_TENANT,
    CompileJob,
    CompileQueue,
)
from services.decoder.masks.grammar import GrammarSource

SOURCE = GrammarSource("regex", "a")


def job(tenant: str, number: int = 0) -> CompileJob:
    return CompileJob(f"{tenant}{number}".encode(), SOURCE, tenant, asyncio.Future())


@pytest.fixture
async def queue():
    return CompileQueue()


def served(queue: CompileQueue, costs: dict[str, float], count: int) -> list[str]:
    """Takes jobs, each of which costs what its tenant's do; returns their names."""
    found: list[str] = []
    for _ in range(count):
        taken = queue.take()
        queue.charge(taken.tenant, costs[taken.tenant])
        found.append(taken.key.decode())
    return found


async def test_jobs_of_one_tenant_keep_their_order(queue):
    for number in range(3):
        queue.put(job("a", number))
    assert served(queue, {"a": 0.5}, 3) == ["a0", "a1", "a2"] and not len(queue)


async def test_turns_are_charged_by_cpu_seconds(queue):
    """A tenant of cheap grammars compiles fifty in the time of one of the other's."""
    for number in range(60):
        queue.put(job("cheap", number))
        queue.put(job("dear", number))
    order = served(queue, {"cheap": 0.01, "dear": 0.5}, 54)
    assert sum(name.startswith("dear") for name in order) == 2
    assert order[0] == "cheap0" and order[1] == "dear0"


async def test_a_tenant_that_comes_is_behind_no_backlog(queue):
    for number in range(12):
        queue.put(job("hostile", number))
    served(queue, {"hostile": 0.5}, 3)
    queue.put(job("other"))
    assert served(queue, {"other": 0.003, "hostile": 0.5}, 1) == ["other0"]


async def test_what_is_put_while_a_job_is_in_work_waits_behind_its_cost(queue):
    queue.put(job("a", 1))
    taken = queue.take()
    queue.put(job("a", 2))
    queue.put(job("b", 1))
    queue.charge(taken.tenant, 0.5)
    assert served(queue, {"a": 0.5, "b": 0.1}, 2) == ["b1", "a2"]


async def test_nothing_is_owed_for_time_in_which_nobody_else_waited(queue):
    for number in range(10):
        queue.put(job("a", number))
    served(queue, {"a": 0.5}, 10)
    queue.put(job("b", 1))
    queue.put(job("a", 11))
    queue.put(job("b", 2))
    assert served(queue, {"a": 0.1, "b": 0.1}, 3)[1] in ("a11", "b2")


async def test_too_many_jobs_are_an_overload(queue):
    for number in range(MAX_WAITING_OF_TENANT):
        queue.put(job("a", number))
    with pytest.raises(Overloaded):
        queue.put(job("a"))
    for number in range(MAX_WAITING - MAX_WAITING_OF_TENANT):
        queue.put(job(f"tenant {number}"))
    with pytest.raises(Overloaded):
        queue.put(job("another"))
    assert len(queue) == MAX_WAITING
