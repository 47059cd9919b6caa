"""The front's side of the processes that fill token masks.

The front's interpreter streams every token of every sequence, so masks that are filled in it wait
for it, and it for them. `DecoderFront` uses the processes through the same methods as
`token_masks.SequenceMasks`, which does the work in each of them.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from services.common.channel import ChannelClosed, FrontChannel, create_socket_pair
from services.common.errors import TriptychError, from_code
from services.common.pod_limits import num_cpus
from services.decoder.embeddings import EngineSender
from services.decoder.grammar import Demands
from services.decoder.mask_messages import (
    CannotFollow,
    Follow,
    Forget,
    FromProcess,
    MaskSettings,
    MaskTimes,
)
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

# Each process has the vocabulary, 150 MB. With fewer cores, the front fills the masks.
_LEAST_CORES = 8
_CORES_PER_PROCESS = 2
_MAX_PROCESSES = 8
_EXIT_S = 5.0

Failed = Callable[[int, TriptychError], None]


def num_mask_processes() -> int:
    """As many as this pod has cores for; 0: none."""
    cores = num_cpus()
    return 0 if cores < _LEAST_CORES else min(_MAX_PROCESSES, cores // _CORES_PER_PROCESS)


@dataclass(slots=True, eq=False)
class _Process:
    process: asyncio.subprocess.Process
    channel: FrontChannel[FromProcess]
    sequences: set[int] = field(default_factory=set[int])


class MaskProcesses:
    """Owner of the processes; each sequence is one's. Made by `start`."""

    def __init__(
        self, processes: list[_Process], engine: EngineSender, metrics: DecoderMetrics
    ) -> None:
        self._failed: Failed = lambda _number, _error: None
        self._processes = processes
        self._engine = engine
        self._metrics = metrics
        self._of: dict[int, _Process] = {}

    @classmethod
    async def start(
        cls,
        links: list[socket.socket],
        settings: MaskSettings,
        engine: EngineSender,
        metrics: DecoderMetrics,
    ) -> "MaskProcesses":
        """Starts a process for each link, which is closed here, with settings of its own."""
        processes: list[_Process] = []
        for number, link in enumerate(links):
            own = msgspec.structs.replace(settings, link=number)
            processes.append(await _start(link, own))
        return cls(processes, engine, metrics)

    def for_front(self, failed: Failed) -> "MaskProcesses":
        """This, which calls `failed` with a sequence's number when it cannot go on."""
        self._failed = failed
        return self

    def add(self, number: int, demands: Demands, generated: list[int]) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows."""
        process = min(self._processes, key=lambda process: len(process.sequences))
        process.sequences.add(number)
        self._of[number] = process
        process.channel.send(Follow(number, demands, generated))

    def tokens_arrived(self, tokens: Iterable[tuple[int, list[int]]]) -> None:
        """The engine has sent them to the processes already."""

    def rows_opened(self) -> None:
        """The engine says so to the processes."""

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        if (process := self._of.pop(number, None)) is not None:
            process.sequences.discard(number)
            process.channel.send(Forget(number))

    async def run(self) -> None:
        """Handles the processes' messages.

        Raises:
            ChannelClosed: one of them has ended.
        """
        tasks = [asyncio.create_task(self._receive(process)) for process in self._processes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.channel.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.process.wait(), _EXIT_S)
            except TimeoutError:
                process.process.kill()
                await process.process.wait()

    async def _receive(self, process: _Process) -> None:
        while True:
            try:
                message = await process.channel.receive()
            except ChannelClosed:
                log.critical("a process that fills token masks has ended; its own log says why")
                raise
            match message:
                case CannotFollow():
                    if message.sequence_id in self._of:
                        error = from_code(message.code, message.message)
                        self._failed(message.sequence_id, error)
                case MaskTimes():
                    for seconds in message.masks:
                        self._metrics.token_mask.observe(seconds)
                    for seconds in message.compilations:
                        self._metrics.grammar_compile.observe(seconds)
                case _:
                    self._engine.send(message)


async def _start(link: socket.socket, settings: MaskSettings) -> _Process:
    front_end, end = create_socket_pair()
    with link, end:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.decoder.masks_main",
            "--front-fd", str(end.fileno()), "--link-fd", str(link.fileno()),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(end.fileno(), link.fileno()),
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings))
    process.stdin.close()
    return _Process(process, await FrontChannel[FromProcess].open(front_end, FromProcess))


__all__ = ["MaskProcesses", "num_mask_processes"]
