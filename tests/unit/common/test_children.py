"""How child processes are waited for."""

import asyncio
from typing import Any, cast

import pytest

from services.common.process import children
from tests.noise import PATIENCE_S


class Ending:
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self.status = asyncio.get_running_loop().create_future()
        self.is_awaited = asyncio.Event()

    async def wait(self) -> int:
        self.is_awaited.set()
        return await self.status


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_cancellation_that_meets_the_end_is_not_lost(num_turns: int) -> None:
    """Who keeps a process running would start another one, and never end."""
    process = Ending()
    task = asyncio.create_task(children.end(cast(Any, process), PATIENCE_S))
    await process.is_awaited.wait()
    process.status.set_result(0)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.wait({task})
    assert was_done != task.cancelled()
