"""Ranks' processes are told steps, watched, and ended; none outlives the engine."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from services.decoder.ranks.processes import RankProcesses, RankTimes
from tests.noise import PATIENCE_S, wait_until

Start = Callable[..., tuple[RankProcesses, "queue.Queue[int]"]]
MODULE = "tests.unit.decoder.fake_rank"
TIMES = RankTimes(period=0.05, max_silence=1.0, grace=0.5)


@pytest.fixture
def started() -> Iterator[list[RankProcesses]]:
    """Those that are to be stopped."""
    started: list[RankProcesses] = []
    yield started
    for each in started:
        each.stop()


@pytest.fixture
def start(started: list[RankProcesses]) -> Start:
    """Starts fake ranks, and gives the queue of the statuses that would have ended the engine."""

    def start(
        word: str, count: int = 2, times: RankTimes = TIMES
    ) -> tuple[RankProcesses, "queue.Queue[int]"]:
        ends: queue.Queue[int] = queue.Queue()
        fd = os.memfd_create("arena")
        started.append(RankProcesses(count, word, fd, ends.put, MODULE, times))
        os.close(fd)
        return started[-1], ends

    return start


def pids(ranks: RankProcesses) -> list[int]:
    return [rank.process.pid for rank in ranks.ranks]


def test_ranks_get_records_and_end_when_told(start: Start) -> None:
    ranks, ends = start("", 3)
    for number in range(3):
        ranks.send(b"%d" % number)
    wait_until(lambda: os.fstat(ranks.store_fd).st_size == 6, "both have read all")
    for rank in ranks.ranks:
        rank.link.shutdown(socket.SHUT_WR)  # as when the engine ends
    assert [rank.process.wait(PATIENCE_S) for rank in ranks.ranks] == [0, 0]
    assert ends.get(timeout=PATIENCE_S) == 1


@pytest.mark.parametrize(("word", "status"), [("status 1", 1), ("status 2", 2), ("status 0", 1)])
def test_the_end_of_a_rank_is_the_engines(start: Start, word: str, status: int) -> None:
    """2: it has refused the model or a setting."""
    _, ends = start(word, 3)
    assert ends.get(timeout=PATIENCE_S) == status


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_stopped_rank_ends_the_engine(start: Start, on_gpu: bool) -> None:
    ranks, ends = start("")
    ranks.ready(on_gpu=on_gpu)
    os.kill(pids(ranks)[0], signal.SIGSTOP)
    assert ends.get(timeout=PATIENCE_S) == 1


def test_a_rank_whose_loop_hangs_ends_the_engine(start: Start) -> None:
    ranks, ends = start("silent", 3)
    ranks.ready(on_gpu=True)
    assert ends.get(timeout=PATIENCE_S) == 1


def test_a_rank_that_computes_on_a_cpu_does_not_hang(start: Start) -> None:
    ranks, ends = start("spins", times=replace(TIMES, period=0.3))
    ranks.ready(on_gpu=False)
    with pytest.raises(queue.Empty):
        ends.get(timeout=2.0)
    ranks.ready(on_gpu=True)
    assert ends.get(timeout=PATIENCE_S) == 1


def test_a_start_may_take_long(start: Start) -> None:
    _, ends = start("silent", 3)
    with pytest.raises(queue.Empty):
        ends.get(timeout=1.5)


def test_a_rank_that_is_stopped_while_it_starts_ends_the_engine(start: Start) -> None:
    ranks, ends = start("", 3)
    os.kill(pids(ranks)[1], signal.SIGSTOP)
    assert ends.get(timeout=PATIENCE_S) == 1


def test_a_rank_that_does_not_end_is_killed(start: Start, started: list[RankProcesses]) -> None:
    ranks, ends = start("stays")
    ranks.send(b"1")
    wait_until(lambda: os.fstat(ranks.store_fd).st_size == 1, "it is there")
    started.pop().stop()
    assert ranks.ranks[0].process.returncode == -signal.SIGKILL
    assert ends.empty()


ENGINE = """
import os, time
from services.decoder.ranks.processes import RankProcesses
module = "tests.unit.decoder.fake_rank"
ranks = RankProcesses(3, "stays", os.memfd_create("arena"), module=module)
ranks.send(b"1")
while os.fstat(ranks.store_fd).st_size < 2:
    time.sleep(0.01)
print(*(rank.process.pid for rank in ranks.ranks), flush=True)
time.sleep(60)
"""


def test_ranks_end_with_the_process_that_started_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
        assert len(ranks) == 2
        os.kill(ranks[0].pid, signal.SIGSTOP)  # the kernel needs no help of theirs
        engine.kill()
    _, left = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
