"""Child processes that decode what strangers send: one that takes too long loses only itself.

A child is a module of its own, which calls `serve`. Its parent asks it one question at a time over
a socket; both map one memory, in which the child leaves pixels, so that they are not copied.
"""

import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from services.common.errors import InternalError, Overloaded
from services.common.process.work_limits import prefer_oom_kill

log = logging.getLogger(__name__)

_KEPT_BYTES = 48 << 20  # of the memory between two questions
_START_S, _STOP_S = 30.0, 2.0
_STALL = struct.pack("@ll", 30, 0)  # of a part that a child does not read, or not write on
_KILLED, _LATE = signal.SIGKILL.name, "no answer in time"
_WALL_FACTOR = 6  # of the CPU time: for a machine that does other things, too


class ChildLost(Exception):
    """The child has ended, or takes too long; another one has been started."""

    @property
    def is_of_its_work(self) -> bool:
        """Whether the child's work has ended it. The kernel kills a child under memory pressure,
        whatever caused that, and a machine may be too busy for an answer in time.
        """
        return str(self) not in (_KILLED, _LATE)


def not_started(error: OSError) -> Overloaded:
    """A child could not be started: another encoder may, or this one later."""
    log.error("a decoder was not started: %s", error)
    return Overloaded("no process can be started here now", retry_after_s=1)


class Child:
    """One process and the memory that it shares; both for one thread at a time. Making one raises
    OSError if the machine has no memory, processes or descriptors left.
    """

    def __init__(self, module: str, size_bytes: int) -> None:
        self._module = module
        self._fd = os.memfd_create("triptych-decode", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size_bytes)
        self._memory = mmap.mmap(self._fd, size_bytes)
        self._used_bytes = 0
        try:
            self._start()
        except BaseException:  # as where the pod may have no more processes
            os.close(self._fd)
            raise

    def ask(self, *parts: bytes, cpu_s: float) -> bytes:
        """The child's answer to a question of some parts, within that CPU time. Of a child that is
        killed the question is asked once more: under memory pressure the kernel kills it first
        (`prefer_oom_kill`), whatever caused that, and its own limits end it by other signals.

        Raises:
            ChildLost: there is none, and what the child knew is lost.
            InternalError: a child does not start.
            Overloaded: the machine has no memory, processes or descriptors for one.
        """
        try:
            try:
                return self._ask(parts, cpu_s)
            except ChildLost as lost:
                if str(lost) != _KILLED:
                    raise
                return self._ask(parts, cpu_s)
        except OSError as error:
            raise not_started(error) from None

    def _ask(self, parts: tuple[bytes, ...], cpu_s: float) -> bytes:
        if self._process.poll() is not None:  # ended while it was idle
            self._restart()
        self._wait_until_ready()
        try:
            for part in parts:
                self._channel.send_bytes(part)
            return self._receive(cpu_s * _WALL_FACTOR)
        except (OSError, EOFError):
            raise ChildLost(self._restart()) from None

    def pixels(self, *shape: int) -> np.ndarray:
        """What the child has left in the memory, uint8; until the next question."""
        self._used_bytes = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, self._used_bytes).reshape(shape)

    def trim(self) -> None:
        """Gives back the pages of a large image; without the interpreter lock, unlike `madvise`."""
        if self._used_bytes > _KEPT_BYTES:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, len(self._memory))

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    def _wait_until_ready(self) -> None:
        num_tries = 0
        while not self._ready:
            try:
                self._receive(_START_S)
                self._ready = True
            except (OSError, EOFError):
                how, num_tries = self._restart(), num_tries + 1
                log.error("a decoder did not start: %s", how)
                if how != _KILLED or num_tries == 2:
                    raise InternalError("a decoder cannot be started") from None

    def _receive(self, timeout_s: float) -> bytes:
        if not self._channel.poll(timeout_s):
            raise TimeoutError
        return self._channel.recv_bytes()

    def _start(self) -> None:
        """Starts the process, which is ready some time later."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module,
                     str(theirs.fileno()), str(self._fd), str(len(self._memory))],
                    pass_fds=(theirs.fileno(), self._fd), stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except BaseException:
                mine.close()
                raise
        for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            mine.setsockopt(socket.SOL_SOCKET, timeout, _STALL)
        self._channel, self._ready = Connection(mine.detach()), False

    def _restart(self) -> str:
        """Replaces the process; says how the old one ended."""
        self._channel.close()
        try:
            status = self._process.wait(0.1)  # its end of the socket closes a little earlier
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._start()
            return _LATE
        self._start()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


def serve(num_parts: int, answer: Callable[[list[bytes], np.ndarray], bytes]) -> None:
    """The child's main function: answers until its parent closes the socket.

    Args:
        answer: from a question's parts and the shared memory, uint8, to the answer.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front handles them
    channel, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    shared = np.frombuffer(mmap.mmap(memory, int(sys.argv[3])), np.uint8)
    prefer_oom_kill()
    with suppress(EOFError, ConnectionError):
        channel.send_bytes(b"")  # ready
        while True:
            question = [channel.recv_bytes() for _ in range(num_parts)]
            channel.send_bytes(answer(question, shared))
