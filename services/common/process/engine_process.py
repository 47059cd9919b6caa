"""Starts and stops an engine process, and is the engine's side of that start.

A GPU service is two processes: the front (asyncio, gRPC) and the engine, which owns the device. The
engine is one of the front's `children`. It inherits its end of the channel, the arena and its ends
of links to other processes. `service_process` starts it; an `engine_main` calls `accept` first and
`leave` last. The engine's exit status is

- 0 after the front has closed the channel,
- `REFUSED` if the engine refuses the settings or the checkpoint,
- 1 after any other failure.
"""

import asyncio
import logging
import mmap
import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from services.common.embeddings.arena import Arena
from services.common.process import children
from services.common.process.channel import FrontChannel, create_socket_pair

REFUSED = 2  # exit status
_END_S = 5.0  # longest time that an engine may take to end


@dataclass(slots=True)
class EngineProcess:
    """The engine process, seen from its front.

    Attributes:
        links: the front's ends of socket pairs whose other ends the engine has.
        computed_at: time at which the engine was last seen to use a CPU, by `time.monotonic()`.
            `EngineWatch` sets it.
    """

    process: asyncio.subprocess.Process
    channel: FrontChannel[Any]
    links: list[socket.socket]
    computed_at: float = field(default_factory=time.monotonic)

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last sent a message or was seen to compute."""
        return time.monotonic() - max(self.computed_at, self.channel.received_at)

    @classmethod
    async def start(
        cls,
        module: str,
        settings_json: str,
        arena: Arena,
        incoming: Any,  # noqa: ANN401 - a type form
        num_links: int = 0,
    ) -> "EngineProcess":
        """Starts `python -m module`, which inherits one end of a channel, the arena and the links.

        Args:
            incoming: union of the message structs that the engine may send.
            num_links: number of socket pairs to create as `links`.

        Raises:
            OSError: the machine has no memory, processes or descriptors left.
        """
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

    async def exit_status(self) -> str:
        """Waits for the process after its channel has closed, and returns how it ended.

        Returns:
            `status N`, or the name of the signal that killed it. `status None` if the process still
            runs after 5 s.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        code = self.process.returncode
        return f"status {code}" if code is None or code >= 0 else signal.Signals(-code).name

    async def stop(self) -> None:
        """Closes the channel and the links, which ends the engine's loop. Kills the process if it
        still runs after 5 s.
        """
        self.channel.close()
        for link in self.links:
            link.close()
        await children.end(self.process, _END_S)


@dataclass(slots=True)
class EngineEnd:
    """The settings, sockets and memory that an engine process inherits from its front.

    Attributes:
        settings_json: the service's settings.
        end: the engine's end of the channel.
        arena, arena_fd: mapping of the arena, and its descriptor.
        links: the engine's ends of the links.
    """

    settings_json: str
    end: socket.socket
    arena: mmap.mmap
    arena_fd: int
    links: list[socket.socket]


def accept() -> EngineEnd:
    """Takes over what the front has passed on. An engine process calls it first."""
    settings, (channel, arena, *links) = children.begin()
    return EngineEnd(
        settings_json=settings.decode(),
        end=socket.socket(fileno=channel),
        arena=mmap.mmap(arena, 0),
        arena_fd=arena,
        links=[socket.socket(fileno=link) for link in links],
    )


def leave(status: int) -> NoReturn:
    """Ends an engine process without the interpreter's finalizers. It is called last.

    The finalizers take half a second of CPU time, during which the front waits for the exit status.
    Running threads would delay the end further, and ranks would wait for each other.
    """
    logging.shutdown()
    os._exit(status)
