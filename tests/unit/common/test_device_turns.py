"""Processes take turns on a GPU: in order, without a gap that the death of one could leave."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.process import device_turns
from services.common.process.device_turns import NO_TURNS, DeviceTurns, open_turns
from tests.noise import PATIENCE_S

# Takes turns until its input ends, and says so when it has the first one. It writes to the log: "?"
# when it is the next process, "+" when its turn has begun, and "-" when its turn is about to end,
# each with "1" for an exclusive process and "0" for a shared one. It never gives up a wait, however
# slow the machine is.
PLAYER = """
import select, sys, time
from pathlib import Path
from services.common.process import device_turns
from services.common.process.device_turns import DeviceTurns
device_turns._MAX_WAIT_S = 600.0
exclusive, directory, shared_log = sys.argv[1] == "exclusive", Path(sys.argv[2]), sys.argv[3]
turns = DeviceTurns("gpu", exclusive=exclusive, directory=directory)
with open(shared_log, "a", buffering=1) as log:
    was_next = False
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not turns.try_take():
            if turns._is_next and not was_next:
                log.write(f"?{exclusive:d}\\n")
            was_next = turns._is_next
            time.sleep(0.0002)
            continue
        was_next = False
        if turns.num_turns == 1:
            print("begun", flush=True)
        log.write(f"+{exclusive:d}\\n")
        end = time.monotonic() + 0.003
        while time.monotonic() < end or not (exclusive or turns.is_due):
            if select.select([sys.stdin], [], [], 0.0005)[0]:
                break
        log.write(f"-{exclusive:d}\\n")
        turns.release()
"""


def player(kind: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PLAYER, kind, str(directory), str(directory / "log")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "begun\n"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Table:
    """Turns of several users in this process, with one clock. Each has descriptors of its own, so
    that the kernel tells them apart as it does processes.
    """

    def __init__(self, directory: Path) -> None:
        self.clock, self.directory = Clock(), directory
        self.opened: list[DeviceTurns] = []

    def seat(self, *, exclusive: bool = False) -> DeviceTurns:
        turns = DeviceTurns(
            "gpu", exclusive=exclusive, directory=self.directory, clock=self.clock
        )  # fmt: skip
        self.opened.append(turns)
        return turns


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path)
    yield table
    for turns in table.opened:
        turns.close()


def test_decoders_share_a_turn_and_an_encoder_has_it_alone(table: Table) -> None:
    encoder, decoders = table.seat(exclusive=True), [table.seat(), table.seat()]
    assert all(decoder.try_take() for decoder in decoders)
    assert not encoder.try_take() and encoder.is_waiting
    for decoder in decoders:
        assert not encoder.try_take()
        decoder.release()
    assert encoder.try_take() and not encoder.is_waiting
    assert not decoders[0].try_take()
    encoder.release()
    assert decoders[0].try_take()


def test_nobody_has_a_second_turn_while_another_waits(table: Table) -> None:
    encoder, decoders = table.seat(exclusive=True), [table.seat(), table.seat()]
    assert decoders[0].try_take()
    assert not encoder.try_take()
    assert not decoders[1].try_take()  # which could share the turn, but the encoder comes first
    decoders[0].release()
    assert not decoders[0].try_take()
    assert encoder.try_take()
    encoder.release()
    assert decoders[1].try_take() and decoders[0].try_take()


def test_turns_of_decoders_do_not_grow_by_those_of_other_decoders(table: Table) -> None:
    """A turn lasts as long as the encoder's turn before it, however long the whole wait was."""
    encoder, decoders = table.seat(exclusive=True), [table.seat(), table.seat()]
    assert encoder.try_take()
    assert not decoders[0].try_take() and not decoders[1].try_take()
    table.clock.now += 0.1
    encoder.release()
    assert decoders[0].try_take()
    assert not encoder.try_take() and not decoders[1].try_take()
    table.clock.now += 0.11
    assert decoders[0].is_due
    decoders[0].release()
    assert encoder.try_take()
    assert not decoders[1].try_take()
    table.clock.now += 0.1
    encoder.release()
    assert decoders[1].try_take() and decoders[1].waited_s == pytest.approx(0.31)
    assert not encoder.try_take()
    table.clock.now += 0.11
    assert decoders[1].is_due


def test_a_turn_lasts_as_long_as_the_wait_for_it(table: Table) -> None:
    encoder, decoder = table.seat(exclusive=True), table.seat()
    assert encoder.try_take()
    assert not decoder.try_take()
    table.clock.now += 0.07
    encoder.release()
    assert decoder.try_take()
    table.clock.now += 1.0
    assert not decoder.is_due  # nobody waits
    assert not encoder.try_take()
    assert decoder.is_due
    decoder.release()
    assert not decoder.is_due
    assert encoder.try_take()
    assert not decoder.try_take()
    table.clock.now += 0.07
    encoder.release()
    assert decoder.try_take()
    assert not encoder.try_take()
    table.clock.now += 0.06
    assert not decoder.is_due
    table.clock.now += 0.02
    assert decoder.is_due
    assert (decoder.num_turns, encoder.num_turns) == (2, 2)
    assert decoder.waited_s == pytest.approx(0.14) and encoder.waited_s == 0.0


def test_who_stops_waiting_is_not_waited_for(table: Table) -> None:
    encoder, decoder = table.seat(exclusive=True), table.seat()
    assert decoder.try_take() and not encoder.try_take()
    encoder.release()
    assert not encoder.is_waiting and not decoder.is_due
    assert table.seat().try_take()


def test_a_turn_that_never_ends_does_not_stop_others(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    encoder, decoder = table.seat(exclusive=True), table.seat()
    assert encoder.try_take()
    assert not decoder.try_take()
    table.clock.now += 5.1
    assert decoder.try_take() and not decoder.is_due
    decoder.release()
    assert decoder.try_take() and caplog.text.count("no turns on the GPU") == 1
    encoder.release()
    assert encoder.try_take()  # the decoder that had waited stands in nobody's way
    decoder.release()
    table.clock.now += 61
    assert not decoder.try_take()  # turns again
    encoder.release()
    assert decoder.try_take()


def test_processes_have_turns_in_order_and_never_at_once(tmp_path: Path) -> None:
    processes = [player("exclusive", tmp_path), player("shared", tmp_path)]
    for process in processes:
        begun(process)
    log = tmp_path / "log"
    num_turns = log.read_text().count("+1") + 40
    deadline = time.monotonic() + PATIENCE_S
    while log.read_text().count("+1") < num_turns:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for process in processes:
        process.communicate("end\n", timeout=PATIENCE_S)
        assert process.returncode == 0
    lines = log.read_text().split()
    turns = [line for line in lines if line[0] != "?"]
    for begin, end in zip(turns[::2], turns[1::2], strict=True):
        assert begin[0] == "+" and end == "-" + begin[1]
    assert "?0" in lines and "?1" in lines
    # While a process is the next one, the other begins no turn, but may write of one turn late.
    for index, line in enumerate(lines):
        begin = "+" + line[1]
        if line[0] == "?" and begin in lines[index:]:
            meanwhile = lines[index : lines.index(begin, index)]
            assert sum(other[0] == "+" for other in meanwhile) <= 1, meanwhile


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_the_death_of_a_process_ends_its_turn_and_its_wait(tmp_path: Path, kind: str) -> None:
    holder = player(kind, tmp_path)
    begun(holder)
    waiting = player("exclusive", tmp_path)
    if kind == "shared":
        begun(waiting)
    turns = DeviceTurns("gpu", exclusive=True, directory=tmp_path)
    for process in (holder, waiting):
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert turns.try_take()
    turns.close()


def test_without_access_to_the_files_there_are_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(device_turns, "_SHARED_MEMORY", folder)
    opened = open_turns("gpu", exclusive=True)
    assert isinstance(opened, DeviceTurns)
    opened.close()
    # A link of another user could lead anywhere.
    for number, path in enumerate(sorted(folder.iterdir(), reverse=True), 1):
        target = path.rename(tmp_path / path.name)
        path.symlink_to(target)
        assert open_turns("gpu", exclusive=True) is NO_TURNS
        assert caplog.text.count("no turns on the GPU") == number
    assert not any(
        path.resolve().is_relative_to(tmp_path) for path in Path("/proc/self/fd").iterdir()
    )
    assert NO_TURNS.try_take() and not NO_TURNS.is_due and not NO_TURNS.is_waiting
