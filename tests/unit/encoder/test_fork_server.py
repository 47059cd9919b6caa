"""Workers are forked, end with their parents, and cannot be forked without the machine's room."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import InternalError
from services.encoder.decoding.fork_server import ForkServer
from tests.noise import wait_until

_MODULE = "tests.odd_worker"
# An engine that starts a fork server with a worker, prints the pids of both, and goes on.
_ENGINE = f"""
import time
from services.encoder.decoding.fork_server import ForkServer
server = ForkServer("{_MODULE}")
print(server.pid, server.fork(), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(_MODULE)
    yield server
    server.close()


def runs(pid: int) -> bool:
    """Returns whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_is_ended_or_says_how_it_ended(server: ForkServer) -> None:
    first, second, third = (server.fork() for _ in range(3))
    server.kill(first)
    os.kill(second, signal.SIGPROF)
    assert server.reap(second) == -signal.SIGPROF
    wait_until(lambda: not runs(first), "the fork ends")
    assert runs(third)
    assert server.reap(third) == -signal.SIGKILL  # it does not end by itself
    assert server.reap(second) == -signal.SIGKILL  # it is no fork of the server any more


def test_no_zombie_is_left_of_a_killed_fork(server: ForkServer) -> None:
    forks = [server.fork() for _ in range(3)]
    for pid in forks:
        server.kill(pid)
        server.kill(pid)  # it may have ended by itself before
    for pid in forks:
        wait_until(lambda pid=pid: not runs(pid), "the fork ends")
    server.reap(server.fork())
    assert not any(Path(f"/proc/{pid}").exists() for pid in forks)


def test_all_forks_end_with_their_server() -> None:
    server = ForkServer(_MODULE)
    forks = [server.fork() for _ in range(2)]
    server.close()
    for pid in forks:
        wait_until(lambda pid=pid: not runs(pid), "the fork ends")


def test_a_killed_server_is_replaced_and_leaves_no_fork(server: ForkServer) -> None:
    old, fork = server.pid, server.fork()
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: not runs(fork), "the fork ends")
    assert server.reap(fork) == -signal.SIGKILL
    assert runs(server.fork()) and server.pid != old


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_an_engine_that_dies(number: signal.Signals) -> None:
    """Not even a worker that never looks at its socket."""
    with subprocess.Popen([sys.executable, "-c", _ENGINE], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        pids = list(map(int, engine.stdout.readline().split()))
        assert len(pids) == 2 and all(map(runs, pids))
        engine.send_signal(number)
    for pid in pids:
        wait_until(lambda pid=pid: not runs(pid), "the process ends")


def test_a_machine_without_processes_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_FORKS", "1")
    server = ForkServer(_MODULE)
    before = len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(3):
            with pytest.raises(OSError) as raised:
                server.fork()
            assert raised.value.errno == errno.EAGAIN
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        server.close()


def test_a_server_that_cannot_start_is_an_error_of_this_encoder() -> None:
    server = ForkServer("tests.no_such_module")
    with pytest.raises(InternalError):
        server.fork()
    server.close()


def test_a_process_that_may_not_be_started_leaves_no_file_open(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch(0o644)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PermissionError):
            ForkServer(_MODULE, str(interpreter))
        with pytest.raises(FileNotFoundError):
            ForkServer(_MODULE, str(tmp_path / "none"))
    assert len(os.listdir("/proc/self/fd")) == before
