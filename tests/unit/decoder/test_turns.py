"""The engine on a device that it shares with an encoder, in turns: it drains before it ends a turn,
launches nothing without one, and no token changes. `engine_programs` has random turns, too.
"""

import threading
from pathlib import Path

import pytest

from services.common.process.channel import EngineChannel, create_socket_pair
from services.common.process.device_turns import DeviceTurns
from services.common.process.heartbeat import Ping, Pong
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import EngineMessage, FrontMessage, Shutdown, StepDone
from services.decoder.engine.schedule.step_cost import StepLoad
from tests.engine_harness import Harness, Untimed, prompt_of
from tests.fake_runner import FakeRunner, add_message, expected_tokens, runner_info
from tests.layer_runner import LayerRunner
from tests.noise import PATIENCE_S
from tests.random_turns import RandomTurns


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ({}, {}),
        ({"overlap": False}, {}),
        ({"mask_after": 1, "plans": True}, {"token_masks": True}),
        ({"max_drafts": 3}, {}),
        ({"max_drafts": 3, "mask_after": 1}, {"token_masks": True}),
        ({"has_states": True, "num_checkpoints": 4, "max_drafts": 2}, {}),
        ({"has_draft_head": True, "max_drafts": 2, "runner": LayerRunner}, {}),
    ],
    ids=["plain", "no overlap", "masks", "drafts", "masks and drafts", "states", "draft head"],
)
def test_turns_that_end_after_each_step_change_no_token(kind, fields) -> None:
    turns = RandomTurns(0, due=1.0)
    harness = Harness(turns=turns, num_blocks=200, max_batched_tokens=64, **kind)
    for number in range(4):
        harness.add(add_message(number, prompt_of(number, 30), max_tokens=30, **fields))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    assert turns.num_ended > 10 and not turns.is_mine and not turns.is_waiting


def test_a_turn_lasts_while_there_is_work_and_nobody_waits() -> None:
    turns = RandomTurns(0, due=0.0, free=1.0)
    harness = Harness(turns=turns)
    for number in range(3):
        harness.add(add_message(number, prompt_of(number, 30), max_tokens=20))
    harness.run()
    assert turns.num_turns == turns.num_ended == 1


def test_a_turn_that_is_due_ends_with_the_step_in_flight() -> None:
    turns = RandomTurns(0, due=0.0, free=1.0)
    harness = Harness(turns=turns)
    harness.add(add_message(0, prompt_of(0, 10), max_tokens=20))
    for _ in range(4):
        harness.step()
    engine, launched = harness.engine, len(harness.runner.batches)
    assert len(engine.pending) == 1
    turns.due, turns.free = 1.0, 0.0
    tokens = len(harness.tokens[0])
    harness.step()
    assert not engine.pending and not turns.is_mine
    assert len(harness.tokens[0]) == tokens + 1
    for _ in range(3):
        harness.step()
        assert turns.is_waiting and engine.has_work
    assert len(harness.runner.batches) == launched
    turns.due, turns.free = 0.0, 1.0
    harness.run()
    harness.assert_all_as_alone()


def test_an_engine_without_sequences_waits_for_no_turn() -> None:
    turns = RandomTurns(0, due=0.0, free=0.0)
    harness = Harness(turns=turns)
    harness.add(add_message(0, prompt_of(0, 10), max_tokens=20))
    harness.step()
    assert turns.is_waiting
    harness.engine.abort(0)
    harness.step()
    assert not turns.is_waiting and harness.ends == {0: "aborted"}
    assert not harness.engine.has_work


def test_an_engine_that_takes_turns_again_launches_no_drafting_step_without_one() -> None:
    """After a pause of `DeviceTurns` the engine has steps in flight, and no turn."""
    turns = RandomTurns(0, due=0.0, free=1.0)
    harness = Harness(turns=turns, has_draft_head=True, max_drafts=2, runner=LayerRunner)
    harness.add(add_message(0, prompt_of(0, 10), max_tokens=40))
    for _ in range(6):
        harness.step()
    assert harness.engine.pending
    turns.is_mine, turns.free = False, 0.0
    for _ in range(4):
        harness.step()
    assert not harness.engine.pending and turns.is_waiting
    turns.free = 1.0
    harness.run()
    harness.assert_all_as_alone()


class Observed(Untimed):
    """Notes the times of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: list[float] = []

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        self.ms.append(ms)


def test_the_wait_for_a_turn_is_no_time_of_a_step() -> None:
    now, cost = [100.0], Observed()
    turns = RandomTurns(0, due=0.0, free=1.0)
    harness = Harness(turns=turns, step_cost=cost, clock=lambda: now[0])

    def step() -> None:
        now[0] += 0.01
        harness.step()

    harness.add(add_message(0, prompt_of(0, 10), max_tokens=60))
    for _ in range(10):
        step()
    turns.due, turns.free = 1.0, 0.0
    step()
    busy_s = harness.engine.stats().busy_s
    now[0] += 3.0
    step()
    turns.due, turns.free = 0.0, 1.0
    for _ in range(10):
        step()
    assert harness.engine.stats().busy_s < busy_s + 0.2
    assert cost.ms and max(cost.ms) < 50


class CountingRunner(FakeRunner):
    """A `FakeRunner` with the counters that the engine process reports."""

    kernel_calls: dict[str, int] = {}  # noqa: RUF012 - never changed


def test_the_engine_process_answers_while_it_waits_for_its_turn(tmp_path: Path) -> None:
    from services.decoder.engine_main import run

    encoder = DeviceTurns("gpu", exclusive=True, directory=tmp_path)
    # The clock stands still, so that the engine waits for as long as the test takes.
    turns = DeviceTurns("gpu", exclusive=False, directory=tmp_path, clock=lambda: 0.0)
    assert encoder.try_take()
    runner = CountingRunner(runner_info())
    message = add_message(1, prompt_of(1, 20), max_tokens=30)
    runner.messages[1] = message
    ends = create_socket_pair()
    front, channel = EngineChannel(ends[0], EngineMessage), EngineChannel(ends[1], FrontMessage)
    engine = Engine(runner, overlap=True, turns=turns)
    loop = threading.Thread(target=run, args=(engine, channel, runner))
    loop.start()
    front.send(message)
    tokens: list[int] = []
    is_done, num_pongs = False, 0
    while not is_done:
        if num_pongs < 3:  # in the encoder's turn
            assert not tokens
            front.send(Ping())
        messages = front.receive(PATIENCE_S)
        assert messages, "the engine said nothing for too long"
        for found in messages:
            if isinstance(found, Pong):
                num_pongs += 1
                if num_pongs == 3:
                    encoder.release()
            elif isinstance(found, StepDone):
                for event in found.events:
                    tokens += event.token_ids
                    is_done |= event.end is not None
    assert tokens == expected_tokens(message, runner.info.max_model_len)[0]
    front.send(Shutdown())
    loop.join(PATIENCE_S)
    assert not loop.is_alive() and encoder.try_take()  # the decoder has nothing to do
    for each in (encoder, turns):
        each.close()
    for end in ends:
        end.close()
