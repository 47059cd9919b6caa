"""Steps that yield several tokens for a sequence, planned before it is known how many."""

import pytest

from tests.engine_harness import Harness, prompt_of
from tests.fake_runner import add_message, expected_tokens
from tests.integrity import check_engine


def scripted(harness: Harness, counts: list[int]) -> None:
    """The next steps yield these numbers of tokens for each sequence, as far as limits allow."""
    script = iter(counts)

    def randint(low: int, high: int) -> int:
        return max(low, min(high, next(script, high)))

    harness.runner.random.randint = randint  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_yields_one_to_k_tokens_in_one_event(overlap):
    harness = Harness(max_tokens_per_step=4, overlap=overlap)
    scripted(harness, [1, 4, 1, 2, 3])
    harness.engine.add(message := add_message(1, prompt_of(1, 9), max_tokens=20, top_logprobs=1))
    found, events = [], []
    while harness.engine.has_work:
        done = harness.engine.step()
        check_engine(harness.engine)
        events += [event for event in done.events if event.token_ids] if done else []
    assert [len(event.token_ids) for event in events][:5] == [1, 4, 1, 2, 3]
    for event in events:
        assert [lp.top_token_ids for lp in event.logprobs] == [[t] for t in event.token_ids]
        found += event.token_ids
    assert found == expected_tokens(message, 256)[0]
    starts = [start for ((_, start, _),) in harness.runner.batches]
    # Planned ahead, a step counts with all that the one before may yield, which is corrected.
    assert starts[:5] == ([0, 9, 13, 17, 18] if overlap else [0, 9, 13, 14, 16])


def test_rows_of_k_tokens_are_planned_in_every_step_and_reserve_for_all_of_them():
    harness = Harness(max_tokens_per_step=4, num_blocks=120)
    scripted(harness, [1, 2, 4, 1, 1, 3] * 40)
    for number in range(3):
        harness.add(add_message(number, prompt_of(number, 5), max_tokens=60))
    sequences = harness.engine.sequences
    for step in range(15):
        harness.step()
        assert step == 0 or harness.launches[-1] == {0, 1, 2}
        for sequence in sequences.values():
            assert sequence.capacity >= sequence.num_computed_tokens
            most = len(sequence.token_ids) + 4 * (sequence.num_in_flight + 1)
            assert len(sequence.block_table) <= -(-most // 4)
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("position", range(12))
def test_blocks_that_end_where_an_answer_stops_hold_what_their_ids_say(overlap, position):
    """The last accepted token is computed by the next step, if there is one: a block with it is
    found by others only then. The runner asserts what the second sequence reads.
    """
    tokens, _ = expected_tokens(add_message(1, prompt_of(1, 9), max_tokens=30), 256)
    harness = Harness(max_tokens_per_step=4, overlap=overlap)
    scripted(harness, [1, 2, 1, 3, 2, 1, 1])
    stop = (tokens[position],)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=30, stop_token_ids=stop))
    harness.run()
    again = prompt_of(1, 9) + harness.tokens[1] + [3, 4, 5]
    harness.add(add_message(2, again, max_tokens=4))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


@pytest.mark.parametrize("position", range(8))
def test_a_stop_id_in_the_middle_of_a_steps_tokens_ends_the_sequence(position):
    tokens, _ = expected_tokens(add_message(1, prompt_of(1, 9), max_tokens=30), 256)
    harness = Harness(max_tokens_per_step=4)
    scripted(harness, [1, 4, 4])
    stop = tokens[position]
    message = add_message(1, prompt_of(1, 9), max_tokens=30, stop_token_ids=(stop,), top_logprobs=1)
    harness.add(message)
    harness.run()
    assert (harness.tokens[1], harness.ends[1]) == (tokens[: tokens.index(stop) + 1], "stop")
    harness.assert_empty()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_step_yields_more_than_max_tokens_leaves(max_tokens):
    harness = Harness(max_tokens_per_step=4, num_blocks=4, max_model_len=16)
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=max_tokens))
    harness.run()
    harness.assert_all_as_alone()
    assert (len(harness.tokens[1]), harness.ends[1]) == (max_tokens, "length")
