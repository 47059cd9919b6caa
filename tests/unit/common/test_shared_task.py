import asyncio

import pytest

from services.common.embeddings.shared_task import SharedTask


class Work:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended: list[asyncio.Task[int]] = []
        self.flight = SharedTask(self._run())
        self.flight.task.add_done_callback(self.ended.append)

    async def _run(self) -> int:
        await self.gate.wait()
        return 7


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_all_waiters_get_the_one_result():
    work = Work()
    waiters = [work.flight.join() for _ in range(3)]
    work.gate.set()
    assert await asyncio.gather(*waiters) == [7, 7, 7]
    assert work.ended == [work.flight.task] and not work.flight.is_abandoned


async def test_only_the_last_waiter_to_leave_cancels_the_work():
    work = Work()
    first, second = work.flight.join(), work.flight.join()
    first.cancel()
    await turns()
    assert work.flight.num_waiters == 1 and not work.flight.task.cancelling()
    assert not work.flight.is_abandoned
    second.cancel()
    await turns()
    assert work.flight.is_abandoned and work.flight.task.cancelled()
    assert work.ended == [work.flight.task]


async def test_a_waiter_that_is_cancelled_leaves():
    work = Work()

    async def wait() -> None:
        await work.flight.join()

    task = asyncio.create_task(wait())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert work.flight.task.cancelled()


async def test_a_failure_without_waiters_is_not_reported(caplog):
    async def fail() -> None:
        raise ValueError("broken")

    flight = SharedTask(fail())
    joined = flight.join()
    await asyncio.wait({joined})
    with pytest.raises(ValueError, match="broken"):
        joined.result()
    del flight, joined
    await turns()
    assert not caplog.records


async def test_work_that_is_cancelled_before_its_first_turn_still_ends():
    work = Work()
    work.flight.join().cancel()
    await turns(5)
    assert work.ended == [work.flight.task] and work.flight.task.cancelled()
