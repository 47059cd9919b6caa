"""Recurrent states under random schedules on a fake runner, which knows the right state of each
token: no slot is lost or shared, no checkpoint is without its KV, each sequence has the tokens it
has alone.

By default a hundred schedules; ten thousand with `--hypothesis-profile=schedules`.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.messages import ImageSpan, ResetPrefixCache
from services.decoder.engine.schedule.recurrent_states import RecurrentStates, checkpoint_boundaries
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.step import RowStart
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.engine_programs import engines, fail_at, failures, play, programs
from tests.fake_runner import FakeRunner, add_message, runner_info
from tests.integrity import check_checkpoints


@settings(deadline=None)
@given(
    program=programs(seeds=2, shared=60, own=30, last=25),
    engine=engines(24, 60),
    failure=failures,
    checkpoints=st.integers(0, 4),
    state_tokens=st.sampled_from((1, 8, 16)),
    drafts=st.none() | st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
    host=st.sampled_from([(0, 0), (3, 1), (60, 4)]),
)
def test_every_sequence_has_the_state_it_has_alone(
    program, engine, failure, checkpoints, state_tokens, drafts, host
):
    max_drafts, share = drafts or (0, 0.0)
    harness = harness_of(
        checkpoints, state_tokens=state_tokens, max_drafts=max_drafts, right_drafts=share,
        num_host_blocks=host[0], num_host_states=host[1], **engine,
    )  # fmt: skip
    play(harness, program, failure)


def test_drafts_are_folded_into_the_state_when_they_are_accepted() -> None:
    harness = harness_of(overlap=False, max_drafts=4, right_drafts=0.8)
    for number in range(3):
        harness.add(add_message(number, prompt_of(number, 30), max_tokens=40))
    harness.run()
    drafts = harness.engine.stats().drafts
    # The drafts of a sequence's last step are not folded: no step follows.
    assert drafts is not None and 30 < harness.runner.num_folded <= drafts.num_accepted
    harness.assert_all_as_alone()


def harness_of(checkpoints: int = 8, **info: Any) -> Harness:
    return Harness(has_states=True, num_checkpoints=checkpoints, **info)


def test_a_state_stays_on_the_host_while_the_blocks_of_its_prefix_are_loaded() -> None:
    """The blocks for the first prompt are taken from the second, whose state then leaves, too."""
    harness = harness_of(1, num_blocks=16, num_host_blocks=60, num_host_states=1)
    for number in (0, 1, 2):
        harness.add(add_message(number, prompt_of(number % 2, 50), max_tokens=2))
        harness.run()
    assert hits(harness) == 40 and harness.runner.num_restored_from_host == 1
    harness.assert_all_as_alone()


def hits(harness: Harness) -> int:
    return harness.engine.stats().num_prefix_hit_tokens


def test_the_next_turn_computes_only_what_is_new() -> None:
    harness = harness_of()
    first = prompt_of(1, 50)
    harness.add(add_message(0, first, max_tokens=5))
    harness.run()
    harness.add(add_message(1, first[:42] + prompt_of(2, 20), max_tokens=5))
    harness.run()
    assert hits(harness) == 40  # the last boundary before the tail of the first prompt
    assert harness.runner.num_restored == 1
    harness.assert_all_as_alone()


def test_a_prompt_whose_state_is_kept_takes_one_step() -> None:
    """Kept within the image and before the end, at most a piece before where it is wanted."""
    harness = harness_of(state_tokens=16, max_batched_tokens=100)
    image = (ImageSpan(KEYS[0], 10, 20),)
    harness.add(add_message(0, prompt_of(1, 70), images=image, max_tokens=1))
    harness.run()
    assert harness.runner.batches == [[(0, 0, 70)]] and harness.runner.num_saved == 2
    for number, shared, found in ((1, 31, 16), (2, 62, 48)):
        prompt = prompt_of(1, shared) + prompt_of(number, 9)
        harness.add(add_message(number, prompt, images=image, max_tokens=3))
        before = hits(harness)
        harness.run()
        assert hits(harness) - before == found
    harness.assert_all_as_alone()


@pytest.mark.parametrize("budget", range(20, 71, 2))
def test_wherever_a_prompt_is_cut_the_state_before_its_end_is_kept(budget: int) -> None:
    harness = harness_of(state_tokens=16, max_batched_tokens=budget)
    harness.add(add_message(0, prompt_of(1, 70), max_tokens=1))
    harness.run()
    harness.add(add_message(1, prompt_of(1, 62) + prompt_of(2, 9), max_tokens=3))
    harness.run()
    assert 60 - 16 < hits(harness) <= 60
    harness.assert_all_as_alone()


def test_another_question_about_the_same_image_begins_after_the_image() -> None:
    harness = harness_of()
    image = (ImageSpan(KEYS[0], 10, 22),)
    for number in range(3):
        question = prompt_of(1, 32) + prompt_of(10 + number, 30)
        harness.add(add_message(number, question, images=image, max_tokens=4))
        harness.run()
    assert hits(harness) == 2 * 32
    harness.assert_all_as_alone()


def test_two_sequences_that_share_a_checkpoint_diverge() -> None:
    harness = harness_of()
    harness.add(add_message(0, prompt_of(1, 50), max_tokens=3))
    harness.run()
    for number in (1, 2, 3):
        prompt = prompt_of(1, 44) + prompt_of(number, 9)
        harness.add(add_message(number, prompt, max_tokens=12, seed=number))
    harness.run()
    assert hits(harness) == 3 * 40
    assert len({tuple(harness.tokens[number]) for number in (1, 2, 3)}) == 3
    harness.assert_all_as_alone()


def test_a_sequence_cancelled_in_the_step_of_its_checkpoint_leaves_a_good_one() -> None:
    harness = harness_of(max_batched_tokens=64)
    harness.add(add_message(0, prompt_of(1, 50), max_tokens=3))
    harness.step()  # the step that ends at the boundary is in flight
    assert harness.runner.num_saved == 0
    harness.engine.abort(0)
    harness.add(add_message(1, prompt_of(1, 50), max_tokens=6))
    harness.run()
    assert hits(harness) == 40 and harness.runner.num_saved >= 1
    assert harness.ends == {0: "aborted", 1: "length"}
    harness.assert_all_as_alone()


def test_kv_blocks_without_a_state_are_computed_again() -> None:
    harness = harness_of(checkpoints=0)
    for number in range(2):
        harness.add(add_message(number, prompt_of(1, 50), max_tokens=3))
        harness.run()
    assert hits(harness) == 0
    harness.assert_all_as_alone()


def test_a_preempted_sequence_begins_at_its_checkpoint() -> None:
    harness = harness_of(num_blocks=26, max_num_sequences=2)
    for number in range(2):
        harness.add(add_message(number, prompt_of(number, 40), max_tokens=20))
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert harness.runner.num_restored > 0
    harness.assert_all_as_alone()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("checkpoints", [1, 8])  # the state leaves for another, or with its blocks
def test_a_state_that_has_left_the_device_comes_back_from_the_host(
    overlap: bool, checkpoints: int
) -> None:
    harness = harness_of(
        checkpoints, num_blocks=26, num_host_blocks=60, num_host_states=8, overlap=overlap
    )
    for number in range(8):
        harness.add(add_message(number, prompt_of(number % 4, 50), max_tokens=3))
        harness.run()
    assert hits(harness) == 4 * 40
    assert harness.runner.num_restored_from_host == 4
    harness.assert_all_as_alone()


def test_a_reset_forgets_the_states_on_the_host() -> None:
    harness = harness_of(num_blocks=26, num_host_blocks=60, num_host_states=8)
    for number in range(8):
        harness.add(add_message(number, prompt_of(number % 4, 50), max_tokens=3))
        harness.run()
        harness.engine.handle(ResetPrefixCache())
    assert hits(harness) == 0
    harness.assert_all_as_alone()


def test_a_failed_step_lets_the_others_begin_again() -> None:
    """It may have changed the states of its rows, which cannot be taken back."""
    harness = harness_of()
    fail_at(harness.runner, 4)
    for number in range(3):
        harness.add(add_message(number, prompt_of(number, 30), max_tokens=12))
    harness.run()
    assert list(harness.ends.values()).count("failed") == 1
    assert harness.engine.stats().num_preemptions >= 2
    harness.assert_all_as_alone()


def test_a_poisoned_sequence_leaves_no_checkpoint() -> None:
    harness = harness_of()
    harness.runner.poisoned = {KEYS[0]}
    image = (ImageSpan(KEYS[0], 42, 4),)
    harness.add(add_message(0, prompt_of(1, 50), images=image, max_tokens=3))
    harness.run()
    assert harness.ends[0] == "failed"
    harness.runner.poisoned = set()
    harness.add(add_message(1, prompt_of(1, 50), images=image, max_tokens=3))
    harness.run()
    assert hits(harness) == 0
    harness.assert_all_as_alone()


def test_steps_that_yield_several_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be taken back"):
        harness_of(max_tokens_per_step=2)


# Controls: what the fake runner must notice.


class UnrestoredRunner(FakeRunner):
    """A runner that can stop to restore the states of rows."""

    restores = True

    def start_state(self, start: RowStart) -> None:
        if self.restores:
            super().start_state(start)


def control(change: str) -> None:
    harness = Harness(has_states=True, num_checkpoints=8, runner=UnrestoredRunner)
    harness.add(add_message(0, prompt_of(1, 50), max_tokens=3))
    harness.run()
    if change == "not restored":
        assert isinstance(harness.runner, UnrestoredRunner)
        harness.runner.restores = False
    elif change == "another's":
        harness.runner.checkpoints = dict.fromkeys(harness.runner.checkpoints, 12345)
    harness.add(add_message(1, [*prompt_of(1, 45), 5], max_tokens=3))
    harness.run()


@pytest.mark.parametrize("change", ["not restored", "another's"])
def test_control_a_state_that_is_not_the_prefixs(change: str) -> None:
    control("")
    with pytest.raises(AssertionError, match="recurrent state"):
        control(change)


# The checkpoints themselves.


def test_the_least_recently_used_checkpoint_makes_room() -> None:
    pool = RecurrentStates(runner_info(has_states=True, num_checkpoints=2))
    for name in (b"a", b"b"):
        pool.commit(((1, pool.reserve(name, ())),))
    pool.use(b"a")
    slot = pool.reserve(b"c", ())
    assert b"b" not in pool and b"a" in pool
    assert pool.reserve(b"c", ()) == pool.reserve(b"a", ()) == -1, "there already"
    pool.abandon(((1, slot),))
    assert pool.reserve(b"d", ()) == slot
    assert pool.reserve(b"e", {pool.use(b"a")}) == -1, "no slot that may be used"
    check_checkpoints(pool, {b"a"})
    with pytest.raises(AssertionError, match="without its KV"):
        check_checkpoints(pool, ())


@pytest.mark.parametrize(
    ("length", "image", "start", "least", "expected"),
    [
        (100, None, 0, 1, (80,)),
        (100, None, 80, 1, ()),
        (105, None, 0, 1, (96,)),
        (104, None, 0, 1, (80,)),  # 8 tokens of the template
        (100, (10, 37), 0, 1, (32, 80)),
        (100, (10, 38), 0, 1, (48, 80)),
        (100, (10, 37), 32, 1, (80,)),
        (100, (10, 37), 0, 49, (80,)),
        (100, (10, 20), 0, 60, (80,)),
        (100, (60, 35), 0, 1, (80,)),
        (9, None, 0, 1, ()),
    ],
)
def test_where_a_prompts_state_is_kept(
    length: int, image: tuple[int, int] | None, start: int, least: int, expected: tuple[int, ...]
) -> None:
    spans = () if image is None else (ImageSpan(KEYS[0], *image),)
    positions = np.tile(np.arange(length, dtype=np.int32), (3, 1))
    message = add_message(0, prompt_of(0, length), images=spans, positions=positions)
    sequence = Sequence(message)
    assert checkpoint_boundaries(sequence, 16, start, least) == expected
