"""Ports for servers of tests."""

import itertools
import os
import socket

# Below those of `triptych serve` and of clients (`ip_local_port_range`):
# between the choice and the server's start no connection of another test takes one.
_FIRST, _NUM = 10_000, 11_000
_numbers = itertools.count(os.getpid() * 97)  # processes begin at places of their own


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that no other process of tests was given."""
    while True:
        port = _FIRST + next(_numbers) % _NUM
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0triptych-test-port-{port}")
        except OSError:
            claim.close()
            continue
        claim.detach()  # open until this process ends
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
