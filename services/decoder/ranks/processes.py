"""The processes of ranks 1, 2, ...: children of the engine process, which is rank 0.

Each process inherits the arena of image embeddings and a socket. The socket carries steps to the
rank and signs of life back, and shows either side that the other has ended. No rank goes on alone:
when a rank ends or hangs, the engine process ends, and when the engine process ends, the kernel
ends the ranks. So the front only has to watch the engine process.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from services.common.process.channel import create_socket_pair
from services.common.process.engine_process import REFUSED
from services.common.process.engine_watch import MAX_SILENCE_S, CpuUse, is_stopped

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of the watch over ranks, in seconds.

    Attributes:
        period: time between two looks at the ranks.
        max_silence: time without a sign of life after which a rank counts as hung.
        grace: time that ranks have to end by themselves.
    """

    period: float = 0.5
    max_silence: float = MAX_SILENCE_S
    grace: float = 3.0


@dataclass(slots=True)
class RankProcess:
    """A rank's process.

    Attributes:
        number: number of the rank, from 1.
        process: the child process.
        link: socket to the process.
        cpu: CPU time of the process.
        lived_at: `time.monotonic()` of the last sign of life.
    """

    number: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    cpu: CpuUse
    lived_at: float = field(default_factory=time.monotonic)


class RankProcesses:
    """Owner of the ranks' processes and of the thread that watches them.

    Args:
        count: number of ranks, this process included.
        settings_json: the decoder's settings, which each process reads.
        arena_fd: file descriptor of the arena, see `EngineEnd`.
        end: ends this process with an exit status; called by the watching thread.
        module: module that each process runs.
        times: times of the watch.

    Attributes:
        ranks: the processes, in order of their numbers.
        store_fd: memory file over which all ranks meet, see `joining.join`.
    """

    def __init__(
        self,
        count: int,
        settings_json: str,
        arena_fd: int,
        end: Callable[[int], None] = os._exit,
        module: str = "services.decoder.ranks.main",
        times: RankTimes | None = None,
    ) -> None:
        self.store_fd = os.memfd_create("triptych-ranks", os.MFD_CLOEXEC)
        self._end = end
        self._times = times or RankTimes()
        self._stopping = False
        self._on_gpu: bool | None = None  # None until all ranks are ready
        self.ranks: list[RankProcess] = []
        for number in range(1, count):
            arguments = (number, count, os.getpid(), arena_fd, self.store_fd)
            self.ranks.append(_start(module, settings_json, arguments))
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def ready(self, *, on_gpu: bool) -> None:
        """Begins to watch for ranks whose loop hangs; a stopped process is noticed before, too.

        Args:
            on_gpu: True if the ranks compute on GPUs. On a CPU a step may take minutes.
        """
        for rank in self.ranks:
            rank.lived_at = time.monotonic()
        self._on_gpu = on_gpu

    def send(self, record: bytes) -> None:
        """Sends a record to all ranks; the watch notices a rank that has ended or does not read."""
        for rank in self.ranks:
            with suppress(OSError):
                rank.link.sendall(record)

    def stop(self) -> None:
        """Ends the ranks; called once."""
        self._stopping = True
        for rank in self.ranks:
            with suppress(OSError):  # the rank has ended
                rank.link.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + self._times.grace
        for rank in self.ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._watching.join()
        for rank in self.ranks:
            rank.link.close()
        os.close(self.store_fd)

    def _watch(self) -> None:
        links = [rank.link for rank in self.ranks]
        period, max_silence = self._times.period, self._times.max_silence
        while not self._stopping:
            looked_at = time.monotonic()
            readable = select.select(links, [], [], period)[0]
            if self._stopping:
                return
            now = time.monotonic()
            for rank in self.ranks:
                if rank.link in readable:
                    if not _is_alive(rank):
                        self._report_end(rank)
                        return
                    rank.lived_at = now
            if now - looked_at > 4 * period:  # this process was stopped meanwhile
                continue
            for rank in self.ranks:
                if self._silence_s(rank, now) > max_silence:
                    log.critical("rank %d has hung for %g s", rank.number, max_silence)
                    self._end(1)
                    return

    def _report_end(self, rank: RankProcess) -> None:
        """Ends this process because a rank has ended."""
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(self._times.grace)
        if self._stopping:
            return
        status = rank.process.returncode
        log.critical("rank %d has ended (status %s); its own log says why", rank.number, status)
        self._end(REFUSED if status == REFUSED else 1)

    def _silence_s(self, rank: RankProcess, now: float) -> float:
        """Returns the seconds since a rank's last sign of life."""
        if self._on_gpu is None:  # a start may take long, as long as the process runs
            if not is_stopped(rank.process.pid):
                rank.lived_at = now
        elif not self._on_gpu and rank.cpu.is_used():  # on a CPU a step may take minutes
            rank.lived_at = now
        return now - rank.lived_at


def _is_alive(rank: RankProcess) -> bool:
    """Returns whether a rank whose link is readable has sent something, and has not ended."""
    try:
        return bool(rank.link.recv(_READ_BYTES))
    except ConnectionError:
        return False


def _start(module: str, settings_json: str, arguments: tuple[int, ...]) -> RankProcess:
    """Starts the process of a rank.

    Args:
        module: module that the process runs.
        settings_json: written to the standard input of the process.
        arguments: number of the rank, number of ranks, id of this process, then the file
            descriptors of the arena and of the store, which the process inherits.
    """
    ours, theirs = create_socket_pair()
    with theirs:
        arguments = *arguments, theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            pass_fds=arguments[3:],
        )
    assert process.stdin is not None
    process.stdin.write(settings_json.encode())
    process.stdin.close()
    return RankProcess(arguments[0], process, ours, CpuUse(process.pid))
