"""A process that reads clients' files, and the memory that it shares with the engine.

The process is a fork of the fork server. It works on one task at a time, and writes pixels into the
shared memory, so that they are not copied. A hostile file can only end the process that reads it.
"""

import mmap
import os
import signal
import socket
import struct
from multiprocessing.connection import Connection

import numpy as np

from services.encoder.decoding.fork_server import ForkServer

_MAX_IDLE_BYTES = 48 << 20  # of shared memory that an idle process may occupy
_MAX_ANSWER_BYTES = 16 << 20  # of a message; the facts of 250,000 frames have 4 MB
_STALL = struct.pack("@ll", 30, 0)  # 30 s in which no byte of a message could be sent or received
_LATE = "no answer in time"
# Seconds of wall time for each second of CPU time that an answer may take, as the machine may be
# busy with other processes.
_WALL_FACTOR = 6


class ChildLost(Exception):
    """The process has ended, or did not answer in time and was killed. The text says how the
    process ended: the name of a signal, an exit status, or a timeout.
    """

    @property
    def is_killed(self) -> bool:
        """True if another process, or the kernel for lack of memory, has killed the process."""
        return str(self) == signal.SIGKILL.name

    @property
    def is_caused_by_work(self) -> bool:
        """True if the task that the process worked on has ended it. False if another cause is
        possible: the kernel kills these processes first when the pod is short of memory, whichever
        process uses it, and a busy machine may delay an answer.
        """
        return not self.is_killed and str(self) != _LATE


class Child:
    """A process, which ends at most once. One thread at a time may use it.

    Args:
        server: the fork server that forks the process.
        size_bytes: size of the shared memory.

    Attributes:
        pid: process id.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
        InternalError: the fork server does not become ready.
    """

    def __init__(self, server: ForkServer, size_bytes: int) -> None:
        self._server = server
        self._used_bytes = 0
        self._is_open = True
        self._fd = os.memfd_create("triptych-decode", os.MFD_CLOEXEC)
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    mine.setsockopt(socket.SOL_SOCKET, timeout, _STALL)
                os.ftruncate(self._fd, size_bytes)
                self._memory = mmap.mmap(self._fd, size_bytes)
                self.pid = server.fork(theirs.fileno(), self._fd)
        except BaseException:
            mine.close()
            os.close(self._fd)
            raise
        self._channel = Connection(mine.detach())

    @property
    def has_ended(self) -> bool:
        """True if the idle process can work on no further task, because it has ended."""
        return self._channel.poll()  # an idle process sends nothing, so this is the end of the file

    def ask(self, *parts: bytes, cpu_s: float) -> bytes:
        """Sends a task and waits for the answer.

        Args:
            parts: messages of the task.
            cpu_s: CPU time in seconds that the answer may take.

        Raises:
            ChildLost: there is no answer, and the process has ended.
        """
        try:
            for part in parts:
                self._channel.send_bytes(part)
            if self._channel.poll(cpu_s * _WALL_FACTOR):
                return self._channel.recv_bytes(_MAX_ANSWER_BYTES)
        except (OSError, EOFError):
            self._release()
            status = self._server.reap(self.pid)
            raise ChildLost(
                signal.Signals(-status).name if status < 0 else f"status {status}"
            ) from None
        self.close()
        raise ChildLost(_LATE)

    def pixels(self, *shape: int) -> np.ndarray:
        """Returns the uint8 pixels that the process has written, valid until its next task.

        Args:
            shape: sizes of the pixels' array, which begins at the start of the shared memory.
        """
        self._used_bytes = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, self._used_bytes).reshape(shape)

    def trim(self) -> None:
        """Frees the pages of the shared memory if the last pixels were many. Unlike `madvise`,
        `ftruncate` releases the interpreter lock.
        """
        if self._is_open and self._used_bytes > _MAX_IDLE_BYTES:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, len(self._memory))

    def close(self) -> None:
        """Kills the process, if it still runs, and frees the shared memory."""
        if self._is_open:
            self._release()
            self._server.kill(self.pid)

    def _release(self) -> None:
        self._is_open = False
        self._channel.close()
        os.close(self._fd)
