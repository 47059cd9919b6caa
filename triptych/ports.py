"""Chooses the ports of a stack before the processes that listen on them start."""

import contextlib
import errno
import itertools
import os
import random
import socket
import weakref
from collections.abc import Iterable

from triptych.stack import StackError

_PORTS = range(21_000, 32_000)


class Ports:
    """Finds free ports and keeps each bound until all are known, so that all differ.

    Chosen ports are below `ip_local_port_range`, from which the kernel takes clients' ports, since
    a child needs seconds until it binds its port. An abstract Unix socket per chosen port reserves
    the port against other stacks on the machine, until this object is deleted or its process ends.

    Args:
        candidates: ports in the order in which they are tried. By default the order starts at a
            random port, so that two stacks that start at the same time rarely collide.
    """

    def __init__(self, candidates: Iterable[int] | None = None) -> None:
        self._held: list[socket.socket] = []
        self._names: list[int] = []  # descriptors
        self._candidates = iter(_from_a_random_one() if candidates is None else candidates)
        weakref.finalize(self, _close, self._names)

    def claim(self, host: str, port: int) -> int:
        """Binds a port and returns its number. Port 0 stands for any free port.

        Raises:
            StackError: another process listens on the port, or no port is free.
        """
        if port:
            return self._bind(host, port)
        for chosen in self._candidates:
            if self._take_name(chosen):
                with contextlib.suppress(StackError):
                    return self._bind(host, chosen)
        raise StackError(f"no port is free on {host}", 2)

    def _take_name(self, port: int) -> bool:
        """Reserves a port. Returns False if another stack on this machine has reserved it."""
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0triptych-port-{port}")
        except OSError:
            name.close()
            return False
        self._names.append(name.detach())
        return True

    def _bind(self, host: str, port: int) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
            held.listen()  # without it, another process could bind the port as well
        except OSError as error:
            held.close()
            problem = f"cannot listen on {host}:{port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                problem += "; choose another port with --port"
            raise StackError(problem, 2) from error
        self._held.append(held)
        return port

    def close(self) -> None:
        """Closes the sockets, so that the children can bind the ports."""
        for held in self._held:
            held.close()
        self._held.clear()


def _from_a_random_one() -> Iterable[int]:
    first = random.randrange(len(_PORTS))
    return itertools.chain(_PORTS[first:], _PORTS[:first])


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
