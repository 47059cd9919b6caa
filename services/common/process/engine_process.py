"""Starting and stopping an engine process.

A GPU service is two processes: the front (asyncio, gRPC) and the engine, which owns the device. The
engine is one of the front's `children`: it inherits its end of the channel, the arena and ends of
links to other processes. `service_process` starts it, an `engine_main` calls `accept` and `leave`.
Its exit status is 0 after the front has closed the channel, `REFUSED` when it refuses settings or
checkpoint, 1 after any other failure.
"""

import asyncio
import logging
import mmap
import os
import signal
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from services.common.embeddings.arena import Arena
from services.common.process import children
from services.common.process.channel import FrontChannel, create_socket_pair

REFUSED = 2  # exit status
_END_S = 5.0  # that an engine may take to end


@dataclass(slots=True)
class EngineProcess:
    """The engine process, as its front sees it.

    Attributes:
        links: ends of socket pairs whose others the engine has.
    """

    process: asyncio.subprocess.Process
    channel: FrontChannel[Any]
    links: list[socket.socket]

    @classmethod
    async def start(
        cls,
        module: str,
        settings_json: str,
        arena: Arena,
        incoming: Any,  # noqa: ANN401 - a type form
        num_links: int = 0,
    ) -> "EngineProcess":
        """Starts `python -m module` with its end of a channel, the arena and ends of links."""
        front_end, engine_end = create_socket_pair()
        links = [create_socket_pair() for _ in range(num_links)]
        with ExitStack() as closing:
            closing.enter_context(engine_end)
            ends = [closing.enter_context(end).fileno() for _, end in links]
            process = await children.start(
                module, settings_json.encode(), engine_end.fileno(), arena.fd, *ends
            )
        channel = await FrontChannel[Any].open(front_end, incoming)
        return cls(process, channel, [link for link, _ in links])

    async def ended(self) -> str:
        """How it did, after its channel closed; `status None`: it takes long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        code = self.process.returncode
        return f"status {code}" if code is None or code >= 0 else signal.Signals(-code).name

    async def stop(self) -> None:
        """Closes channel and links, which ends the engine's loop; kills it if that takes long."""
        self.channel.close()
        for link in self.links:
            link.close()
        await children.end(self.process, _END_S)


@dataclass(slots=True)
class EngineEnd:
    """What an engine process inherits from its front."""

    settings_json: str
    end: socket.socket
    arena: mmap.mmap
    arena_fd: int
    links: list[socket.socket]


def accept() -> EngineEnd:
    """Called first in an engine process: its settings, channel end and arena."""
    settings, (channel, arena, *links) = children.begin()
    return EngineEnd(
        settings_json=settings.decode(),
        end=socket.socket(fileno=channel),
        arena=mmap.mmap(arena, 0),
        arena_fd=arena,
        links=[socket.socket(fileno=link) for link in links],
    )


def leave(status: int) -> NoReturn:
    """Called last in an engine process: ends it without the interpreter's finalizers, which take
    half a second of CPU time, in which the front, whose channel is closed, waits for the status.
    Threads may still work, and ranks would wait for each other.
    """
    logging.shutdown()
    os._exit(status)
