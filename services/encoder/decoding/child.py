"""Child processes that decode the files of clients. A hostile file can only end its own decoder.

A child runs a module that calls `serve`. Its parent sends one question at a time over a socket.
Both map the same memory, into which the child writes the pixels, so that they are not copied.
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

_MAX_IDLE_BYTES = 48 << 20  # of shared memory that an idle child may occupy
_START_S = 30.0
_STOP_S = 2.0
_STALL = struct.pack("@ll", 30, 0)  # 30 s in which no byte of a message could be sent or received
_KILLED = signal.SIGKILL.name
_LATE = "no answer in time"
# Seconds of wall time for each second of CPU time that an answer may take, as the machine may be
# busy with other processes.
_WALL_FACTOR = 6


class ChildLost(Exception):
    """The child has ended or did not answer in time, and a new process has been started in its
    place. The text says how the child ended: the name of a signal, an exit status, or a timeout.
    """

    @property
    def is_caused_by_work(self) -> bool:
        """True if the question that the child worked on has ended it. False if another cause is
        possible: the kernel kills children when the pod is short of memory, whoever uses it, and a
        busy machine may delay an answer.
        """
        return str(self) not in (_KILLED, _LATE)


def not_started(error: OSError) -> Overloaded:
    """Logs that a child cannot be started. Returns the error for the client: another encoder can
    start one, or this encoder can later.
    """
    log.error("a worker that decodes files could not be started: %s", error)
    return Overloaded("the encoder cannot start a worker now", retry_after_s=1)


class Child:
    """A child process and the memory that it shares with this process. One thread at a time may use
    it.

    Args:
        module: name of the child's module.
        size_bytes: size of the shared memory.
        executable: the Python interpreter that runs the child.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """

    def __init__(self, module: str, size_bytes: int, executable: str = sys.executable) -> None:
        self._module = module
        self._executable = executable
        self._fd = os.memfd_create("triptych-decode", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size_bytes)
        self._memory = mmap.mmap(self._fd, size_bytes)
        self._used_bytes = 0
        try:
            self._start()
        except BaseException:  # for example, because the pod may start no more processes
            os.close(self._fd)
            raise

    @property
    def pid(self) -> int:
        """Process id of the child, or of the process that has replaced it."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """True if the process has reported that it is ready for questions."""
        return self._ready

    def ask(self, *parts: bytes, cpu_s: float) -> bytes:
        """Asks the child a question and waits for the answer.

        If the child is killed, the new process is asked the same question once. When the pod is
        short of memory, the kernel kills children first (`prefer_oom_kill`), whichever process uses
        the memory. The child's own limits end it by other signals.

        Args:
            parts: messages of the question.
            cpu_s: CPU time in seconds that the answer may take.

        Raises:
            ChildLost: there is no answer, and the child's state is lost.
            InternalError: the process that replaces the child does not become ready.
            Overloaded: the machine has no memory, processes or descriptors for a new process.
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
        """Returns the uint8 pixels that the child has written, valid until the next question.

        Args:
            shape: sizes of the pixels' array, which begins at the start of the shared memory.
        """
        self._used_bytes = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, self._used_bytes).reshape(shape)

    def trim(self) -> None:
        """Frees the pages of the shared memory if the last pixels were many. Unlike `madvise`,
        `ftruncate` releases the interpreter lock.
        """
        if self._used_bytes > _MAX_IDLE_BYTES:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, len(self._memory))

    def close(self) -> None:
        """Ends the process, which exits when its socket is closed, and frees the shared memory."""
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
                log.error("a worker that decodes files did not start: %s", how)
                if how != _KILLED or num_tries == 2:
                    raise InternalError("the encoder cannot start a worker") from None

    def _receive(self, timeout_s: float) -> bytes:
        if not self._channel.poll(timeout_s):
            raise TimeoutError
        return self._channel.recv_bytes()

    def _start(self) -> None:
        """Starts the process. It becomes ready some time later."""
        mine, theirs = socket.socketpair()
        arguments = map(str, (theirs.fileno(), self._fd, len(self._memory)))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [self._executable, "-m", self._module, *arguments],
                    pass_fds=(theirs.fileno(), self._fd),
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                mine.close()
                raise
        for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            mine.setsockopt(socket.SOL_SOCKET, timeout, _STALL)
        self._channel, self._ready = Connection(mine.detach()), False

    def _restart(self) -> str:
        """Starts a new process in the place of the child. Returns how the child ended."""
        self._channel.close()
        try:
            # A process closes its socket just before it ends. A busy machine may delay the end.
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._start()
            return _LATE
        self._start()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


def serve(num_parts: int, answer: Callable[[list[bytes], np.ndarray], bytes]) -> None:
    """Answers questions until the parent closes the socket. It is the main function of a child.

    Args:
        num_parts: number of messages of each question.
        answer: function that computes an answer. Its arguments are the messages of the question and
            the shared memory as uint8.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front handles these signals
    channel, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    shared = np.frombuffer(mmap.mmap(memory, int(sys.argv[3])), np.uint8)
    prefer_oom_kill()
    with suppress(EOFError, ConnectionError):
        channel.send_bytes(b"")  # ready
        while True:
            question = [channel.recv_bytes() for _ in range(num_parts)]
            channel.send_bytes(answer(question, shared))
