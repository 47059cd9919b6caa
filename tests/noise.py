"""A bound on time, tested on a machine that does other things too.

The noise of a machine only ever adds time, so the least of several rounds is what the code needs:
a bound fails when no round keeps it. What must merely happen some time waits `PATIENCE_S`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0
_ROUNDS = 8


def least(measure: Callable[[], float], bound_s: float) -> float:
    """The least of up to eight measures in seconds; ends with the first within `bound_s`."""
    found = measure()
    for _ in range(_ROUNDS - 1):
        if found <= bound_s:
            break
        found = min(found, measure())
    return found


async def async_least(measure: Callable[[], Awaitable[float]], bound_s: float) -> float:
    """`least` of an asynchronous measure."""
    found = await measure()
    for _ in range(_ROUNDS - 1):
        if found <= bound_s:
            break
        found = min(found, await measure())
    return found


async def turns(count: int = 20) -> None:
    """Lets the event loop run what it can run now, and what follows from that without waiting."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Lets the event loop run until `condition` holds; a TimeoutError if it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions lie in things without an event
            await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns when `condition` holds; fails, and says `what` has not happened, if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not yet: {what}"
        time.sleep(0.005)


async def timed(call: Awaitable[object]) -> float:
    """Seconds until `call` is done."""
    start = time.monotonic()
    await call
    return time.monotonic() - start
