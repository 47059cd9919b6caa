"""Steps that are launched before the host knows their drafts, on a fake device whose model drafts:
whatever happens to a sequence meanwhile, each ends once with the tokens that it has alone.
"""

import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.decoder.engine.messages import AddSequence
from services.decoder.engine.schedule.head_drafts import HeadSources
from tests.cases import cases
from tests.engine_harness import Harness, prompt_of
from tests.engine_programs import Arrival, engines, failures, play, programs
from tests.fake_runner import add_message, expected_tokens, failing
from tests.layer_runner import LayerRunner, RandomPace

# What keeps steps from being launched ahead is rarer than the rest.
EXTRAS = ("presence_penalty", "token_masks", "top_logprobs", "prediction", "", "", "", "")


class Varied(NamedTuple):
    """An `Arrival` with one more wish.

    Attributes:
        arrival: the arrival.
        extra: the wish, one of `EXTRAS`.
    """

    arrival: Arrival
    extra: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arrival, name)

    def message(self, number: int, max_model_len: int) -> AddSequence:
        arrival = replace(self.arrival, token_masks=self.extra == "token_masks")
        message = arrival.message(number, max_model_len)
        if self.extra == "prediction":
            tokens, _ = expected_tokens(message, max_model_len)
            tokens[len(tokens) // 2] += 1
            message.prediction = np.array(tokens, "<i4").tobytes()
        elif self.extra in ("presence_penalty", "top_logprobs"):
            message.sampling = structs.replace(message.sampling, **{self.extra: 1})
        return message


class RandomInbox(NamedTuple):
    """An inbox in which a message has arrived in a share of the times when the engine asks.

    Attributes:
        share: the share.
        draw: source of random numbers.
    """

    share: float
    draw: random.Random

    def has_messages(self) -> bool:
        return self.draw.random() < self.share


def harness_of(
    *, right: float = 0.8, share: float = 1.0, seed: int = 0, **options: Any
) -> tuple[Harness, LayerRunner]:
    """An engine whose model's layer drafts behind a share of steps."""
    harness = Harness(runner=LayerRunner, has_draft_head=True, **options)
    runner = harness.runner
    assert isinstance(runner, LayerRunner)
    runner.right = right
    speculation = harness.engine.speculation
    speculation.sources, speculation.pace = HeadSources(), RandomPace(share, seed)
    step = harness.engine.step

    def checked() -> Any:
        done = step()
        for event in done.events if done is not None else ():
            if harness.added[event.sequence_id].sampling.top_logprobs is not None:
                found = [-int(each.logprob) for each in event.logprobs]
                assert found == event.token_ids, "log-probabilities of other tokens"
        return done

    harness.engine.step = checked  # type: ignore[method-assign]
    return harness, runner


@pytest.mark.thorough
@settings(max_examples=cases(60, 400), deadline=None)
@given(
    program=programs(seeds=3, shared=20, own=0, last=40),
    extras=st.lists(st.sampled_from(EXTRAS), min_size=14, max_size=14),
    engine=engines(12, 40),
    failure=failures,
    plans=st.booleans(),
    max_drafts=st.integers(1, 5),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    share=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**16),
    messages=st.sampled_from([0.0, 0.3]),
    has_states=st.booleans(),
    host=st.sampled_from([0, 0, 3, 64]),
)
def test_every_sequence_ends_once_with_the_tokens_it_has_alone(
    program, extras, engine, failure, plans, max_drafts, right, share, seed, messages, has_states,
    host,
):  # fmt: skip
    """Arrivals, ends, aborts, preemptions, full memory, grammars, penalties, log-probabilities and
    predictions, between the launch of a step and the arrival of its drafts.
    """
    engine["max_batched_tokens"] = max(engine["max_batched_tokens"], engine["max_num_sequences"])
    states = {"has_states": True, "num_checkpoints": 3} if has_states else {}
    harness, _ = harness_of(
        right=right, share=share, seed=seed, plans=plans, max_drafts=max_drafts,
        num_host_blocks=host, **states, **engine,
    )  # fmt: skip
    harness.engine.drafts.inbox = RandomInbox(messages, random.Random(seed))
    varied = [Varied(*pair) for pair in zip(program, extras, strict=False)]
    play(harness, varied, failure)  # type: ignore[arg-type]


def started(count: int = 3, **options: Any) -> tuple[Harness, LayerRunner]:
    """An engine of `count` sequences, whose last step was launched before its drafts were known."""
    options = {"max_drafts": 3, "num_blocks": 64, "max_num_sequences": 16, **options}
    harness, runner = harness_of(**options)
    for number in range(count):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=40))
    for _ in range(4):
        harness.step()
    assert_ahead(harness)
    return harness, runner


def assert_ahead(harness: Harness) -> None:
    """The newest step was launched ahead of its drafts, and is not read."""
    (_, batch, _) = harness.engine.pending[-1]
    assert any(chunk.group >= 0 for chunk in batch.chunks)


@pytest.mark.parametrize("count", [1, 4])
def test_steps_follow_each_other_without_their_drafts(count: int) -> None:
    harness, runner = started(count)
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    totals = harness.engine.stats().drafts
    assert totals is not None and totals.num_drafts == runner.num_sources > 15 * count
    assert len(runner.batches) < 25


@pytest.mark.parametrize("message_at", [None, 5])
def test_a_lone_sequence_has_no_step_that_waits_for_its_drafts(message_at: int | None) -> None:
    """From its prompt to its last step. A message makes one step wait, and no other."""
    harness, runner = harness_of(max_drafts=3, num_blocks=64, max_num_sequences=16)
    engine, were_ahead = harness.engine, list[bool]()
    engine.drafts.inbox = RandomInbox(0.0, random.Random(0))
    look = engine.drafts.look

    def noted(*arguments: Any, **options: Any) -> Any:
        arrived = float(len(were_ahead) == message_at)
        engine.drafts.inbox = RandomInbox(arrived, random.Random(0))
        following = look(*arguments, **options)
        were_ahead.append(following is not None)
        return following

    engine.drafts.look = noted  # type: ignore[method-assign]
    harness.add(add_message(0, prompt_of(0, 9), max_tokens=60))
    harness.run()
    harness.assert_all_as_alone()
    steps = len(runner.batches)
    assert steps < 30
    # Behind the last step nothing is launched.
    assert were_ahead == [step not in (message_at, steps - 1) for step in range(steps)]


@pytest.mark.parametrize("has_messages", [True, False])
def test_a_request_that_arrives_while_a_step_runs_takes_part_in_the_next(
    has_messages: bool,
) -> None:
    """A step that the host launches without reading its messages would delay the request."""
    harness, runner = started()
    harness.engine.drafts.inbox = RandomInbox(float(has_messages), random.Random(0))
    num_steps = len(runner.batches)
    harness.step()  # reads the step that runs
    harness.add(add_message(7, prompt_of(7, 9), max_tokens=40))
    harness.engine.drafts.inbox = None
    while 7 not in {number for number, _, _ in runner.batches[-1]}:
        harness.step()
    # With the request in it, the step verifies no drafts of the others.
    assert len(runner.batches) - num_steps == (1 if has_messages else 2)
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_a_device_that_does_not_find_its_drafts_is_noticed() -> None:
    """A control of all tests here."""
    harness, runner = started()
    runner.copies = False
    with pytest.raises(AssertionError):
        harness.run()
        harness.assert_all_as_alone()


def test_a_sequence_is_aborted_before_its_drafts_are_read() -> None:
    harness, _ = started()
    harness.engine.abort(1)
    harness.add(add_message(7, prompt_of(7, 9), max_tokens=40))  # it may get the row and the blocks
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    assert list(harness.ends.values()) == ["aborted", "length", "length", "length"]


@pytest.mark.parametrize("has_states", [False, True])
def test_a_sequence_is_preempted_before_its_drafts_are_read(has_states: bool) -> None:
    harness, _ = started(has_states=has_states)
    scheduler = harness.engine.scheduler
    scheduler._preempt(scheduler.running()[0])
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    assert harness.engine.stats().num_preemptions == 1


def test_a_full_device_refuses_a_step_that_is_launched_ahead() -> None:
    """All its sequences but one begin again, and what they draft later is not mixed up with it."""
    harness, runner = started()
    with failing(runner, lambda step: step.compute.draft_sources is not None, MemoryError("once")):
        harness.step()
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    assert sorted(harness.ends.values()) == ["failed", "length", "length"]


def test_a_sequence_ends_within_the_tokens_before_its_drafts() -> None:
    """It takes no part in the step that is launched ahead, and the others do."""
    harness, runner = harness_of(max_drafts=3, max_num_sequences=16, right=1.0)
    harness.add(add_message(0, prompt_of(0, 9), max_tokens=40))
    message = add_message(1, prompt_of(1, 9), max_tokens=40)
    tokens, _ = expected_tokens(message, 256)
    stop = (tokens[10],)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=40, stop_token_ids=stop))
    while 1 not in harness.ends:
        harness.step()
    assert harness.ends[1] == "stop" and harness.tokens[1] == tokens[:11]
    assert_ahead(harness)
    assert {number for number, _, _ in runner.batches[-1]} == {0}
    harness.run()
    harness.assert_all_as_alone()


@pytest.mark.parametrize("fields", [{"token_masks": True}, {"presence_penalty": 1.0}])
def test_no_step_goes_ahead_while_ids_of_drafts_matter(fields: dict[str, Any]) -> None:
    """As soon as a sequence with a grammar or with penalties runs, and no longer than it does."""
    harness, runner = started()
    harness.add(add_message(7, prompt_of(7, 9), max_tokens=12, **fields))
    harness.step()  # reads the step that is ahead
    before = runner.num_sources
    while 7 not in harness.ends:
        harness.step()
    assert runner.num_sources == before
    harness.run()
    assert runner.num_sources > before
    harness.assert_all_as_alone()
