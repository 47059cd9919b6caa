"""Several asynchronous generators as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(
    generators: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields (index of the generator, item) as items come; ends with the last generator.

    Raises:
        Exception: the first that a generator raises; the others are closed then.
    """
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(len(generators))

    async def drain(index: int, generator: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(generator) as items:
                async for item in items:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(i, generator)) for i, generator in enumerate(generators)]
    try:
        num_left = len(tasks)
        while num_left:
            match await queue.get():
                case None:
                    num_left -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
