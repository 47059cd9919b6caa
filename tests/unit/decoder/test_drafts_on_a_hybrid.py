"""Drafts change no answer of a model with recurrent states, which cannot be taken back: a tiny
Qwen3.5 in float32 on the CPU, with the requests of `test_drafts_on_a_model`.
"""

from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest

from services.decoder.engine.engine import Engine
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.schedule.head_drafts import HeadSources
from services.decoder.engine.schedule.lookup import Lookups
from services.decoder.engine.step import ComputeStep
from tests.cases import THOROUGH
from tests.decoder_harness import Harness, write_draft_head, write_hybrid
from tests.unit.decoder.test_drafts_on_a_model import Bench, assert_equal

SIZES = {"whole": 2048, "chunks": 40} if THOROUGH else {"chunks": 40}


@pytest.fixture(scope="module", params=SIZES.values(), ids=list(SIZES))
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Prompts are computed whole, or in chunks of up to 40 tokens in all."""
    harness = Harness(
        write_hybrid(tmp_path_factory.mktemp("hybrid")),
        max_num_sequences=min(64, request.param),
        max_batched_tokens=request.param,
        checkpoint_bytes=1 << 20,
        max_drafts=8,
    )
    yield Bench(harness)
    harness.close()


def num_folded(engine: Engine) -> int:
    """Accepted drafts, without those of the last steps of sequences."""
    found = engine.stats().drafts
    assert found is not None
    return found.num_accepted


@pytest.mark.parametrize(
    ("max_drafts", "share", "overlap"),
    [
        (4, 0.7, False),
        pytest.param(1, 0.7, False, marks=pytest.mark.nightly),
        pytest.param(4, 0.0, False, marks=pytest.mark.nightly),
        pytest.param(8, 1.0, False, marks=pytest.mark.nightly),
        pytest.param(8, 0.9, True, marks=pytest.mark.nightly),
    ],
)
def test_answers_are_equal_with_drafts(
    bench: Bench, max_drafts: int, share: float, overlap: bool
) -> None:
    """The second round begins at checkpoints of the first."""
    engine = bench.engine(max_drafts, share, overlap=overlap)
    assert_equal(bench.run(engine), bench.expected)
    assert_equal(bench.run(engine, first=100), bench.expected)
    assert engine.stats().num_prefix_hit_tokens > 50
    assert (num_folded(engine) > 20) == (share > 0.0)


def test_answers_are_equal_after_preemptions(bench: Bench) -> None:
    """Preempted sequences lose their states, and the inputs of drafts that these lack."""
    runner = bench.harness.runner
    few = msgspec.structs.replace(runner.info, num_blocks=60, max_model_len=240)
    with mock.patch.object(runner, "info", few):
        engine = bench.engine(8, 0.9, overlap=True)
    assert_equal(bench.run(engine), bench.expected)
    assert engine.stats().num_preemptions > 3 and num_folded(engine) > 20


@pytest.mark.nightly
def test_lookup_changes_no_answer(bench: Bench) -> None:
    engine = bench.engine(8)
    engine.speculation.sources = Lookups()
    assert_equal(bench.run(engine), bench.expected)
    assert engine.stats().drafts is not None


@pytest.mark.parametrize("change", [-1, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_answer_changes_if_states_fold_too_few_or_too_many_drafts(
    bench: Bench, change: int
) -> None:
    engine = bench.engine(4, 0.7)
    computer = bench.harness.runner.computer
    stage = computer.stage

    def stage_with_others(step: ComputeStep) -> StepInputs:
        if step.folds is not None:
            folds = step.folds.copy()
            folds[:, 1] = np.clip(folds[:, 1] + change, 0, 4)
            step.folds = folds[folds[:, 1] > 0]
        return stage(step)

    with mock.patch.object(computer, "stage", stage_with_others):
        found = bench.run(engine)
    with pytest.raises(AssertionError):
        assert_equal(found, bench.expected)


@pytest.mark.nightly
def test_drafts_of_the_models_own_layer_change_no_answer(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The layer is random, so that nearly all of its drafts are wrong."""
    harness = Harness(
        write_draft_head(write_hybrid(tmp_path_factory.mktemp("head"))),
        max_num_sequences=40,
        max_batched_tokens=40,
        checkpoint_bytes=1 << 20,
        max_drafts=8,
        draft_head=True,
    )
    with_head = Bench(harness)
    assert_equal(with_head.expected, bench.expected)
    engine = with_head.engine(8)
    engine.speculation.sources = HeadSources()
    for first in (0, 100):
        assert_equal(with_head.run(engine, first=first), bench.expected)
    drafts = engine.stats().drafts
    assert drafts is not None and drafts.num_drafts > 20
    harness.close()


def test_drafts_without_room_for_their_inputs_are_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="keeps no inputs of drafts"):
        bench.engine(9)
