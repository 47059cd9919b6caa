"""The number of lines of batches that a gateway runs at a time.

Lines use the gaps of online work. Their number grows while few sequences wait in decoders, stays
while more wait, and is halved when twice as many wait as run. Encoders and decoders do the
lines' work behind all other work in any case; this keeps the queues short, and with them the memory
of what waits. Some sequences nearly always wait beside other requests, because decoders then leave
lines out of most steps. If each of them halved the number, it would double again soon, and a burst
of new lines would delay requests.

Batches take their turns round-robin. Lines of a tenant at its limit are refused and tried again,
and without this order their many attempts would take all turns from other batches. For the same
reason each refusal halves the number of lines that the batch may run, and each result raises
the number by one.
"""

import asyncio
from collections import deque

FIRST = 4
# Numbers of waiting sequences for each running one.
_WAITING_TO_HALVE, _WAITING_TO_DOUBLE = 2, 0.25


class LineTurns:
    """Turns of the lines of all batches.

    Args:
        most: most lines at a time.

    Attributes:
        most: most lines at a time.
        limit: number of lines that may run at the moment.
        num_running: number of lines that run.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = min(FIRST, most)
        self.num_running = 0
        # Batches with lines that wait for a turn, in the order in which they have the next turns.
        self._waiting: deque[BatchTurns] = deque()

    def of_batch(self) -> "BatchTurns":
        """Returns the turns of a new batch."""
        return BatchTurns(self)

    def wait(self, batch: "BatchTurns") -> None:
        """Queues a batch because a line of the batch waits, and gives out the free turns."""
        if batch not in self._waiting:
            self._waiting.append(batch)
        self.wake()

    def release(self) -> None:
        """Ends a turn."""
        self.num_running -= 1
        self.wake()

    def adapt(self, num_waiting: int, num_running: int) -> None:
        """Changes the limit.

        Args:
            num_waiting: number of sequences that wait in decoders.
            num_running: number of sequences that hold a row in decoders.
        """
        if num_waiting > _WAITING_TO_HALVE * num_running:
            self.limit = max(1, self.limit // 2)
        elif num_waiting <= _WAITING_TO_DOUBLE * num_running and self.num_running >= self.limit:
            self.limit = min(self.most, 2 * self.limit)
        self.wake()

    def wake(self) -> None:
        """Gives the free turns to batches in turn."""
        num_skipped = 0
        while self.num_running < self.limit and num_skipped < len(self._waiting):
            batch = self._waiting.popleft()
            if batch.begin():
                self.num_running += 1
                num_skipped = 0
            elif batch.num_waiting:  # It runs as many lines as it may.
                num_skipped += 1
            if batch.num_waiting:
                self._waiting.append(batch)


class BatchTurns:
    """Turns of the lines of one batch, which are taken in the order in which they were asked for.

    Args:
        turns: turns of all batches.

    Attributes:
        limit: number of lines of the batch that may run at the moment.
        num_running: number of lines of the batch that run.
    """

    def __init__(self, turns: LineTurns) -> None:
        self._turns = turns
        self.limit = turns.most
        self.num_running = 0
        self._lines: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of lines that wait for a turn, including cancelled ones."""
        return len(self._lines)

    async def take(self) -> None:
        """Waits for a turn. The caller ends it with `release`."""
        line: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.append(line)
        self._turns.wait(self)
        try:
            return await line
        except asyncio.CancelledError:
            if line.done() and not line.cancelled():
                self.release()  # The turn came at the same moment.
            raise

    def begin(self) -> bool:
        """Gives a turn to the line that has waited longest. Returns whether there is such a line,
        and the batch may run it.
        """
        while self._lines and self.num_running < self.limit:
            line = self._lines.popleft()
            if not line.done():
                self.num_running += 1
                line.set_result(None)
                return True
        return False

    def note_refusal(self) -> None:
        """Halves the number of lines that may run, because a line was refused."""
        self.limit = max(1, min(self.limit, self.num_running) // 2)

    def note_result(self) -> None:
        """Raises the number of lines that may run by one, because a line has a result."""
        self.limit = min(self._turns.most, self.limit + 1)

    def release(self) -> None:
        """Ends a turn."""
        self.num_running -= 1
        self._turns.release()


class LineTurn:
    """The turn of a line, which it may take again after a release.

    Args:
        batch: turns of the line's batch.
    """

    def __init__(self, batch: BatchTurns) -> None:
        self._batch = batch
        self._is_taken = False

    async def take(self) -> None:
        """Waits for a turn."""
        await self._batch.take()
        self._is_taken = True

    def release(self) -> None:
        """Ends the turn. Does nothing if the line has none."""
        if self._is_taken:
            self._is_taken = False
            self._batch.release()
