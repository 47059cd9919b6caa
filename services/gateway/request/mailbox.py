"""Items from the producers of one event loop for one consumer."""

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items from several producers for one consumer, which takes all items at hand.

    Attributes:
        num_bytes: of the items that wait.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self.num_bytes = 0
        self._arrival: asyncio.Future[None] | None = None  # that `take` waits for

    def put(self, item: Item, num_bytes: int = 0) -> None:
        """Adds an item; never waits."""
        self._items.append(item)
        self.num_bytes += num_bytes
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def clear(self) -> None:
        self._items = []
        self.num_bytes = 0

    async def take(self) -> list[Item]:
        """All items at hand, at least one. For one caller at a time."""
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        items = self._items
        self.clear()
        return items
