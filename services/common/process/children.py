"""Child processes that are modules: their start, the descriptors they inherit, and their end.

A child is spawned, not forked. A child inherits descriptors, whose numbers are the arguments,
and reads the settings from standard input. It ignores SIGINT and SIGTERM: its parent handles them
and ends the child when running work is done.
"""

import asyncio
import signal
import sys
from contextlib import suppress


class Launcher:
    """Starts children that have a successor whenever they end.

    Attributes:
        retry_s: pause in seconds after a start that failed.
    """

    retry_s = 1.0

    async def start(
        self, module: str, settings: bytes, *descriptors: int
    ) -> asyncio.subprocess.Process:
        """Runs a module, see `start`."""
        return await start(module, settings, *descriptors)


async def start(module: str, settings: bytes, *descriptors: int) -> asyncio.subprocess.Process:
    """Runs `python -m module`, which calls `begin`.

    Args:
        settings: bytes that the child reads from standard input.
        descriptors: file descriptors that the child inherits under the same numbers.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *map(str, descriptors),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=descriptors,
    )
    assert process.stdin is not None
    process.stdin.write(settings)
    process.stdin.close()
    return process


def begin() -> tuple[bytes, list[int]]:
    """Returns a child's settings and the numbers of its descriptors. A child calls it first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return sys.stdin.buffer.read(), list(map(int, sys.argv[1:]))


async def end(process: asyncio.subprocess.Process | None, grace_s: float = 0.0) -> None:
    """Waits for the end of a process and kills it when the grace period is over.

    Args:
        process: the process. Nothing is done if it is None.
        grace_s: seconds that the process may take.
    """
    if process is None:
        return
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
