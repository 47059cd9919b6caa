"""Child processes that are modules: how they start, what they inherit, how they end.

A child is spawned, not forked. It inherits descriptors, whose numbers are its arguments, and reads
its settings from standard input. Signals are its parent's to handle, so that running work can end
first.
"""

import asyncio
import signal
import sys
from contextlib import suppress

RETRY_S = 1.0  # behind a start that the machine had no memory, processes or descriptors for


async def start(module: str, settings: bytes, *descriptors: int) -> asyncio.subprocess.Process:
    """Runs `python -m module`, which calls `begin`.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *map(str, descriptors),
        stdin=asyncio.subprocess.PIPE, pass_fds=descriptors,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(settings)
    process.stdin.close()
    return process


def begin() -> tuple[bytes, list[int]]:
    """Called first in a child: its settings, and the numbers among its arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return sys.stdin.buffer.read(), list(map(int, sys.argv[1:]))


async def end(process: asyncio.subprocess.Process | None, grace_s: float = 0.0) -> None:
    """Waits for the end of a process, if there is one; kills it when the grace is over."""
    if process is None:
        return
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
