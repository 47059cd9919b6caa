"""A task that is run once although several callers want its result ("single flight").

The encoder's encodes and the decoder's fetches are such tasks. The caller keeps the table from keys
to tasks.
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
        """Returns whether the last waiter left before the task ended, so that the task is being
        cancelled. A new caller needs a new task.
        """
        return self._is_abandoned

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
            self._is_abandoned = True
            self.task.cancel()


def retrieve_exception(done: "asyncio.Future[Result]") -> None:
    """Retrieves a future's exception, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()
