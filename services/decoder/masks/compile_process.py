"""Starts and ends the process that compiles grammars, and connects the front to its lanes."""

import asyncio
import socket

import msgspec

from services.common.process import children
from services.common.process.channel import FrontChannel, create_socket_pair
from services.decoder.masks.messages import LANES, MaskSettings, Verdict

_WORKER = "services.decoder.masks.compile_worker"


class CompileProcess:
    """Owner of the compile process, which runs `compile_worker`.

    Args:
        settings: settings of the process.

    Attributes:
        launcher: starts the process.
        process: the running process. None before the first start.
    """

    def __init__(self, settings: MaskSettings, launcher: children.Launcher) -> None:
        self._settings = msgspec.json.encode(settings)
        self.launcher = launcher
        self.process: asyncio.subprocess.Process | None = None

    @property
    def has_ended(self) -> bool:
        """Returns whether the process that was started last has ended."""
        return self.process is None or self.process.returncode is not None

    async def start(self) -> list[FrontChannel[Verdict]]:
        """Ends the previous process and starts a new process. Returns a channel to each lane.

        Raises:
            OSError: the machine has no memory, processes or descriptors left.
        """
        await self.close()
        front_ends: list[socket.socket] = []
        ends: list[socket.socket] = []
        try:
            for _ in LANES:
                front_end, end = create_socket_pair()
                front_ends.append(front_end)
                ends.append(end)
            self.process = await self.launcher.start(
                _WORKER, self._settings, *(end.fileno() for end in ends)
            )
            return [await FrontChannel[Verdict].open(end, Verdict) for end in front_ends]
        except BaseException:
            for front_end in front_ends:
                front_end.close()
            raise
        finally:
            for end in ends:
                end.close()

    async def close(self) -> None:
        """Ends the process, if it is running."""
        await children.end(self.process)
