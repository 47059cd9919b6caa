"""The number of lines of batches that a gateway runs at a time.

Lines use the gaps of online work. Their number grows while few sequences wait in decoders, stays
while more wait, and is halved when twice as many wait as run. Encoders and decoders do the
lines' work behind all other work in any case; this keeps the queues short, and with them the memory
of what waits. Some sequences nearly always wait beside other requests, because decoders then leave
lines out of most steps. If each of them halved the number, it would double again soon, and a burst
of new lines would delay requests.
"""

import asyncio
from collections import deque

FIRST = 4
# Numbers of waiting sequences for each running one.
_WAITING_TO_HALVE, _WAITING_TO_DOUBLE = 2, 0.25


class LineTurns:
    """Turns of lines, which are taken in the order in which they were asked for.

    Args:
        most: most lines at a time.

    Attributes:
        limit: number of lines that may run at the moment.
        num_running: number of lines that run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(FIRST, most)
        self.num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Waits for a turn. The caller gives it back with `release`."""
        if self.num_running < self.limit and not self._waiting:
            self.num_running += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # The turn came at the same moment.
            raise

    def release(self) -> None:
        """Ends a turn."""
        self.num_running -= 1
        self._wake()

    def adapt(self, num_waiting: int, num_running: int) -> None:
        """Changes the limit.

        Args:
            num_waiting: number of sequences that wait in decoders.
            num_running: number of sequences that hold a row in decoders.
        """
        if num_waiting > _WAITING_TO_HALVE * num_running:
            self.limit = max(1, self.limit // 2)
        elif num_waiting <= _WAITING_TO_DOUBLE * num_running and self.num_running >= self.limit:
            self.limit = min(self._most, 2 * self.limit)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.num_running < self.limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.num_running += 1
                waiter.set_result(None)
