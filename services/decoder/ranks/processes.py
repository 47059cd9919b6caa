"""The processes of ranks 1, 2, ...: children of the engine process, which is rank 0.

They inherit the arena of images' embeddings and a socket, which carries steps there and signs of
life back, and shows either side that the other has ended. None goes on alone: when a rank ends or
hangs, the engine process ends, and when that ends, the kernel ends the ranks. So the front needs to
watch the engine process alone.
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

_MODULE = "services.decoder.ranks.main"
_LOOK_S = 0.5
_READ_BYTES = 1 << 10
_END_S = 3.0  # for ranks to end by themselves


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    cpu: CpuUse
    lived_at: float = field(default_factory=time.monotonic)


class RankProcesses:
    """Owner of the ranks' processes and of the thread that watches them.

    Args:
        count: of ranks, this process included.
        arena_fd: see `EngineEnd`.
        end: ends this process with a status, from the thread that watches.
    """

    def __init__(
        self, count: int, settings_json: str, arena_fd: int, end: Callable[[int], None] = os._exit
    ) -> None:
        self.store_fd = os.memfd_create("triptych-ranks", os.MFD_CLOEXEC)
        self._end = end
        self._stopping = False
        self._on_gpu: bool | None = None  # unknown until all are ready
        self._ranks: list[_Rank] = []
        for number in range(1, count):
            self._ranks.append(_start(number, count, settings_json, arena_fd, self.store_fd))
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def ready(self, *, on_gpu: bool) -> None:
        """From now on a rank whose loop hangs is noticed, too; one that is stopped was before."""
        for rank in self._ranks:
            rank.lived_at = time.monotonic()
        self._on_gpu = on_gpu

    def tell(self, record: bytes) -> None:
        """Sends a record to all ranks. One that has ended, or does not read, is the watch's."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.link.sendall(record)

    def stop(self) -> None:
        """Ends the ranks, once."""
        self._stopping = True
        for rank in self._ranks:
            with suppress(OSError):  # it has ended
                rank.link.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._watching.join()
        for rank in self._ranks:
            rank.link.close()
        os.close(self.store_fd)

    def _watch(self) -> None:
        links = [rank.link for rank in self._ranks]
        while not self._stopping:
            looked_at = time.monotonic()
            readable = select.select(links, [], [], _LOOK_S)[0]
            if self._stopping:
                return
            now = time.monotonic()
            for rank in self._ranks:
                if rank.link in readable:
                    if not _is_alive(rank):
                        self._report_end(rank)
                        return
                    rank.lived_at = now
            if now - looked_at > 4 * _LOOK_S:  # this process stood still
                continue
            for rank in self._ranks:
                if self._is_silent(rank, now):
                    log.critical("rank %d has hung for %g s", rank.number, MAX_SILENCE_S)
                    self._end(1)
                    return

    def _report_end(self, rank: _Rank) -> None:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(_END_S)
        if self._stopping:
            return
        status = rank.process.returncode
        log.critical("rank %d has ended (status %s); its own log says why", rank.number, status)
        self._end(REFUSED if status == REFUSED else 1)

    def _is_silent(self, rank: _Rank, now: float) -> bool:
        if self._on_gpu is None:  # a start may take long, as long as the process runs
            if not is_stopped(rank.process.pid):
                rank.lived_at = now
        elif not self._on_gpu and rank.cpu.is_used():  # on a CPU a step may take minutes
            rank.lived_at = now
        return now - rank.lived_at > MAX_SILENCE_S


def _is_alive(rank: _Rank) -> bool:
    """Of one whose link is readable: it has said so, or has ended."""
    try:
        return bool(rank.link.recv(_READ_BYTES))
    except ConnectionError:
        return False


def _start(number: int, count: int, settings_json: str, *fds: int) -> _Rank:
    ours, theirs = create_socket_pair()
    with theirs:
        fds = *fds, theirs.fileno()
        arguments = map(str, (number, count, os.getpid(), *fds))
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *arguments], stdin=subprocess.PIPE, pass_fds=fds
        )
    assert process.stdin is not None
    process.stdin.write(settings_json.encode())
    process.stdin.close()
    return _Rank(number, process, ours, CpuUse(process.pid))
