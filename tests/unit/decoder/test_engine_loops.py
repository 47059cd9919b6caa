"""Closed loops on the engine: rows, figures, and a run with a tiny model."""

import re
from pathlib import Path

import pytest

from benchmarks import engine_loops
from benchmarks.engine import Waiting
from benchmarks.engine_loops import Loop, Row
from services.decoder.engine.engine import Engine
from services.decoder.engine.schedule.step_cost import StepCost
from tests.decoder_harness import write_checkpoint
from tests.fake_runner import VOCAB_SIZE, FakeRunner


def test_a_row_is_read() -> None:
    row = Row.parse("8x12000+64:32")
    assert (row.streams, row.prompt, row.output, row.count, row.slots) == (8, 12_000, 64, 32, (-1,))
    assert Row.parse("8x20+4:3").streams == 3
    adapted = Row.parse("4x20+4:5@2/0", 3)
    assert [message.adapter for message in adapted.requests(VOCAB_SIZE)] == [2, 0, 2, 0, 2]
    assert Row.parse("4x20+4:5@all", 3).slots == (0, 1, 2)


@pytest.mark.parametrize("text", ["8x12", "0x20+4:3", "8x20+4", "8x20+4:3@3", "8x20+4:3@"])
def test_a_wrong_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Row.parse(text, 3)


def test_streams_stay_in_flight_until_the_requests_run_out() -> None:
    row = Row.parse("3x20+6:8")
    loop = Loop.start(Engine(FakeRunner(), overlap=False), row, VOCAB_SIZE)
    waiting = Waiting()
    while loop.is_running:
        assert len(loop.sent) - len(loop.ends) == min(3, 8 - len(loop.ends))
        loop.step(waiting)
    assert len(loop.ends) == len(loop.first) == len(loop.gaps) == 8
    assert sum(number for _, number in loop.tokens) == 8 * 6
    assert not loop.engine.has_work


def test_the_middle_has_neither_the_first_nor_the_last_requests() -> None:
    """Eight requests of five tokens end each second, the first at 10 s."""
    row = Row("row", 1, 8, 20, 5)
    loop = Loop(Engine(FakeRunner(), overlap=False), row, [])
    for number in range(8):
        start = 10.0 + number
        loop.sent[number], loop.first[number], loop.last[number] = start, start + 0.2, start + 1.0
        loop.gaps[number] = 0.3
        loop.tokens += [(start + 0.2 * (1 + place), 1) for place in range(5)]
        loop.ends.append(start + 1.0)
    loop.walls, loop.hosts = [0.2] * 40, [0.05] * 40
    # From 12 to 17.2 s six requests end, and 27 tokens come.
    assert loop.report() == (
        "row: 1.000 req/s, 5 tok/s; middle 1.154 req/s, 5 tok/s; ms: TTFT p50 200 p99 200, "
        "TPOT p50 200.00 p99 200.00, longest gap p50 300 p99 300\n"
        "  40 steps, ms: wall p50 200.00 p90 200.00, host p50 50.00 p90 50.00; host 2.00 of 8.00 s"
    )


def test_each_engine_has_a_copy_of_the_calibrated_cost() -> None:
    cost = StepCost()
    cost.may_stretch = True
    engine = engine_loops.engine_of(FakeRunner(), cost, 48, 30.0)
    mine = engine._times.cost
    assert (mine.efficient_tokens, mine.may_stretch) == (48, False)
    assert cost.may_stretch
    assert cost.efficient_tokens == StepCost().efficient_tokens
    usual = engine_loops.engine_of(FakeRunner(), cost, None, None)._times.cost
    assert usual is not cost
    assert usual.may_stretch


def test_rows_are_measured_and_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loops, "freeze_garbage", lambda: None)
    words = f"--model {write_checkpoint(tmp_path)} --load-format dummy --device cpu"
    words += " --rows 2x24+4:5,1x40+2:2 --sizes default,32 --bounds 30 --profile 2"
    engine_loops.main(words.split())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("ready after ")
    assert lines[1].startswith("calibrated: ")
    assert [line for line in lines if line.startswith("steps of 32 tokens within 30.0 ms")]
    for name in ("2x24+4:5", "1x40+2:2"):
        assert out.count(f"{name}: ") == 2
        assert out.count(f"{name} profile 2 steps, ms of each: ") == 2


def test_a_slot_without_an_adapter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine_loops.main(["--model", "x", "--rows", "1x20+4:3@0"])
    assert "--adapters" in capsys.readouterr().err
