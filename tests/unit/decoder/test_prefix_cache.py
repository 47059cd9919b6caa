"""What a sequence finds in the prefix cache, through the engine."""

import sys

import numpy as np
import pytest
from msgspec import structs

from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.schedule.step_cost import Limit, StepLoad
from tests.engine_harness import KEYS, Harness, Untimed, prompt_of
from tests.engine_programs import fail_at
from tests.fake_runner import add_message


def test_a_repeated_prompt_is_found_and_its_last_block_computed_again():
    harness = Harness()
    for number in (1, 2):
        harness.add(add_message(number, prompt_of(1, 16), max_tokens=3))
        harness.run()
    assert harness.runner.batches[-3][0] == (2, 12, 4)
    assert harness.engine.stats().num_prefix_hit_tokens == 12
    harness.assert_all_as_alone()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_turn_finds_the_completion_too(overlap):
    harness = Harness(overlap=overlap)
    first = add_message(1, prompt_of(1, 10), max_tokens=11)
    harness.add(first)
    harness.run()
    # 20 of the 21 tokens were computed: five blocks of four.
    harness.add(add_message(2, prompt_of(1, 10) + harness.tokens[1] + [5, 6, 7], max_tokens=2))
    harness.run()
    assert harness.engine.stats().num_prefix_hit_tokens == 20
    harness.assert_all_as_alone()


def test_a_continued_sequence_finds_its_completion_which_does_not_count_as_prompt():
    harness = Harness()
    message = add_message(1, prompt_of(1, 10), max_tokens=11)
    harness.add(message)
    harness.run()
    known = np.array(harness.tokens[1][:8], "<i4").tobytes()
    harness.add(structs.replace(message, sequence_id=2, generated_token_ids=known))
    harness.run()
    assert harness.tokens[2] == harness.tokens[1][8:]
    assert (2, 16, 2) in [chunk for batch in harness.runner.batches for chunk in batch]
    assert harness.engine.stats().num_prefix_hit_tokens == 10


@pytest.mark.parametrize("overlap", [True, False])
def test_a_completion_is_found_while_it_goes_on(overlap):
    harness = Harness(overlap=overlap)
    harness.add(add_message(1, prompt_of(1, 10), max_tokens=60))
    while len(harness.tokens.get(1, ())) < 20:
        harness.step()
    harness.add(add_message(2, prompt_of(1, 10) + harness.tokens[1][:12], max_tokens=2))
    harness.step()
    assert harness.engine.stats().num_prefix_hit_tokens == 20
    harness.run()
    harness.assert_all_as_alone()


@pytest.mark.parametrize("change", ["image", "salt", "positions", "offset"])
def test_what_decides_the_keys_and_values_decides_the_prefix(change):
    prompt = prompt_of(1, 24)
    positions = np.tile(np.arange(24), (3, 1))
    span = ImageSpan(KEYS[0], 4, 8)
    first = add_message(1, prompt, images=(span,), positions=positions, max_tokens=3)
    other = positions.copy()
    other[1, 5] += 1
    second = {
        "image": add_message(
            2, prompt, images=(ImageSpan(KEYS[1], 4, 8),), positions=positions, max_tokens=3
        ),
        "salt": add_message(
            2, prompt, images=(span,), positions=positions, salt=b"tenant", max_tokens=3
        ),
        "positions": add_message(2, prompt, images=(span,), positions=other, max_tokens=3),
        "offset": add_message(
            2, prompt, images=(ImageSpan(KEYS[0], 5, 8),), positions=positions, max_tokens=3
        ),
    }[change]
    harness = Harness()
    for message in (first, second):
        harness.add(message)
        harness.run()
    assert harness.engine.stats().num_prefix_hit_tokens == (0 if change == "salt" else 4)
    harness.assert_all_as_alone()


def test_text_shares_its_beginning_with_a_prompt_that_has_an_image():
    prompt = prompt_of(1, 24)
    positions = np.tile(np.arange(24), (3, 1))
    positions[:, 16:] -= 3
    harness = Harness()
    harness.add(add_message(1, prompt[:12], max_tokens=2))
    harness.run()
    harness.add(
        add_message(
            2, prompt, images=(ImageSpan(KEYS[0], 12, 8),), positions=positions, delta=-3,
            max_tokens=12,
        )
    )  # fmt: skip
    harness.run()
    assert harness.engine.stats().num_prefix_hit_tokens == 12
    harness.assert_all_as_alone()


@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_of_a_search_share_the_blocks_that_their_step_computes(overlap):
    """As the pairs of a query and its documents do, which come at once."""
    harness = Harness(overlap=overlap, task="rank", block_size=4)
    for number in range(3):
        harness.add(add_message(number, prompt_of(7, 10) + prompt_of(number, 9), max_tokens=1))
    harness.run()
    assert harness.runner.batches == [[(0, 0, 19), (1, 8, 11), (2, 8, 11)]]
    assert harness.engine.stats().num_prefix_hit_tokens == 16
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_prompts_of_a_chat_model_share_blocks_from_the_next_step_on():
    harness = Harness(block_size=4)
    for number in range(3):
        harness.add(add_message(number, prompt_of(7, 10) + prompt_of(number, 9), max_tokens=1))
    harness.run()
    assert harness.engine.stats().num_prefix_hit_tokens == 0


def test_a_chunk_of_one_token_shares_its_block_from_the_next_step_on():
    """A kernel for decodes may store its key while others attend."""
    harness = Harness(task="embed", overlap=False, block_size=4, max_batched_tokens=7)
    harness.add(add_message(0, prompt_of(7, 8), max_tokens=1))
    harness.step()
    harness.add(add_message(1, prompt_of(7, 9), max_tokens=1))
    harness.run()
    assert harness.runner.batches == [[(0, 0, 7)], [(0, 7, 1), (1, 4, 5)]]
    harness.assert_all_as_alone()


@pytest.mark.parametrize("budget", [40, 32, 21])
@pytest.mark.parametrize("failing", [0, 1])
def test_blocks_of_a_step_that_was_not_launched_are_not_found(budget, failing):
    harness = Harness(task="rank", block_size=4, max_batched_tokens=budget)
    fail_at(harness.runner, failing)
    for number in range(4):
        harness.add(add_message(number, prompt_of(7, 12) + prompt_of(number, 9), max_tokens=1))
    harness.run()
    assert list(harness.ends.values()).count("failed") == 1
    harness.assert_all_as_alone()
    harness.assert_empty()


class _NoneBehindAPrefix(Untimed):
    """Leaves no time for tokens behind a cached prefix beside other tokens."""

    def fitting_tokens(
        self, load: StepLoad, start: int, limit: Limit, left: int = sys.maxsize
    ) -> int:
        return 0 if start and load.tokens else super().fitting_tokens(load, start, limit, left)


def test_a_sequence_without_a_chunk_gives_up_blocks_of_a_step_that_was_not_launched():
    harness = Harness(task="rank", block_size=4, step_cost=_NoneBehindAPrefix())
    fail_at(harness.runner, 0)
    for number in range(2):
        harness.add(add_message(number, prompt_of(7, 12) + prompt_of(number, 9), max_tokens=1))
    harness.step()
    assert harness.engine.stats().num_prefix_hit_tokens == 12  # admitted beside the first sequence
    harness.run()
    assert harness.runner.batches == [[(1, 0, 21)]]
    assert (harness.ends[0], harness.ends[1]) == ("failed", "length")
    harness.assert_all_as_alone()
