"""Child processes of the front that compile grammars or fill masks: how they start and end."""

import argparse
import asyncio
import signal
import sys
from contextlib import suppress

import msgspec

from services.common.telemetry import setup_logging
from services.decoder.masks.messages import MaskSettings

RETRY_S = 1.0  # behind a start that the machine had no memory, processes or descriptors for


async def start(
    module: str, settings: MaskSettings, **descriptors: int
) -> asyncio.subprocess.Process:
    """Runs a module of this folder.

    Args:
        settings: JSON on its standard input.
        **descriptors: that it inherits, as `--<name>-fd`.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """
    options = [f"--{name}-fd={number}" for name, number in descriptors.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.decoder.masks.{module}", *options,
        stdin=asyncio.subprocess.PIPE, pass_fds=tuple(descriptors.values()),
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings))
    process.stdin.close()
    return process


def begin(log_name: str, *names: str) -> tuple[MaskSettings, list[int]]:
    """In a process that `start` runs: its settings, and the descriptors of these names. Signals are
    the front's to handle, which lets running work end first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    given = vars(parser.parse_args())
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=MaskSettings)
    setup_logging(log_name, settings.log_level)
    return settings, [given[f"{name}_fd"] for name in names]


async def end(process: asyncio.subprocess.Process | None, grace_s: float = 0.0) -> None:
    """Waits for the end of a process, if there is one; kills it when the grace is over."""
    if process is None:
        return
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
