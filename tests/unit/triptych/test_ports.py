"""Stacks that start at once choose different ports."""

import gc
import socket
import subprocess
import sys

import pytest

from triptych.options import LOOPBACK
from triptych.ports import Ports
from triptych.stack import StackError


def test_two_that_begin_at_the_same_one_differ() -> None:
    """Also when the first have been closed for children that do not listen yet."""
    candidates = range(21_077, 22_000)
    first, second = Ports(candidates), Ports(candidates)
    chosen = [first.claim(LOOPBACK, 0) for _ in range(3)]
    first.close()
    others = [second.claim(LOOPBACK, 0) for _ in range(3)]
    second.close()
    assert len({*chosen, *others}) == 6
    del first
    gc.collect()
    third = Ports(candidates)
    assert third.claim(LOOPBACK, 0) in chosen
    third.close()


def test_a_port_has_one_user() -> None:
    """As `--port` and `--metrics-port` that are the same."""
    ports = Ports()
    chosen = ports.claim(LOOPBACK, 0)
    for host in (LOOPBACK, "0.0.0.0"):
        with pytest.raises(
            StackError, match=f"on {host}:{chosen}: Address already in use; choose .*--port"
        ):
            ports.claim(host, chosen)
    ports.close()


def test_processes_differ() -> None:
    code = (
        "import random, sys; from triptych.ports import Ports; random.seed(5); ports = Ports(); "
        "print(ports.claim('127.0.0.1', 0), flush=True); ports.close(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        assert one.stdout is not None and other.stdout is not None
        assert int(one.stdout.readline()) != int(other.stdout.readline())


def test_a_port_that_is_listened_on_is_passed_over_or_refused() -> None:
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        taken = listening.getsockname()[1]
        ports = Ports(range(taken, 1 << 16))
        with pytest.raises(StackError, match="cannot listen"):
            ports.claim(LOOPBACK, taken)
        assert ports.claim(LOOPBACK, 0) > taken
    ports.close()
