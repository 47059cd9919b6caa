"""Work that is done once, however many callers want its result.

The encoder's encodes and the decoder's fetches are such work. The caller keeps the table of keys; a
failure reaches every waiter.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class InFlight(Generic[Result]):
    """Work in progress and its waiters. The last waiter to leave cancels it.

    Args:
        work: runs in a task of its own, with the context of the caller that starts it.
        on_abandoned: called when the last waiter has left, before the task is cancelled.
        on_end: called when the task has ended, also when it never ran.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Result],
        *,
        on_end: Callable[["asyncio.Task[Result]"], None],
        on_abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(self._end)
        self.task.add_done_callback(on_end)
        self.num_waiters = 0
        self._on_abandoned = on_abandoned

    def join(self) -> "asyncio.Future[Result]":
        """The work's result. Cancelling the future leaves the work to its other waiters."""
        self.num_waiters += 1
        joined = asyncio.shield(self.task)
        joined.add_done_callback(self._leave)
        return joined

    def _end(self, task: "asyncio.Task[Result]") -> None:
        retrieve_exception(task)
        del self._on_abandoned  # which may refer to this

    def _leave(self, joined: "asyncio.Future[Result]") -> None:
        retrieve_exception(joined)
        self.num_waiters -= 1
        if self.num_waiters == 0 and not self.task.done():
            self._on_abandoned()
            self.task.cancel()


def retrieve_exception(done: "asyncio.Future[Result]") -> None:
    """Keeps asyncio from reporting an exception that no waiter is left to take."""
    if not done.cancelled():
        done.exception()
