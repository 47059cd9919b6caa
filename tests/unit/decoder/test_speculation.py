"""Steps that verify drafts, on a fake runner that knows the tokens of each sequence alone."""

import logging
from functools import cache

import numpy as np
import pytest

from services.decoder.engine.messages import AddSequence, ImageSpan
from services.decoder.engine.schedule.lookup import Lookups
from services.decoder.engine.schedule.speculation import AcceptedLengths
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import Step
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, expected_tokens
from tests.known_drafts import KnownDrafts, KnownSources


class Priced(StepCost):
    """A step of 10 ms, and `token_ms` for each token."""

    def __init__(self, token_ms: float) -> None:
        super().__init__()
        self.token_ms = token_ms

    def predict(self, load: StepLoad) -> float:
        return 10.0 + self.token_ms * (load.tokens + load.drafts)

    def bound(self, step_ms: float) -> float:
        return step_ms

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        pass


def lengths(harness: Harness, number: int) -> list[int]:
    """Number of tokens that each launched step computes for a sequence, without its prompt."""
    counts = [sum(n for s, _, n in batch if s == number) for batch in harness.runner.batches]
    return [count for count in counts if count][1:]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_answers_are_those_without_drafts(overlap: bool, share: float) -> None:
    harness = Harness(overlap=overlap, max_drafts=4, right_drafts=share, max_num_sequences=20)
    for number in range(4):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=40, seed=number))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
    totals = harness.engine.stats().drafts
    assert totals is not None and totals.num_drafts > 0
    if share == 1.0:
        assert totals.num_accepted == totals.num_drafts > 100
        assert len(harness.runner.batches) < 30
    else:
        assert totals.num_accepted < totals.num_drafts
    assert sum(totals.accepted_at) == totals.num_accepted


@pytest.mark.parametrize("has_draft_head", [True, False])
def test_three_drafts_of_the_models_layer_are_tried_in_a_batch(has_draft_head: bool) -> None:
    """All sequences are planned ahead at first, so that each expects to delay the others."""
    harness = Harness(
        max_drafts=3, right_drafts=1.0, max_num_sequences=20, has_draft_head=has_draft_head
    )
    for number in range(4):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=40))
    harness.run()
    harness.assert_all_as_alone()
    totals = harness.engine.stats().drafts
    assert totals is not None
    assert (totals.num_drafts > 90) == has_draft_head


def test_a_sequence_with_right_drafts_gets_1_plus_k_tokens_a_step() -> None:
    harness = Harness(overlap=False, max_drafts=4, right_drafts=1.0)
    harness.add(message := add_message(1, prompt_of(1, 9), max_tokens=21, top_logprobs=1))
    found = []
    while harness.engine.has_work:
        done = harness.engine.step()
        for event in done.events if done else ():
            found.append(len(event.token_ids))
            assert [one.top_token_ids for one in event.logprobs] == [[t] for t in event.token_ids]
    assert found == [1, 5, 5, 5, 5]
    assert len(expected_tokens(message, 256)[0]) == sum(found)


def test_wrong_drafts_pause_for_longer_and_longer() -> None:
    harness = Harness(
        overlap=False, max_drafts=4, right_drafts=0.0, max_model_len=600, num_blocks=200
    )
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=400))
    harness.run()
    steps = lengths(harness, 1)
    assert 1 < sum(length > 1 for length in steps) <= 12


@pytest.mark.parametrize("position", range(12))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_within_accepted_drafts_cuts_them_and_leaves_right_blocks(
    position: int, overlap: bool
) -> None:
    """The second sequence reads the blocks of the first, which the runner checks."""
    tokens, _ = expected_tokens(add_message(1, prompt_of(1, 9), max_tokens=30), 256)
    harness = Harness(max_drafts=5, right_drafts=0.9, overlap=overlap)
    stop = (tokens[position],)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=30, stop_token_ids=stop))
    harness.run()
    again = prompt_of(1, 9) + harness.tokens[1] + [3, 4, 5]
    harness.add(add_message(2, again, max_tokens=4))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_step_yields_more_than_max_tokens_leaves(max_tokens: int) -> None:
    harness = Harness(max_drafts=4, right_drafts=1.0, num_blocks=4, max_model_len=16)
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=max_tokens))
    harness.run()
    harness.assert_all_as_alone()


def test_no_drafts_while_prompts_wait_and_never_more_samples_than_rows() -> None:
    harness = Harness(
        overlap=False, max_drafts=4, right_drafts=1.0, max_num_sequences=6, max_batched_tokens=8,
        num_blocks=200,
    )  # fmt: skip
    for number in range(3):
        harness.add(add_message(number, prompt_of(number, 8), max_tokens=60))
    for _ in range(6):
        harness.step()
    harness.add(add_message(9, prompt_of(9, 60), max_tokens=4))
    while 9 not in harness.tokens:
        harness.step()
        batch = harness.runner.batches[-1]
        assert len({number for number, _, _ in batch}) == len(batch), "drafts beside a prompt"
    harness.run()
    assert max(map(len, harness.runner.batches)) == 6
    harness.assert_all_as_alone()


def test_drafts_preempt_nobody() -> None:
    harness = Harness(
        overlap=False, max_drafts=8, right_drafts=1.0, num_blocks=10, max_num_sequences=20
    )
    for number in range(2):
        harness.add(add_message(number, prompt_of(number, 4), max_tokens=16))
    harness.run()
    harness.assert_all_as_alone()
    assert harness.engine.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("token_ms", "count", "length"),
    [(0.001, 1, 9), (1.0, 1, 5), (4.0, 1, 3), (9.0, 1, 2), (90.0, 1, 2), (0.5, 5, 4), (30.0, 5, 1)],
)
def test_the_number_of_drafts_follows_their_price(token_ms: float, count: int, length: int) -> None:
    """A token that takes a large share of a step has to be right with a high probability, where 0.6
    is assumed for the first draft of a sequence.
    """
    harness = Harness(
        overlap=False, max_drafts=8, right_drafts=0.6, step_cost=Priced(token_ms), num_blocks=200,
        max_num_sequences=64,
    )  # fmt: skip
    for number in range(count):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=100))
    harness.run()
    harness.assert_all_as_alone()
    assert lengths(harness, 0)[0] == length
    totals = harness.engine.stats().drafts
    assert totals is not None
    # Where drafts do not pay, they are tried in 2 of 64 steps, in case that the price is wrong.
    assert length > 1 or 0 < totals.num_chunks <= 2 * count


class Clock:
    """Simulated time in seconds, which launches of steps move on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@cache
def simulated_s(max_drafts: int, share: float, token_ms: float, draft_ms: float) -> float:
    """Time of eight sequences whose steps take 2 ms, 1 ms for each of them, and a time for each
    draft. The cost model is fitted with another time of a token in a prompt, from which it first
    takes the time of a draft.
    """
    clock, cost = Clock(), StepCost(10_000)
    decodes = [(StepLoad(n, n, keys=10 * n), 2.0 + n) for n in (1, 8)]
    cost.fit([*decodes, (StepLoad(0, 64), 2.0 + 64 * token_ms)])
    harness = Harness(
        overlap=False, max_drafts=max_drafts, right_drafts=share, step_cost=cost, clock=clock,
        num_blocks=2000, max_num_sequences=64, max_batched_tokens=64, max_model_len=2000,
    )  # fmt: skip

    def pass_time(step: Step) -> None:
        rows = len(set(step.compute.rows.tolist()))
        clock.now += 1e-3 * (2.0 + rows + draft_ms * (step.compute.num_tokens - rows))

    harness.runner.on_execute = pass_time
    for number in range(8):
        harness.add(add_message(number, prompt_of(number, 1), max_tokens=200))
    harness.run()
    harness.assert_all_as_alone()
    return clock.now


@pytest.mark.parametrize("token_ms", [0.05, 0.2])
@pytest.mark.parametrize(
    ("draft_ms", "share", "least", "most"),
    [
        (0.2, 1.0, 0.25, 0.45),  # a step takes 16.4 ms in place of 10 and yields five times more
        (0.2, 0.7, 0.5, 0.85),
        (5.0, 1.0, 0.98, 1.25),  # a draft takes half as long as a step, for an eighth of its tokens
        (5.0, 0.0, 1.0, 1.12),
        (0.2, 0.0, 1.0, 1.12),  # wrong drafts are cheap, but they gain nothing
    ],
)
def test_drafts_are_verified_where_they_pay(
    token_ms: float, draft_ms: float, share: float, least: float, most: float
) -> None:
    """The price of a draft is learned from the steps with drafts, whatever it was taken to be."""
    without = simulated_s(0, 1.0, token_ms, 0.2)  # of no draft
    assert least < simulated_s(4, share, token_ms, draft_ms) / without < most


def test_drafts_that_were_taken_to_be_dear_are_tried() -> None:
    assert simulated_s(4, 1.0, 3.0, 0.2) / simulated_s(0, 1.0, 3.0, 0.2) < 0.7


def test_drafts_fit_into_the_bound_of_a_step() -> None:
    harness = Harness(
        overlap=False, max_drafts=8, right_drafts=1.0, step_cost=Priced(0.01), step_ms=10.08,
        max_num_sequences=64, num_blocks=200,
    )  # fmt: skip
    for number in range(2):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=60))
    harness.run()
    harness.assert_all_as_alone()
    # The model predicts 10.02 ms for both sequences without drafts, which leaves 6 drafts.
    assert max(sum(n for _, _, n in batch) for batch in harness.runner.batches[2:]) == 8


def test_sequences_with_drafts_run_in_the_same_steps() -> None:
    """Each waits for its tokens, and would run in every second step if the others did not."""
    harness = Harness(overlap=True, max_drafts=4, right_drafts=1.0, num_blocks=200)
    for number in range(2):
        harness.add(add_message(number, prompt_of(number, 9 + number), max_tokens=100))
        harness.step()
    for _ in range(10):
        harness.step()
    first = len(harness.runner.batches)
    for _ in range(10):
        harness.step()
    batches = harness.runner.batches[first:]
    assert all({number for number, _, _ in batch} == {0, 1} for batch in batches)
    harness.run()
    harness.assert_all_as_alone()


def test_an_image_is_no_draft() -> None:
    prompt = [1, 2, 3, 4, *[95] * 6, 9, 1, 2, 3]
    harness = Harness(overlap=False, max_drafts=8)
    harness.add(add_message(1, prompt, images=(ImageSpan(KEYS[0], 4, 6),), max_tokens=9))
    sequence = harness.engine.find(1)
    assert sequence is not None
    assert Lookups().of(sequence.message).propose(8) == [4]
    harness.run()
    harness.assert_all_as_alone()


def test_accepted_and_rejected_tokens_of_a_prediction_are_counted() -> None:
    message = add_message(1, prompt_of(1, 9), max_tokens=20)
    answer, _ = expected_tokens(message, 256)
    changed = [*answer[:8], 7, *answer[9:]]
    message.prediction = np.array(changed, "<i4").tobytes()
    harness = Harness(overlap=False, max_drafts=4)
    harness.engine.speculation.sources = Lookups()
    harness.engine.add(message)
    predicted = []
    while harness.engine.has_work:
        done = harness.engine.step()
        predicted += [e.predicted for e in done.events if e.predicted] if done else []
    accepted, rejected = (sum(column) for column in zip(*predicted, strict=True))
    assert accepted == 20 - len(harness.runner.batches) >= 10  # a step yields one token more
    assert 1 <= rejected <= 4


def test_a_warning_says_that_drafts_are_mostly_wrong(caplog: pytest.LogCaptureFixture) -> None:
    lengths = AcceptedLengths()
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            lengths.add(number % 5 == 0)
        assert not caplog.records
        for number in range(1000):
            lengths.add(number % 6 == 0)
    assert "hardly pays" in caplog.text


class Stated(KnownDrafts):
    """Right drafts behind every token but those of which `has_drafts` is false."""

    equal, gain, period = 0, 0.0, 1

    def num_equal(self) -> int:
        return self.equal

    def prospect(self) -> float:
        return self.gain

    def propose(self, most: int) -> list[int]:
        return [] if self._num_tokens % self.period else super().propose(most)


def stated(harness: Harness, *, equal: int = 0, gain: float = 0.0, period: int = 1) -> None:
    """Gives the sequences of a harness such drafts."""
    speculation = harness.engine.speculation
    known = speculation.sources
    assert isinstance(known, KnownSources)

    class Sources:
        def of(self, message: AddSequence) -> Stated:
            found = Stated(lambda index: known.token(message, index), known.share, seed=1)
            found.equal, found.gain, found.period = equal, gain, period
            return found

    speculation.sources = Sources()


@pytest.mark.parametrize(("equal", "count", "length"), [(8, 1, 16), (7, 1, 9), (8, 2, 9)])
def test_a_long_quotation_of_a_lone_sequence_has_more_drafts(
    equal: int, count: int, length: int
) -> None:
    harness = Harness(
        max_drafts=15,
        right_drafts=1.0,
        num_blocks=200,
        max_num_sequences=64,
        step_cost=Priced(0.001),
    )
    stated(harness, equal=equal)
    for number in range(count):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=100))
    harness.run()
    harness.assert_all_as_alone()
    if count == 1:
        assert max(lengths(harness, 0)) == length
    else:  # the sequences begin and end one after the other
        both = [batch for batch in harness.runner.batches if len({n for n, _, _ in batch}) == 2]
        assert max(sum(n for s, _, n in batch if s == 0) for batch in both) == length


@pytest.mark.parametrize("equal", [0, 8])
def test_a_long_quotation_of_a_lone_sequence_ends_a_pause(equal: int) -> None:
    harness = Harness(
        overlap=False, max_drafts=4, right_drafts=0.0, max_model_len=600, num_blocks=200
    )
    stated(harness, equal=equal)
    harness.add(add_message(1, prompt_of(1, 9), max_tokens=200))
    harness.run()
    harness.assert_all_as_alone()
    assert (sum(length > 1 for length in lengths(harness, 1)) > 50) == (equal == 8)


@pytest.mark.parametrize(("gain", "count"), [(0.2, 1), (0.1, 1), (0.2, 2)])
def test_a_lone_sequence_waits_for_a_token_that_should_bring_drafts(
    gain: float, count: int
) -> None:
    """No step is launched while it waits. Among others it does not wait."""
    harness = Harness(overlap=True, max_drafts=4, max_num_sequences=20, num_blocks=200)
    stated(harness, gain=gain, period=1000)  # there are no drafts
    for number in range(count):
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=60))
    for _ in range(20):
        harness.step()
    idle = 0
    for _ in range(40):
        harness.step()
        idle += not harness.engine.pending
    assert (idle >= 15) == (gain == 0.2 and count == 1)
    assert idle == 0 or (gain == 0.2 and count == 1)
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()


@pytest.mark.parametrize("period", [2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_answers_are_those_without_drafts_where_a_sequence_waits(period: int, share: float) -> None:
    harness = Harness(overlap=True, max_drafts=4, right_drafts=share, max_num_sequences=20)
    stated(harness, gain=1.0, period=period)
    harness.add(add_message(0, prompt_of(0, 9), max_tokens=40, seed=0))
    for _ in range(9):
        harness.step()
    for number in (1, 2):  # others come and go meanwhile
        harness.add(add_message(number, prompt_of(number, 9), max_tokens=12, seed=number))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
