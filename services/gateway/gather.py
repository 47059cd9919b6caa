"""A call for each of several items, at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def gather(
    call: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """What the calls return, in the items' order; at most `limit` run at a time.

    Raises:
        Exception: the first that a call raises; the others have been cancelled then.
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
        # A task holds its error, whose traceback holds this frame: without the list there is no
        # cycle, and a failed request's images are freed at its end.
        tasks.clear()
