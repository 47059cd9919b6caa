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
        self._arrived = asyncio.Event()

    def put(self, item: Item, num_bytes: int = 0) -> None:
        """Adds an item; never waits."""
        self._items.append(item)
        self.num_bytes += num_bytes
        self._arrived.set()

    def clear(self) -> None:
        self._items = []
        self.num_bytes = 0

    async def take(self) -> list[Item]:
        """All items at hand, at least one. For one caller at a time."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        items = self._items
        self.clear()
        return items
