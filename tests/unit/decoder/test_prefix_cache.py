"""What a sequence finds in the prefix cache, through the engine."""

import numpy as np
import pytest
from msgspec import structs

from services.decoder.engine.messages import ImageSpan
from tests.engine_harness import KEYS, Harness, prompt_of
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
