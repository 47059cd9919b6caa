"""The order in which grammars are compiled: tenants' turns, by the CPU seconds they have used."""

import pytest

from services.common.errors import Overloaded
from services.decoder.masks.compile_queue import (
    MAX_WAITING,
    MAX_WAITING_FOR_BATCH,
    MAX_WAITING_OF_TENANT,
    CompileJob,
    CompileQueue,
)
from services.decoder.masks.grammar import GrammarSource

SOURCE = GrammarSource("regex", "a")


def job(name: str) -> CompileJob:
    return CompileJob(name.encode(), SOURCE)


def put(queue: CompileQueue, tenant: str, number: int = 0) -> CompileJob:
    """Puts a new job, whose name begins with its tenant's."""
    new = job(f"{tenant}{number}")
    queue.put(new, tenant)
    return new


@pytest.fixture
async def queue():
    return CompileQueue()


def served(queue: CompileQueue, costs: dict[str, float], count: int) -> list[str]:
    """Takes jobs, each of which costs what its tenant's do; returns their names."""
    found: list[str] = []
    for _ in range(count):
        found.append(queue.take().key.decode())
        queue.charge(costs[found[-1].rstrip("0123456789")])
    return found


async def test_jobs_of_one_tenant_keep_their_order(queue):
    for number in range(3):
        put(queue, "a", number)
    assert served(queue, {"a": 0.5}, 3) == ["a0", "a1", "a2"] and not len(queue)


async def test_turns_are_charged_by_cpu_seconds(queue):
    """A tenant of cheap grammars compiles fifty in the time of one of the other's."""
    for number in range(60):
        put(queue, "cheap", number)
        put(queue, "dear", number)
    order = served(queue, {"cheap": 0.01, "dear": 0.5}, 54)
    assert sum(name.startswith("dear") for name in order) == 2
    assert order[0] == "cheap0" and order[1] == "dear0"


async def test_a_tenant_that_comes_is_behind_no_backlog(queue):
    for number in range(12):
        put(queue, "hostile", number)
    served(queue, {"hostile": 0.5}, 3)
    put(queue, "other")
    assert served(queue, {"other": 0.003, "hostile": 0.5}, 1) == ["other0"]


async def test_what_is_put_while_a_job_is_in_work_waits_behind_its_cost(queue):
    put(queue, "a", 1)
    queue.take()
    put(queue, "a", 2)
    put(queue, "b", 1)
    queue.charge(0.5)
    assert served(queue, {"a": 0.5, "b": 0.1}, 2) == ["b1", "a2"]


async def test_nothing_is_owed_for_time_in_which_nobody_else_waited(queue):
    for number in range(10):
        put(queue, "a", number)
    served(queue, {"a": 0.5}, 10)
    put(queue, "b", 1)
    put(queue, "a", 11)
    put(queue, "b", 2)
    assert served(queue, {"a": 0.1, "b": 0.1}, 3)[1] in ("a11", "b2")


async def test_too_many_jobs_are_an_overload(queue):
    for number in range(MAX_WAITING_OF_TENANT):
        put(queue, "a", number)
    with pytest.raises(Overloaded):
        put(queue, "a")
    for number in range(MAX_WAITING - MAX_WAITING_OF_TENANT):
        put(queue, f"tenant {number} ")
    with pytest.raises(Overloaded):
        put(queue, "another")
    assert len(queue) == MAX_WAITING


async def test_a_job_of_two_tenants_is_taken_once_at_the_first_of_its_places(queue):
    for number in range(12):
        put(queue, "a", number)
    shared = job("shared")
    queue.put(shared, "a")
    served(queue, {"a": 0.5}, 1)
    queue.put(shared, "b")
    assert len(queue) == 12, "the job is counted once"
    assert queue.take() is shared and shared not in queue
    queue.charge(0.5)
    assert served(queue, {"a": 0.5}, 11) == [f"a{number}" for number in range(1, 12)]
    assert not len(queue)


async def test_the_tenant_in_whose_turn_a_job_was_taken_is_charged(queue):
    """The other tenant keeps its turn, although it has waited for the job, too."""
    shared = job("shared")
    put(queue, "a", 1)
    queue.put(shared, "a")
    put(queue, "a", 2)
    queue.put(shared, "b")
    put(queue, "b", 1)
    assert served(queue, {"a": 0.1, "shared": 0.5}, 2) == ["a1", "shared"]
    assert served(queue, {"a": 0.1, "b": 0.1}, 2) == ["a2", "b1"]


async def test_a_withdrawn_place_takes_no_turn_and_leaves_the_places_of_others(queue):
    shared, alone = job("shared"), put(queue, "a", 1)
    queue.put(shared, "a")
    queue.put(shared, "b")
    queue.withdraw(shared, "a")
    queue.withdraw(alone, "a")
    assert shared in queue and alone not in queue and len(queue) == 1
    assert queue.take() is shared
    queue.charge(0.5)
    put(queue, "b", 2)
    put(queue, "a", 2)
    assert served(queue, {"a": 0.1, "b": 0.1}, 2) == ["a2", "b2"], "only b was charged"


async def test_a_place_in_a_waiting_job_counts_for_its_tenant_alone(queue):
    jobs = [put(queue, f"tenant {number} ") for number in range(MAX_WAITING)]
    for each in jobs[:MAX_WAITING_OF_TENANT]:
        queue.put(each, "a")  # although the queue is full: no job is added
    with pytest.raises(Overloaded):
        queue.put(jobs[-1], "a")
    queue.put(jobs[-1], "b")
    assert len(queue) == MAX_WAITING
    queue.withdraw(jobs[0], "a")
    queue.put(jobs[-1], "a")
    queue.withdraw(jobs[-1], "b")
    assert len(queue) == MAX_WAITING


async def test_batches_have_their_turns_behind_those_of_requests(queue):
    """Batches of several tenants take turns among themselves, by CPU seconds, too."""
    for number in range(3):
        for tenant in ("a/batch", "b/batch"):
            queue.put(job(f"{tenant}{number}"), tenant, background=True)
    costs = {"a/batch": 0.5, "b/batch": 0.2, "a": 0.1}
    assert served(queue, costs, 1) == ["a/batch0"]
    put(queue, "a", 1)
    put(queue, "a", 2)
    order = served(queue, costs, 7)
    assert order[:2] == ["a1", "a2"], "the batch's CPU time is not charged to requests"
    assert order[2:] == ["b/batch0", "b/batch1", "b/batch2", "a/batch1", "a/batch2"]


async def test_a_job_of_a_batch_that_a_request_waits_for_leaves_the_background(queue):
    shared = job("shared")
    queue.put(job("line"), "a/batch", background=True)
    queue.put(shared, "a/batch", background=True)
    queue.put(shared, "a")
    assert queue.take() is shared
    queue.charge(0.1)
    assert served(queue, {"line": 0.1}, 1) == ["line"]


async def test_batches_leave_space_for_jobs_of_requests(queue):
    for number in range(MAX_WAITING_FOR_BATCH):
        queue.put(job(f"{number}"), f"{number}/batch", background=True)
    with pytest.raises(Overloaded):
        queue.put(job("line"), "a/batch", background=True)
    for number in range(MAX_WAITING - MAX_WAITING_FOR_BATCH):
        put(queue, f"tenant {number} ")


async def test_a_queue_without_bounds_refuses_no_job():
    queue = CompileQueue(is_bounded=False)
    for number in range(2 * MAX_WAITING):
        put(queue, "a", number)
    assert len(queue) == 2 * MAX_WAITING
