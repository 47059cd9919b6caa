"""A process that forks workers, and the client that asks it to.

The fork server imports a worker's libraries once. A fork is ready in some milliseconds and shares
the memory of the libraries, while a process that imports them itself takes 0.3 s of CPU time and
24 MB. The fork server never reads a client's file, so it lives as long as the engine. Client and
server share a socket of packets: each request has one reply. When the engine ends, the socket
closes, and the fork server ends. When the fork server ends, the kernel kills its forks.
"""

import errno
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from services.common.errors import InternalError
from services.common.process.parent_death import end_with_parent

log = logging.getLogger(__name__)

# A request to fork comes with the descriptors of the fork. Its reply is the pid of the fork, or the
# negative number of an error. The other requests have the pid of a fork. `_KILL` has no reply, so
# that nobody waits while the kernel frees the memory of a fork. `_REAP` asks for the exit status.
_FORK = 0
_KILL = 1
_REAP = 2
_REQUEST = struct.Struct("<ii")
_REPLY = struct.Struct("<i")
_READY = b"r"
_MAX_DESCRIPTORS = 2
_START_S = 30.0
_STOP_S = 2.0
_ENDING_S = 0.1  # a process closes its sockets just before it ends
_POLL_S = 0.001


class _ServerLost(Exception):
    """The fork server has ended, and all its forks with it."""


class ForkServer:
    """The client of a fork server. Several threads may use it.

    Args:
        module: name of the module that the server runs, which calls `run`.
        executable: the Python interpreter of the server.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """

    def __init__(self, module: str, executable: str = sys.executable) -> None:
        self._arguments = [executable, "-m", module]
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the fork server, or of the process that has replaced it."""
        return self._process.pid

    def fork(self, *descriptors: int) -> int:
        """Forks a worker, which inherits two descriptors at most. Returns its process id.

        Raises:
            OSError: the machine has no memory, processes or descriptors left.
            InternalError: the fork server ends before it is ready.
        """
        with self._lock:
            for _ in range(2):
                with suppress(_ServerLost):
                    self._wait_until_ready()
                    reply = self._ask(_FORK, 0, descriptors)
                    if reply < 0:
                        raise OSError(-reply, os.strerror(-reply))
                    return reply
                self._restart()
        raise InternalError("the encoder cannot start a worker")

    def kill(self, pid: int) -> None:
        """Kills a fork, and does not wait for its end."""
        with self._lock, suppress(OSError):  # without a server there are no forks
            self._socket.send(_REQUEST.pack(_KILL, pid))

    def reap(self, pid: int) -> int:
        """Waits for the end of a fork that has closed its descriptors, and kills the fork if it
        does not end soon.

        Returns:
            Exit status of the fork, or the negative number of the signal that has killed it.
        """
        with self._lock, suppress(_ServerLost):
            return self._ask(_REAP, pid)
        return -signal.SIGKILL  # the kernel has killed the fork together with its server

    def close(self) -> None:
        """Ends the fork server and all its forks."""
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, kind: int, pid: int, descriptors: Sequence[int] = ()) -> int:
        try:
            socket.send_fds(self._socket, [_REQUEST.pack(kind, pid)], descriptors)
            reply = self._socket.recv(_REPLY.size)
        except OSError:  # a server that hangs is as good as lost
            reply = b""
        if not reply:
            raise _ServerLost
        return _REPLY.unpack(reply)[0]

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        with suppress(OSError):
            self._is_ready = self._socket.recv(len(_READY)) == _READY
        if not self._is_ready:
            raise _ServerLost

    def _start(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*self._arguments, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                mine.close()
                raise
        mine.settimeout(_START_S)
        self._socket, self._is_ready = mine, False

    def _restart(self) -> None:
        self._socket.close()
        self._process.kill()
        status = self._process.wait()
        log.error("the process that forks workers has ended: status %d", status)
        self._start()


class ForkedWorker(Protocol):
    """The work of a fork."""

    def serve(self, *descriptors: int) -> None:
        """Works until the engine closes one of the descriptors."""
        ...


def run(worker: ForkedWorker) -> None:
    """Forks until the engine closes the socket. It is the main function of a fork server.

    Args:
        worker: the work of each fork.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front handles these signals
    killed: set[int] = set()
    with socket.socket(fileno=int(sys.argv[1])) as control, suppress(ConnectionError):
        control.send(_READY)
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, _MAX_DESCRIPTORS)
            if not request:
                return
            kind, pid = _REQUEST.unpack(request)
            if kind == _FORK:
                control.send(_REPLY.pack(_fork(worker, control, descriptors)))
            elif kind == _REAP:
                control.send(_REPLY.pack(_reap(pid)))
            elif _status_of(pid) is None:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            killed = {pid for pid in killed if _status_of(pid) is None}


def _fork(worker: ForkedWorker, control: socket.socket, descriptors: list[int]) -> int:
    """Returns the process id of the fork, or a negative error number."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        _serve(worker, parent, control, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _serve(
    worker: ForkedWorker, parent: int, control: socket.socket, descriptors: list[int]
) -> NoReturn:
    """Works in a fork, and ends it without the interpreter's finalizers."""
    status = 1
    control.close()  # a client's file must not reach the fork server
    try:
        end_with_parent(parent)
        worker.serve(*descriptors)
        status = 0
    except BaseException:
        log.exception("a worker that decodes files failed")
    finally:
        os._exit(status)


def _reap(pid: int) -> int:
    """Returns the exit status of a fork that is about to end, or a negative signal number."""
    deadline = time.monotonic() + _ENDING_S
    while (status := _status_of(pid)) is None:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = math.inf
        time.sleep(_POLL_S)
    return status


def _status_of(pid: int) -> int | None:
    """Returns the exit status of a fork. None if the fork runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # a fork of an earlier server, which was killed with that server
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None
