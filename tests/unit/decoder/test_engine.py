"""The engine on a fake runner: events, images, masks, preemption and failures, case by case."""

import numpy as np
import pytest

from services.decoder.engine.messages import ImageSpan, TokenMasks
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, expected_tokens, failing


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [8, 11, 64])
@pytest.mark.parametrize("blocks", [16, 64])
def test_tokens_do_not_depend_on_chunks_blocks_or_overlap(overlap, budget, blocks):
    harness = Harness(overlap=overlap, max_batched_tokens=budget, num_blocks=blocks)
    for number in range(6):
        spans = (ImageSpan(KEYS[number % 2], 3, 9),) if number % 2 else ()
        harness.add(
            add_message(number, prompt_of(number, 14 + number), images=spans, max_tokens=25)
        )
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    if blocks == 16:
        assert harness.engine.stats().num_preemptions > 0


def test_an_image_is_released_with_the_first_token():
    harness = Harness(max_batched_tokens=8)
    spans = (ImageSpan(KEYS[0], 3, 12), ImageSpan(KEYS[1], 16, 4))
    harness.add(add_message(1, prompt_of(1, 24), images=spans, max_tokens=20))
    while not harness.tokens.get(1):
        assert harness.held_images(1) == set(KEYS[:2])
        harness.step()
    assert harness.held_images(1) == set()
    harness.run()
    harness.assert_all_as_alone()
    assert harness.num_wanted == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("blocks", range(7, 12))
def test_a_preempted_sequence_requests_released_images_again(overlap, blocks):
    num_wanted = 0
    for length in range(8, 13):
        harness = Harness(overlap=overlap, prefix_caching=False, num_blocks=blocks, again_after=3)
        for number in range(3):
            spans = (ImageSpan(KEYS[number], 2, 5),)
            prompt = prompt_of(number, length + number)
            harness.add(add_message(number, prompt, images=spans, max_tokens=12))
        harness.run()
        harness.assert_all_as_alone()
        harness.assert_empty()
        num_wanted += harness.num_wanted
    assert num_wanted > 0


def test_a_stop_id_ends_a_sequence_and_its_extra_token_is_discarded():
    message = add_message(1, prompt_of(1, 9), max_tokens=30)
    tokens, _ = expected_tokens(message, 256)
    stop = tokens[4]
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=30, stop_token_ids=(stop,)))
    harness.run()
    assert harness.tokens[1] == tokens[: tokens.index(stop) + 1]
    assert harness.ends[1] == "stop"
    computed = max(start + length for batch in harness.runner.batches for _, start, length in batch)
    assert computed == 9 + tokens.index(stop) + 1  # one token more than needed: the overlap's
    harness.assert_empty()


def test_stop_ids_do_not_count_before_min_tokens():
    tokens, _ = expected_tokens(add_message(1, prompt_of(1, 9), max_tokens=30), 256)
    harness = Harness()
    harness.add(
        add_message(1, prompt_of(1, 9), max_tokens=9, stop_token_ids=(tokens[2],), min_tokens=5)
    )
    harness.run()
    assert harness.ends[1] == "length"
    assert harness.tokens[1] == tokens[:9]


def test_nothing_is_scheduled_beyond_max_tokens():
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 5), max_tokens=3))
    harness.run()
    assert [batch for batch in harness.runner.batches] == [[(1, 0, 5)], [(1, 5, 1)], [(1, 6, 1)]]


def test_the_model_length_ends_a_sequence():
    harness = Harness(max_model_len=20)
    harness.add(add_message(1, prompt_of(1, 12), max_tokens=1000))
    harness.run()
    assert (len(harness.tokens[1]), harness.ends[1]) == (8, "length")


@pytest.mark.parametrize(
    ("length", "info", "words"),
    [
        (0, {}, "empty"),
        (256, {}, "context length is 256 tokens"),
        (33, {"num_blocks": 8, "max_model_len": 1000}, "context length is 33 tokens"),
    ],
)
def test_a_sequence_that_can_never_run_is_refused_at_once(length, info, words):
    harness = Harness(**info)
    harness.add(add_message(1, prompt_of(1, length), max_tokens=5))
    harness.add(add_message(2, prompt_of(2, 5), max_tokens=2))
    harness.run()
    assert harness.ends == {1: "refused", 2: "length"}
    assert words in harness.messages[1]
    assert harness.codes == {1: "context_length_exceeded" if length else "invalid_request", 2: ""}


def test_an_image_for_a_model_without_images_is_refused():
    harness = Harness(num_features=0)
    span = (ImageSpan(KEYS[0], 2, 8),)
    harness.add(add_message(1, prompt_of(1, 20), images=span, max_tokens=5), images_ready=False)
    harness.run()
    assert harness.ends == {1: "refused"} and harness.codes == {1: "invalid_request"}
    assert "takes no images" in harness.messages[1]
    harness.assert_empty()


def test_a_sequence_that_fills_all_blocks_runs():
    harness = Harness(num_blocks=8, max_model_len=1000)
    harness.add(add_message(1, prompt_of(1, 30), max_tokens=500))
    harness.add(add_message(2, prompt_of(2, 20), max_tokens=500))
    harness.run()
    harness.assert_all_as_alone()
    assert len(harness.tokens[1]) == 3


def test_prefill_waits_before_an_image_that_is_not_there():
    harness = Harness()
    spans = (ImageSpan(KEYS[0], 6, 4), ImageSpan(KEYS[1], 12, 4))
    harness.add(add_message(1, prompt_of(1, 20), images=spans, max_tokens=2), images_ready=False)
    for _ in range(4):
        harness.step()
    assert harness.runner.batches == [[(1, 0, 6)]]
    assert not harness.engine.has_work
    harness.image(1, KEYS[1])
    assert not harness.engine.has_work
    harness.image(1, KEYS[0])
    harness.run()
    assert harness.runner.batches[1] == [(1, 6, 14)]
    harness.assert_all_as_alone()


def test_a_stalled_sequence_makes_room_for_one_that_can_run():
    harness = Harness(num_blocks=10, max_num_sequences=2)
    span = (ImageSpan(KEYS[0], 8, 8),)
    harness.add(add_message(1, prompt_of(1, 24), images=span, max_tokens=4), images_ready=False)
    harness.step()
    harness.add(add_message(2, prompt_of(2, 28), max_tokens=4))
    harness.run()
    assert harness.ends == {2: "length"}
    harness.image(1, KEYS[0])
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_a_sequence_that_has_just_stalled_makes_room_in_the_next_step():
    harness = Harness(num_blocks=10, max_num_sequences=2)
    span = (ImageSpan(KEYS[0], 8, 8),)
    harness.add(add_message(1, prompt_of(1, 24), images=span, max_tokens=4), images_ready=False)
    harness.add(add_message(2, prompt_of(2, 28), max_tokens=4))
    harness.run()
    assert harness.ends == {2: "length"}


def test_a_sequence_waiting_for_its_image_does_not_hold_up_those_behind_it():
    harness = Harness(max_num_sequences=1)
    span = (ImageSpan(KEYS[0], 0, 8),)
    harness.add(add_message(1, prompt_of(1, 24), images=span, max_tokens=4), images_ready=False)
    harness.add(add_message(2, prompt_of(2, 28), max_tokens=4))
    harness.run()
    assert harness.ends == {2: "length"}


def test_a_long_prompt_leaves_half_of_the_budget_to_those_behind_it():
    harness = Harness(max_batched_tokens=16)
    harness.add(add_message(1, prompt_of(1, 100), max_tokens=2))
    harness.add(add_message(2, prompt_of(2, 8), max_tokens=2))
    harness.step()
    assert sorted(harness.runner.batches[0]) == [(1, 0, 8), (2, 0, 8)]
    harness.run()
    harness.assert_all_as_alone()


def test_prompts_never_starve_decoding():
    harness = Harness(max_batched_tokens=16, overlap=False)
    harness.add(add_message(1, prompt_of(1, 4), max_tokens=20))
    harness.step()
    harness.add(add_message(2, prompt_of(2, 200), max_tokens=2))
    for _ in range(10):
        harness.step()
        assert harness.runner.batches[-1][0][0] == 1
    harness.run()
    harness.assert_all_as_alone()


def test_an_aborted_sequence_frees_its_blocks_before_the_next_step():
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 40), max_tokens=50))
    for _ in range(5):
        harness.step()
    harness.engine.abort(1)
    stats = harness.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    harness.run()
    assert harness.ends == {1: "aborted"}
    harness.engine.abort(1)
    assert not harness.engine.has_work


def test_an_aborted_sequence_ends_only_when_no_step_reads_its_images():
    harness = Harness()
    span = (ImageSpan(KEYS[0], 2, 8),)
    harness.add(add_message(1, prompt_of(1, 40), images=span, max_tokens=50))
    harness.step()
    harness.engine.abort(1)
    harness.run()  # the runner asserts that the image is there when the step runs
    assert harness.ends == {1: "aborted"}


def test_a_non_finite_sequence_fails_alone_and_is_never_found_again():
    harness = Harness()
    harness.runner.poisoned.add(KEYS[0])
    for number, key in ((1, KEYS[0]), (2, KEYS[1])):
        harness.add(
            add_message(number, prompt_of(1, 20), images=(ImageSpan(key, 4, 8),), max_tokens=4)
        )
    harness.run()
    assert harness.ends == {1: "failed", 2: "length"}
    assert "not finite" in harness.messages[1] and harness.codes[1] == "internal_error"
    harness.runner.poisoned.clear()
    harness.add(add_message(3, prompt_of(1, 20), images=(ImageSpan(KEYS[0], 4, 8),), max_tokens=4))
    harness.run()
    assert harness.ends[3] == "length"
    assert [(3, 4, 16)] in harness.runner.batches  # only the text before the image was found
    assert harness.tokens[3] == expected_tokens(harness.added[3], 256)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_out_of_memory_costs_the_largest_chunk_only(overlap, caplog):
    harness = Harness(overlap=overlap)
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=12))
    harness.add(add_message(2, prompt_of(2, 6), max_tokens=12))
    for _ in range(3):
        harness.step()
    with failing(harness.runner, lambda step: step.compute.num_tokens > 20, MemoryError("too big")):
        harness.add(add_message(3, prompt_of(3, 30), max_tokens=5))
        harness.add(add_message(4, prompt_of(4, 7), max_tokens=5))
        harness.run()
    assert harness.ends == {1: "length", 2: "length", 3: "failed", 4: "length"}
    assert "out of memory" in harness.messages[3] and harness.codes[3] == "internal_error"
    assert "lower DECODER_MAX_NUM_SEQUENCES" in caplog.text
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_other_exceptions_are_the_callers():
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=12))
    with (
        failing(harness.runner, lambda step: True, RuntimeError("device lost")),
        pytest.raises(RuntimeError, match="device lost"),
    ):
        harness.step()


def test_logprobs_are_reported_where_asked_for():
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=2))
    harness.add(add_message(2, prompt_of(2, 8), max_tokens=2, top_logprobs=1))
    found: dict[int, int] = {1: 0, 2: 0}
    while harness.engine.has_work:
        done = harness.engine.step()
        for event in done.events if done else ():
            assert all(lp.top_token_ids == [event.token_ids[0]] for lp in event.logprobs)
            found[event.sequence_id] += len(event.logprobs)
    assert found == {1: 0, 2: 2}


def test_times_are_counted_from_the_arrival():
    harness = Harness()
    harness.engine.add(add_message(1, prompt_of(1, 8), max_tokens=2))
    events = []
    while not any(event.end for event in events):
        done = harness.engine.step()
        events += done.events if done else []
    assert [event.start is not None for event in events] == [True, False]
    assert 0 <= events[0].start.first_scheduled_s <= events[0].start.first_token_s


# Masks.


def test_prefill_does_not_wait_for_the_mask_of_the_first_token():
    harness = Harness(mask_after=3)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=3, token_masks=True))
    for _ in range(2):
        harness.step()
    assert harness.runner.batches == [[(1, 0, 8)]]
    assert not harness.engine.has_work
    harness.run()
    harness.assert_all_as_alone()


def test_a_sequence_whose_tokens_are_all_masked_fails_alone():
    harness = Harness()
    harness.add(add_message(2, prompt_of(2, 9), max_tokens=8))
    message = add_message(1, prompt_of(1, 9), max_tokens=8, token_masks=True)
    harness.runner.messages[1] = harness.added[1] = message
    harness.engine.add(message)
    harness.engine.mask_ready(1, 0, np.zeros(32, np.int32))
    harness.run()
    assert harness.ends == {1: "refused", 2: "length"}
    assert "leave no token" in harness.messages[1] and harness.codes[1] == "no_token_allowed"
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_a_mask_for_another_token_fails_its_sequence():
    harness = Harness()
    message = add_message(1, prompt_of(1, 9), max_tokens=8, token_masks=True)
    harness.added[1] = message
    harness.engine.add(message)
    harness.engine.mask_ready(1, 1, np.empty(0, np.int32))
    harness.engine.mask_ready(7, 0, np.empty(0, np.int32))  # has ended already
    harness.step()
    assert harness.ends == {1: "failed"}
    assert "token 1, but token 0 is next" in harness.messages[1]
    harness.assert_empty()


def test_masked_sequences_that_hold_all_rows_leave_the_engine_idle():
    harness = Harness(max_num_sequences=1, mask_after=4)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=2, token_masks=True))
    harness.add(add_message(2, prompt_of(2, 9), max_tokens=2))
    harness.run()
    harness.assert_all_as_alone()


@pytest.mark.parametrize("others", [0, 1])
def test_the_engine_waits_for_late_masks_while_the_device_computes(others):
    """Then it does not, unless nobody else could be sampled."""
    now = 1.0
    harness = Harness(mask_after=2, clock=lambda: now)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=8, token_masks=True))
    for number in range(others):
        harness.add(add_message(2 + number, prompt_of(2, 9), max_tokens=20))
    engine = harness.engine
    while not engine.waits:
        harness.step()
    harness.runner.computes_at_once = True
    assert engine.waits == (not others)
    now += 0.0199
    assert engine.waits == (not others)
    now += 0.0002
    assert not engine.waits
    harness.step()
    assert engine.stats().num_late_masks == 1
    harness.run()
    harness.assert_all_as_alone()


def test_a_step_with_others_is_sampled_before_the_device_has_computed_it():
    """Steps of 2 ms; the host turns in no time."""
    now = 1.0
    harness = Harness(mask_after=0, clock=lambda: now)
    for number in (1, 2):
        masked = number == 1
        harness.add(add_message(number, prompt_of(1, 9), max_tokens=20, token_masks=masked))
    for _ in range(6):
        now += 0.002
        harness.step()
    harness.mask_after = 3
    while not harness.engine.waits:
        now += 0.002
        harness.step()
    now += 0.0019
    assert harness.engine.waits
    now += 0.00006
    assert not harness.engine.waits
    harness.run()
    harness.assert_all_as_alone()


def waiting_engine(**options: int) -> Harness:
    """Two sequences decode, one of them with masks, which are missing now."""
    harness = Harness(mask_after=0, **options)
    for number in (1, 2):
        masked = number == 1
        harness.add(add_message(number, prompt_of(1, 9), max_tokens=20, token_masks=masked))
    for _ in range(6):
        harness.step()
    harness.mask_after = 3
    while not harness.engine.waits:
        harness.step()
    return harness


def test_a_step_is_planned_and_prepared_while_masks_are_missing():
    harness = waiting_engine()
    executed = []
    harness.runner.on_execute = executed.append
    harness.engine.plan()
    harness.engine.plan()
    (step,) = harness.runner.prepared
    harness.engine.mask_ready(1, harness.engine.find(1).num_generated, np.empty(0, np.int32))
    harness.masks_due.clear()  # it has come
    assert not harness.engine.waits
    harness.step()
    assert [one.compute.to_bytes() for one in executed] == [step.compute.to_bytes()]


@pytest.mark.parametrize("event", ["missing", "add", "abort"])
def test_a_plan_is_made_anew_when_other_sequences_take_part(event):
    harness = waiting_engine()
    harness.engine.plan()
    assert harness.engine.planned is not None
    if event == "add":
        harness.add(add_message(3, prompt_of(3, 9), max_tokens=4))
    elif event == "abort":
        harness.engine.abort(2)
    harness.step()
    ran = {"missing": {2}, "add": {2, 3}, "abort": set()}
    assert harness.launches[-1] == ran[event]
    harness.run()
    harness.assert_all_as_alone()


@pytest.mark.parametrize(("blocks", "plans"), [(8, True), (4, False)])
def test_a_plan_takes_no_blocks_from_anybody(blocks, plans):
    harness = waiting_engine(num_blocks=blocks, block_size=8)
    harness.engine.plan()
    assert (harness.engine.planned is not None) == plans
    harness.run()
    harness.assert_all_as_alone()


@pytest.mark.parametrize("free", [False, True])
def test_rows_with_masks_alone_wait_a_little_longer(free):
    """Steps of 2 ms; the host turns in no time; one mask of 40 is late, for which 0.1 ms is due."""
    now = 1.0
    harness = Harness(
        mask_after=0,
        clock=lambda: now,
        max_num_sequences=40,
        max_batched_tokens=512,
        num_blocks=400,
    )
    for number in range(40):
        masked = number > 0 or not free
        harness.add(add_message(number, prompt_of(1, 9), max_tokens=20, token_masks=masked))
    for _ in range(6):
        now += 0.002
        harness.step()
    engine = harness.engine
    while engine.gate.unsampled is None:
        now += 0.002
        harness.step()
    engine.find(39).token_mask = None
    now += 0.00196
    assert engine.waits == (not free)
    now += 0.00008
    assert engine.waits == (not free)
    now += 0.00002
    assert not engine.waits


def test_masks_of_a_process_that_has_ended_are_ignored():
    harness = Harness(mask_after=1000)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=8, token_masks=True))
    masks = TokenMasks([1], [0], [-1], link=0)
    harness.engine.handle(masks)
    assert harness.engine.find(1).awaits_mask
    harness.engine.gate.rows[0] = np.zeros((1, 32), np.int32)
    harness.engine.handle(masks)
    assert not harness.engine.find(1).awaits_mask


def test_the_engine_waits_for_nothing_without_masks():
    harness = Harness()
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=8))
    while harness.engine.has_work:
        assert not harness.engine.waits
        harness.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_gauges_are_sent_when_they_change_without_a_step(overlap):
    harness = Harness(overlap=overlap, max_num_sequences=1)
    span = ImageSpan(KEYS[0], 0, 4)
    harness.add(add_message(1, prompt_of(1, 9), images=(span,), max_tokens=3), images_ready=False)
    done = harness.engine.step()
    assert done is not None
    stats = done.stats
    assert (stats.num_running, stats.num_waiting, stats.num_lacking_images) == (0, 1, 1)
    assert harness.engine.step() is None
    for number in (2, 3):  # there is one row
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=30))
    harness.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_lacking_images) == (1, 2, 1)
    harness.image(1, span.key)
    harness.run()
    harness.assert_empty()


def test_a_sequence_that_waits_for_its_mask_alone_lacks_no_image():
    harness = Harness(overlap=True)
    span = ImageSpan(KEYS[0], 0, 4)
    waits = {"token_masks": True, "max_tokens": 3}
    harness.add(add_message(1, prompt_of(1, 1), **waits))
    harness.add(add_message(2, prompt_of(2, 9), images=(span,), **waits), images_ready=False)
    harness.engine.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_lacking_images) == (0, 2, 1)
    harness.image(2, span.key)
    harness.engine.step()
    assert harness.engine.stats().num_lacking_images == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_is_busy_while_a_step_is_in_flight(overlap):
    clock = [0.0]
    harness = Harness(overlap=overlap, clock=lambda: clock[0])
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=4))
    num_steps = 0
    while harness.engine.has_work:
        harness.step()
        clock[0] += 1.0
        num_steps += 1
    busy_s = harness.engine.stats().busy_s
    # Fake steps take no time; with overlap they are in flight until the next one is launched.
    assert busy_s == (num_steps - 1 if overlap else 0.0)
    clock[0] += 100.0
    assert harness.engine.stats().busy_s == busy_s
