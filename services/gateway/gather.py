"""Concurrent calls for several items, with a limit."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def gather(
    call: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """Calls a function for each item, and returns the results in the items' order.

    Args:
        call: function that is called with each item.
        limit: most calls at a time.

    Raises:
        Exception: the first exception that a call raises. The other calls have been cancelled then.
    """
    gate = asyncio.Semaphore(limit)

    async def call_one(item: Item) -> Result:
        async with gate:
            return await call(item)

    tasks = [asyncio.create_task(call_one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    finally:
        # A failed task refers to its error, whose traceback refers to this frame. The list is
        # cleared so that there is no reference cycle, and a failed request's images are freed at
        # its end.
        tasks.clear()
