"""The engine's contract on a fake runner, for random sequences, sizes and arrivals."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from tests.cases import cases
from tests.engine_harness import Harness, prompt_of
from tests.engine_programs import engines, failures, play, programs
from tests.fake_runner import add_message

pytestmark = pytest.mark.thorough


class ErraticCost(StepCost):
    """Learns random times instead of the fake device's; prompts may go on by a token a step."""

    @property
    def min_chunk(self) -> int:
        return 1

    def __init__(self, seed: int) -> None:
        super().__init__(60)
        self._random = random.Random(seed)

    def observe(self, load: StepLoad, ms: float, rate: float = 0.5) -> None:
        super().observe(load, self._random.uniform(0.1, 100.0), rate)


@settings(max_examples=cases(60, 150), deadline=None)
@given(
    program=programs(seeds=3, shared=40, own=0, last=15),
    engine=engines(12, 40),
    failure=failures,
    prefix_caching=st.booleans(),
    plans=st.booleans(),
    most=st.integers(1, 4),
    step_ms=st.none() | st.floats(1, 50),
    drafts=st.none() | st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
    by_layer=st.booleans(),
    seed=st.integers(0, 2**16),
    host=st.sampled_from([0, 0, 3, 16, 64]),
)
def test_every_sequence_ends_once_with_the_tokens_it_has_alone(
    program, engine, failure, prefix_caching, plans, most, step_ms, drafts, by_layer, seed, host
):
    """No token lost or doubled, no block lost, whatever runs beside a sequence, and however many
    tokens a step yields or drafts it verifies and however long it takes, images and masks that
    arrive late, preemptions, and answers that another decoder has begun.
    """
    max_drafts, share = drafts or (0, 0.0)
    most = 1 if drafts else most
    engine["max_batched_tokens"] = max(
        engine["max_batched_tokens"], engine["max_num_sequences"] * most
    )
    harness = Harness(
        prefix_caching=prefix_caching, plans=plans, max_tokens_per_step=most,
        step_ms=step_ms or math.inf, step_cost=None if step_ms is None else ErraticCost(seed),
        max_drafts=max_drafts, right_drafts=share, num_host_blocks=host, has_draft_head=by_layer,
        **engine,
    )  # fmt: skip
    harness.runner.random.seed(seed)
    play(harness, program, failure)


@settings(max_examples=cases(40, 150), deadline=None)
@given(
    program=programs(seeds=2, shared=40, own=8, last=8),
    engine=engines(12, 40),
    failure=failures,
    step_ms=st.none() | st.floats(1, 50),
    seed=st.integers(0, 2**16),
    states=st.booleans(),
    host=st.sampled_from([0, 0, 16]),
)
def test_prompts_that_share_blocks_within_a_step_have_the_tokens_they_have_alone(
    program, engine, failure, step_ms, seed, states, host
):
    """The order and the sharing of a model for search; its sequences generate here, too, so that
    the tokens show what they have read.
    """
    kind = {"has_states": True, "num_checkpoints": 4, "state_tokens": 8} if states else {}
    harness = Harness(
        task="rank", num_host_blocks=host, step_ms=step_ms or math.inf,
        step_cost=None if step_ms is None else ErraticCost(seed), **kind, **engine,
    )  # fmt: skip
    play(harness, program, failure)


@settings(max_examples=cases(8, 60), deadline=None)
@given(
    ahead=st.integers(0, 5),
    masked=st.integers(1, 4),
    mask_after=st.integers(0, 5),
    prompt=st.integers(1, 20),
    kind=st.sampled_from([{}, {"has_states": True}, {"max_tokens_per_step": 4}]),
)
def test_a_late_mask_costs_the_sequence_steps_and_others_nothing(
    ahead, masked, mask_after, prompt, kind
):
    """A sequence with masks runs in every step if each arrives while the step before is computed.
    Where that does not help, it runs in the step after its mask has arrived. All others run in
    every step, one step ahead of their tokens.
    """
    steps = 30
    harness = Harness(
        max_num_sequences=12, num_blocks=1000, max_batched_tokens=256, mask_after=mask_after, **kind
    )
    kinds = [{}] * ahead + [{"token_masks": True}] * masked
    for number, fields in enumerate(kinds):
        harness.add(add_message(number, prompt_of(number, prompt), max_tokens=150, **fields))
    for _ in range(mask_after + 1):  # masks of the first tokens arrive
        harness.step()
    for _ in range(4):
        harness.step()
    # A read after the launch of an empty step adds none: counted are steps of the engine.
    first = len(harness.runner.batches)
    harness.launches.clear()
    for _ in range(steps):
        harness.step()
    assert len(harness.runner.batches) - first <= steps
    for number, fields in enumerate(kinds):
        ran = [step for step, ids in enumerate(harness.launches) if number in ids]
        gaps = {after - before for before, after in itertools.pairwise(ran)}
        if not fields:
            assert gaps == {1} and len(ran) == steps
        elif kind:
            assert gaps == {max(2, 1 + mask_after)}
        else:
            # A mask in time costs nothing; a late one costs the step that it missed.
            assert max(gaps) <= (1 if mask_after == 0 else 2 + mask_after)
            assert mask_after or len(ran) == steps
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
