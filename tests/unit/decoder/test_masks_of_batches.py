"""Token masks of sequences in the background, which steps leave out."""

import pytest

from tests.engine_harness import Harness, prompt_of
from tests.fake_runner import add_message


@pytest.mark.parametrize("mask_after", [0, 1, 2, 3])
def test_a_line_with_a_grammar_that_a_step_leaves_out_gets_its_mask(mask_after: int) -> None:
    """The mask may come while no launched step samples the line. The fake runner asserts that a
    step that is sampled has all of its masks.
    """
    harness = Harness(
        num_blocks=200, max_num_sequences=8, max_batched_tokens=16, mask_after=mask_after
    )
    fields = {"max_tokens": 40, "background": True, "token_masks": True}
    harness.add(add_message(1, prompt_of(1, 8), tenant="a/batch", **fields))
    harness.add(add_message(2, prompt_of(2, 8), tenant="b", max_tokens=60))
    for _ in range(6):
        harness.step()
    harness.add(add_message(3, prompt_of(3, 60), tenant="b", max_tokens=5))
    harness.run()
    harness.assert_all_as_alone()
