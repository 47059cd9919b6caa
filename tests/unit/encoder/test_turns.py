"""The encoder's engine on a GPU that it shares with decoders: large batches run in turns."""

from collections.abc import Iterator

import pytest

from services.common.process.heartbeat import Ping
from tests.encoder_harness import LARGE, FakeTurns, Running, wait_until


@pytest.fixture
def turns() -> FakeTurns:
    return FakeTurns()


@pytest.fixture
def sharing(turns: FakeTurns) -> Iterator[Running]:
    running = Running(turns=turns)
    yield running
    running.stop()
    assert not turns.is_mine and not turns.is_waiting


def test_a_large_batch_waits_for_its_turn_and_small_ones_do_not(
    sharing: Running, turns: FakeTurns
) -> None:
    front = sharing.front
    front.encode(1, grid=LARGE)
    wait_until(lambda: turns.is_waiting)
    front.encode(2, 3)
    assert front.codes(2, 3) == ["", ""]
    front.send(Ping())
    front.receive_until(lambda: front.num_pongs == 1)
    assert 1 not in front.done
    turns.is_free = True
    assert front.codes(1) == [""]
    wait_until(lambda: not turns.is_mine)
    assert turns.num_turns == 1
    front.receive_until(lambda: front.stats.num_turns == 1)


def test_a_turn_lasts_for_one_large_batch(sharing: Running, turns: FakeTurns) -> None:
    """The next one waits for the end of the first one, and a small one goes behind the first."""
    front, runner = sharing.front, sharing.runner
    runner.device_done.clear()
    turns.is_free = True
    front.encode(1, grid=LARGE)
    wait_until(lambda: runner.batches == [[1]])
    front.encode(2, grid=LARGE)
    wait_until(lambda: len(sharing.preprocessor.prepared) == 2)
    front.encode(3)
    wait_until(lambda: runner.batches == [[1], [3]])
    assert turns.is_mine
    turns.is_free = False
    runner.device_done.set()
    assert front.codes(1, 3) == ["", ""]
    wait_until(lambda: turns.is_waiting and not turns.is_mine)
    assert turns.num_turns == 1 and runner.batches == [[1], [3]]
    turns.is_free = True
    assert front.codes(2) == [""]
    assert turns.num_turns == 2


def test_no_turn_begins_while_a_very_large_batch_runs(sharing: Running, turns: FakeTurns) -> None:
    front, runner = sharing.front, sharing.runner
    runner.device_done.clear()
    turns.is_free = True
    front.encode(1, grid=(1, 16, 16))
    wait_until(lambda: runner.batches == [[1]])
    front.encode(2, grid=LARGE)
    wait_until(lambda: len(sharing.preprocessor.prepared) == 2)
    front.encode(3)
    wait_until(lambda: runner.batches == [[1], [3]])
    assert turns.num_turns == 0
    runner.device_done.set()
    assert front.codes(1, 2, 3) == ["", "", ""]
    assert turns.num_turns == 1


def test_a_large_batch_that_fails_ends_its_turn(sharing: Running, turns: FakeTurns) -> None:
    sharing.runner.poisoned.add(1)
    turns.is_free = True
    sharing.front.encode(1, grid=LARGE)
    assert sharing.front.codes(1) == ["internal_error"]
    sharing.front.encode(2, grid=LARGE)
    assert sharing.front.codes(2) == [""]
    assert turns.num_turns == 2


def test_an_engine_stops_while_a_large_batch_waits(sharing: Running, turns: FakeTurns) -> None:
    sharing.front.encode(1, grid=LARGE)
    wait_until(lambda: turns.is_waiting)
