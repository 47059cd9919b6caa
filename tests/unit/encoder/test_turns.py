"""The encoder's engine on a GPU that it shares with decoders: large batches run in turns."""

from collections.abc import Iterator

import pytest

from services.common.process.heartbeat import Ping
from services.encoder.engine.messages import CancelImage
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


def test_an_engine_stops_while_a_large_batch_waits(turns: FakeTurns) -> None:
    running = Running(turns=turns)
    running.front.encode(1, grid=LARGE)
    wait_until(lambda: turns.is_waiting)
    running.stop()
    assert not turns.is_waiting and not running.runner.batches


def test_the_next_large_batch_does_not_wait_for_a_message_after_one_that_failed(
    sharing: Running, turns: FakeTurns
) -> None:
    sharing.runner.poisoned.add(1)
    sharing.front.encode(1, grid=LARGE)
    wait_until(lambda: turns.is_waiting)
    sharing.front.encode(2, grid=LARGE)
    wait_until(lambda: sharing.engine.num_ready == 1)
    turns.is_free = True
    assert sharing.front.codes(1, 2) == ["internal_error", ""]


def test_a_very_large_batch_is_launched_behind_a_large_one(
    sharing: Running, turns: FakeTurns
) -> None:
    front, runner = sharing.front, sharing.runner
    runner.device_done.clear()
    front.encode(1, grid=LARGE)
    wait_until(lambda: turns.is_waiting)
    front.encode(2, grid=(1, 16, 16))
    wait_until(lambda: sharing.engine.num_ready == 1)
    turns.is_free = True
    wait_until(lambda: runner.batches == [[1], [2]])
    runner.device_done.set()
    assert front.codes(1, 2) == ["", ""] and turns.num_turns == 1


def test_a_cancelled_image_leaves_the_batch_that_waits_for_its_turn(
    sharing: Running, turns: FakeTurns
) -> None:
    front, runner = sharing.front, sharing.runner
    runner.device_done.clear()
    for job_id in (1, 2):  # as many batches as the device may have
        front.encode(job_id)
        wait_until(lambda job_id=job_id: runner.batches[-1:] == [[job_id]])
    front.encode(3, 4, grid=(1, 4, 8))  # together a large batch
    wait_until(lambda: sharing.engine.num_ready == 2)
    runner.device_done.set()
    wait_until(lambda: turns.is_waiting)
    front.send(CancelImage(3))
    assert front.codes(3) == ["cancelled"] and turns.is_waiting
    front.send(CancelImage(4))
    assert front.codes(4) == ["cancelled"]
    wait_until(lambda: not turns.is_waiting)
    turns.is_free = True
    front.encode(5, grid=LARGE)
    assert front.codes(5) == [""] and runner.batches == [[1], [2], [5]]


def test_the_end_of_a_waiting_batch_does_not_end_the_turn_of_another(
    sharing: Running, turns: FakeTurns
) -> None:
    front, runner = sharing.front, sharing.runner
    runner.device_done.clear()
    turns.is_free = True
    front.encode(1, grid=LARGE)
    wait_until(lambda: runner.batches == [[1]])
    front.encode(2, grid=LARGE)
    wait_until(lambda: sharing.engine._large == [2])  # pyright: ignore[reportPrivateUsage]
    front.send(CancelImage(2))
    assert front.codes(2) == ["cancelled"] and turns.is_mine
    runner.device_done.set()
    assert front.codes(1) == [""]
