"""The ports of a stack, chosen before the processes that listen on them start."""

import contextlib
import os
import random
import socket
import weakref

from triptych.stack import StackError


class Ports:
    """Finds free ports; keeps each bound until all are known, so that all differ.

    Those that it chooses lie below the ones that the kernel gives to clients
    (`ip_local_port_range`), since a child takes seconds to bind its own. Until this object is
    gone, they are taken for the others of all processes: a name among Linux's abstract sockets,
    which ends with its process, stands for each. The first is a random one, so that two stacks
    that start at once seldom ask for the same.
    """

    _FIRST, _NUM = 21_000, 11_000

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._names: list[int] = []  # descriptors
        self._next = random.randrange(self._NUM)
        weakref.finalize(self, _close, self._names)

    def claim(self, host: str, port: int) -> int:
        """The port, or any free one for 0.

        Raises:
            StackError: another process listens there, or no port is free.
        """
        if port:
            return self._bind(host, port)
        for _ in range(self._NUM):
            self._next = (self._next + 1) % self._NUM
            chosen = self._FIRST + self._next
            if self._take_name(chosen):
                with contextlib.suppress(StackError):
                    return self._bind(host, chosen)
        raise StackError(f"no port of {host} is free", 2)

    def _take_name(self, port: int) -> bool:
        """Whether no other stack of this machine has chosen the port."""
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
            held.listen()  # else others may bind it, too
        except OSError as error:
            held.close()
            raise StackError(f"cannot listen on {host}:{port}: {error.strerror}", 2) from error
        self._held.append(held)
        return port

    def close(self) -> None:
        """Closes the sockets, so that the children can bind the ports."""
        for held in self._held:
            held.close()
        self._held.clear()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
