"""A task that is run once although several callers want its result ("single flight").

The lookups of `EmbeddingStore` and the probes of videos are such tasks. The caller keeps the table
from keys to tasks.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedTask(Generic[Result]):
    """A task and its waiters. It is cancelled when the last waiter has left; its failure reaches
    every waiter.

    Args:
        work: coroutine to run, in the context of the caller that creates the shared task.

    Attributes:
        task: the task that runs the coroutine.
        num_waiters: number of callers that wait for the result.
    """

    def __init__(self, work: Coroutine[Any, Any, Result]) -> None:
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(retrieve_exception)
        self.num_waiters = 0
        self._is_abandoned = False

    @property
    def is_abandoned(self) -> bool:
        """Returns whether the task was cancelled before it ended, for instance because its last
        waiter left. A new caller needs a new task.
        """
        return self._is_abandoned

    def cancel(self) -> None:
        """Cancels the task once, although callers may wait for it."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self.task.cancel()

    async def ended(self) -> None:
        """Waits until the task has ended, in whatever way. A cancelled caller still waits, because
        the task uses memory that the caller is about to use.
        """
        is_cancelled = False
        while not self.task.done():
            try:
                await asyncio.wait((self.task,))
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError

    def join(self) -> "asyncio.Future[Result]":
        """Returns a future of the result for one more waiter. If the waiter cancels the future, the
        task goes on for the other waiters.
        """
        self.num_waiters += 1
        joined = asyncio.shield(self.task)
        joined.add_done_callback(self._leave)
        return joined

    def _leave(self, joined: "asyncio.Future[Result]") -> None:
        retrieve_exception(joined)
        self.num_waiters -= 1
        if self.num_waiters == 0 and not self.task.done():
            self.cancel()


def retrieve_exception(done: "asyncio.Future[Result]") -> None:
    """Retrieves a future's exception, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()
