"""Drafts change no answer: the engine on the model runner, a tiny float32 model on the CPU.

Requests of every kind that the sampler knows run once without drafts and then with drafts of a
stated quality, in one engine each. Tokens have to be equal, also those that are sampled, because a
draft is accepted only if it is the very token that was drawn in its place. Each rule has a control,
which drops the rule and has to change an answer.
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from services.decoder.engine import engine as engine_module
from services.decoder.engine.draft_counts import DraftCounts
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.schedule import batch, chunk
from services.decoder.engine.schedule.chunk import Accepted, Chunk
from services.decoder.engine.schedule.lookup import Lookups
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.step import StepOutput
from tests.cases import cases, first
from tests.decoder_harness import Harness, write_checkpoint
from tests.engine_harness import Untimed, small_pieces
from tests.integrity import check_engine
from tests.known_drafts import KnownSources, from_answer
from tests.sampling_twins import mask_of
from tests.unit.decoder.test_runner import start

NUM_TOKENS = 24
GREEDY: dict[str, Any] = {}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.7,
}
# Each is a request, with the kind of its prompt: 0 text, 1 an image, 2 two images.
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (0, GREEDY),
    "image": (1, GREEDY),
    "two images": (2, DRAWN),
    "drawn": (0, DRAWN),
    "another choice": (0, {"temperature": 0.9, "seed": 12}),
    "top k and p": (3, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}),
    "penalties": (0, PENALTIES),
    "penalties drawn": (3, PENALTIES | DRAWN),
    "bias": (0, {"logit_bias": {7: 9.0, 11: -100.0}}),
    "minimum": (0, {"min_tokens": 12, "stop_token_ids": tuple(range(0, 90, 3))}),
    "stop": (3, {"stop_token_ids": tuple(range(0, 90, 9))}),
    "logprobs": (0, {"top_logprobs": 3, "logprob_token_ids": (5, 6)}),
    "logprobs drawn": (1, {"top_logprobs": 2, **DRAWN, **PENALTIES}),
    "prompt logprobs": (0, {"prompt_logprobs": 1}),
    "masked": (0, GREEDY),
    "masked drawn": (3, DRAWN | PENALTIES | {"top_logprobs": 1}),
    "masked image": (1, {"min_tokens": 5, "stop_token_ids": tuple(range(0, 90, 5))}),
}
NAMES = list(REQUESTS)
ALLOWED = np.random.default_rng(3).random((len(REQUESTS), 2 * NUM_TOKENS, 100)) < 0.3

Answers = tuple[dict[int, list[int]], dict[int, list[float]], dict[int, str]]


class Bench:
    """The requests on one runner.

    Attributes:
        harness: the runner.
        expected: answers without drafts.
        messages: the requests, by their places in `REQUESTS`.
        repeats_masks: True if all drafts get the mask of the token before them.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.messages: dict[int, AddSequence] = {}
        self.offsets: dict[int, dict[bytes, int]] = {}
        self.repeats_masks = False
        for number, (name, (kind, fields)) in enumerate(REQUESTS.items()):
            sequence = start(harness, kind, 0)
            message = sequence.message
            self.messages[number] = msgspec.structs.replace(
                message,
                sequence_id=number,
                sampling=SamplingParams(**{"max_tokens": NUM_TOKENS, **fields}),
                token_masks=name.startswith("masked"),
            )
            self.offsets[number] = dict(sequence.image_offsets)
        harness.started.clear()
        self.expected = self.run(self.engine())

    def engine(self, max_drafts: int = 0, share: float = 1.0, *, overlap: bool = False) -> Engine:
        engine = Engine(
            self.harness.runner, overlap=overlap, max_drafts=max_drafts, step_cost=Untimed()
        )
        small_pieces(engine)

        def token(message: AddSequence, index: int) -> int:
            return from_answer(message, self.expected[0][message.sequence_id % 100], index)

        engine.speculation.sources = KnownSources(token, share)
        return engine

    def run(self, engine: Engine, *, first: int = 0) -> Answers:
        """Runs all requests with ids from `first` on. Returns their tokens, logprobs and ends."""
        tokens: dict[int, list[int]] = {number: [] for number in self.messages}
        logprobs: dict[int, list[float]] = {number: [] for number in self.messages}
        ends: dict[int, str] = {}
        for number, message in self.messages.items():
            engine.add(msgspec.structs.replace(message, sequence_id=first + number))
            for key, offset in self.offsets[number].items():
                engine.image_ready(first + number, key, offset)
            if message.token_masks:
                self.send_masks(engine, first + number, 0, [])
        while len(ends) < len(self.messages):
            done = engine.step()
            check_engine(engine)
            assert done is not None or engine.pending, "the engine has stopped"
            events = done.events if done else []
            for images in done.images_wanted if done else []:  # of sequences that were preempted
                of_sequence = self.offsets[images.sequence_id - first]
                for key in images.keys:
                    engine.image_ready(images.sequence_id, key, of_sequence[key])
            wanted = engine.new_tokens(events)
            for event in events:
                number = event.sequence_id - first
                tokens[number] += event.token_ids
                for one in event.logprobs:
                    logprobs[number] += [one.logprob, *one.top_logprobs]
                if event.end is not None:
                    ends[number] = event.end.reason + event.end.message
            drafts = wanted.drafts or [[]] * len(wanted.sequence_ids)
            for number, count, found in zip(
                wanted.sequence_ids, wanted.num_generated, drafts, strict=True
            ):
                self.send_masks(engine, number, count, found)
        return tokens, logprobs, ends

    def run_mixture(
        self, engine: Engine, rng: random.Random, count: int
    ) -> dict[int, tuple[list[int], str]]:
        """Runs requests of random kinds, which arrive at random steps, as do their images. Returns
        their tokens and ends. A request's number is its id modulo 100.
        """
        todo: dict[int, list[tuple[int, bytes | None]]] = {}
        for place in range(count):
            number, at = rng.randrange(len(REQUESTS)), rng.randrange(60)
            todo.setdefault(at, []).append((100 * place + number, None))
            for key in self.offsets[number]:
                todo.setdefault(at + rng.randrange(9), []).append((100 * place + number, key))
        tokens: dict[int, list[int]] = {}
        ends: dict[int, str] = {}
        step = 0
        while len(ends) < count:
            for sequence_id, key in todo.pop(step, []):
                message, offsets = self.messages[sequence_id % 100], self.offsets[sequence_id % 100]
                if key is not None:
                    engine.image_ready(sequence_id, key, offsets[key])
                    continue
                tokens[sequence_id] = []
                engine.add(msgspec.structs.replace(message, sequence_id=sequence_id))
                if message.token_masks:
                    self.send_masks(engine, sequence_id, 0, [])
            step += 1
            assert step < 5000, "the engine has stopped"
            done = engine.step()
            check_engine(engine)
            events = done.events if done else []
            for images in done.images_wanted if done else []:
                for key in images.keys:
                    offset = self.offsets[images.sequence_id % 100][key]
                    engine.image_ready(images.sequence_id, key, offset)
            wanted = engine.new_tokens(events)
            for event in events:
                tokens[event.sequence_id] += event.token_ids
                if event.end is not None:
                    ends[event.sequence_id] = event.end.reason + event.end.message
            drafts = wanted.drafts or [[]] * len(wanted.sequence_ids)
            for sequence_id, done_tokens, known in zip(
                wanted.sequence_ids, wanted.num_generated, drafts, strict=True
            ):
                self.send_masks(engine, sequence_id, done_tokens, known)
        return {sequence_id: (tokens[sequence_id], ends[sequence_id]) for sequence_id in ends}

    def send_masks(self, engine: Engine, number: int, count: int, drafts: list[int]) -> None:
        """Sends the masks of the next token and of those behind drafts, as a mask process does."""
        allowed = ALLOWED[number % 100]
        masks = [mask_of(allowed[count]).view(np.int32)]
        for place, draft in enumerate(drafts):
            if not allowed[count + place, draft]:
                break
            at = count if self.repeats_masks else count + place + 1
            masks.append(mask_of(allowed[at]).view(np.int32))
        engine.mask_ready(number, count, *masks)


@pytest.fixture(scope="module", params=[2048, 40], ids=["whole", "chunks"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Prompts are computed whole, or in chunks of up to 40 tokens in all."""
    rows = min(64, request.param)
    harness = Harness(
        write_checkpoint(tmp_path_factory.mktemp("drafts") / "model"),
        max_num_sequences=rows,
        max_batched_tokens=request.param,
    )
    yield Bench(harness)
    harness.close()


def assert_equal(found: Answers, expected: Answers) -> None:
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    for number, values in expected[1].items():
        # Batches of other sizes round float32 sums otherwise, see test_late_masks.
        assert found[1][number] == pytest.approx(values, rel=0, abs=1e-4)


def test_the_requests_differ(bench: Bench) -> None:
    tokens, logprobs, ends = bench.expected
    assert len({tuple(found) for found in tokens.values()}) == len(REQUESTS) - 2
    # Logprobs alone change no token.
    for plain in ("logprobs", "prompt logprobs"):
        assert tokens[NAMES.index(plain)] == tokens[NAMES.index("greedy")]
    assert set(ends.values()) == {"stop", "length"}
    assert logprobs[NAMES.index("logprobs")]


# Number of drafts, share of right ones, steps that overlap: the first six have each number and each
# share with and without overlap.
DRAFTS = [(8, 1.0, False), (8, 0.0, True), (3, 0.0, False), (3, 0.7, True), (1, 0.7, False)]
DRAFTS += [(1, 1.0, True)]
DRAFTS += [
    each for each in product((1, 3, 8), (0.0, 0.7, 1.0), (False, True)) if each not in DRAFTS
]


@pytest.mark.thorough
@pytest.mark.parametrize(("max_drafts", "share", "overlap"), first(6, DRAFTS))
def test_answers_are_equal_with_drafts(
    bench: Bench, max_drafts: int, share: float, overlap: bool
) -> None:
    """The second round finds the prompts and answers of the first in the prefix cache."""
    engine = bench.engine(max_drafts, share, overlap=overlap)
    assert_equal(bench.run(engine), bench.expected)
    assert_equal(bench.run(engine, first=100), bench.expected)
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 50
    assert stats.drafts is not None
    if overlap and max_drafts < 8:
        return  # too few tokens are expected for drafts to pay while steps overlap
    assert stats.drafts.num_drafts > 0
    assert (stats.drafts.num_accepted == 0) == (share == 0.0)
    if share == 0.7:
        assert 0.2 < stats.drafts.num_accepted / stats.drafts.num_drafts < 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(cases(3, 40)))
def test_any_mixture_has_the_answers_of_each_request_alone(bench: Bench, seed: int) -> None:
    """Requests of all kinds in any number, order and at any step, among them several choices of a
    prompt and prompts that are known by then; images that come late; drafts of any number and
    quality. In the second bench all prompts are cut into chunks.
    """
    rng = random.Random(seed)
    engine = bench.engine(
        rng.choice([1, 2, 5, 8]), rng.choice([0.3, 0.6, 0.9, 1.0]), overlap=rng.random() < 0.3
    )
    found = bench.run_mixture(engine, rng, count=20)
    tokens, _, ends = bench.expected
    assert len(found) == 20
    for sequence_id, (ids, end) in found.items():
        number = sequence_id % 100
        assert (ids, end) == (tokens[number], ends[number]), NAMES[number]


def test_drafts_that_are_right_save_steps(bench: Bench) -> None:
    plain, drafting = bench.engine(), bench.engine(8, 1.0)
    bench.run(plain)
    bench.run(drafting)
    assert drafting.stats().num_steps < 0.7 * plain.stats().num_steps


def test_lookup_changes_no_answer_either(bench: Bench) -> None:
    engine = bench.engine(8)
    engine.speculation.sources = Lookups()
    assert_equal(bench.run(engine), bench.expected)
    found = engine.stats().drafts
    assert found is not None and found.num_drafts > 0


def _changed_counts(**changes: np.ndarray) -> object:
    def counts_of(samples: list[Chunk]) -> DraftCounts | None:
        found = chunk.counts_of(samples)
        return None if found is None else found._replace(**changes)

    return mock.patch.object(batch, "counts_of", counts_of)


def _accept_all(chunks: list[Chunk], output: StepOutput) -> Accepted:
    """Accepts every draft."""
    found = chunk.accept(chunks, output)
    if len(output.token_ids) == len(chunks):
        return found
    ids, first = [], 0
    for each in chunks:
        first += 1 + len(each.drafts)
        ids.append([*each.drafts, int(output.token_ids[first - 1, 0])])
    return ids, [len(one) for one in ids], {}


def _first_logprobs(chunks: list[Chunk], output: StepOutput) -> Accepted:
    """Gives each accepted token the log-probabilities of the first."""
    ids, counts, logprobs = chunk.accept(chunks, output)
    return ids, counts, {at: found[:1] * len(found) for at, found in logprobs.items()}


def _one_place(bench: Bench) -> object:
    """Samples behind drafts as if in the place of the first."""
    sampler = bench.harness.runner.sampler
    prepare = sampler.prepare

    def prepare_in_one_place(rows: np.ndarray, ends: np.ndarray, *others: Any) -> Any:
        ends = ends.copy()
        for index in range(1, len(rows)):
            if rows[index] == rows[index - 1]:
                ends[index] = ends[index - 1]
        return prepare(rows, ends, *others)

    return mock.patch.object(sampler, "prepare", prepare_in_one_place)


_append = engine_module._append


def _end_at_the_last(sequence: Sequence, ids: list[int]) -> str | None:
    """Lets only the last token of a step end a sequence."""
    for token_id in ids[:-1]:
        sequence.token_ids.append(token_id)
    last = ids[-1:]
    reason = _append(sequence, last)
    ids[-1:] = last
    return reason


_ENDS = "an answer ends among accepted drafts"
_NO_PAIRS, _NO_IDS = np.empty((0, 2), np.int64), np.empty(0, np.int64)
CONTROLS = {
    "penalties count the drafts before a sample": lambda _: _changed_counts(assumed=_NO_PAIRS),
    "penalties count accepted drafts": lambda _: _changed_counts(accepted=_NO_PAIRS),
    "penalties do not count what may be rejected": lambda _: _changed_counts(samples=_NO_IDS),
    "seeds and minimum tokens follow the place": _one_place,
    "wrong drafts are rejected": lambda _: mock.patch.object(engine_module, "accept", _accept_all),
    "each token has its own logprobs": lambda _: mock.patch.object(
        engine_module, "accept", _first_logprobs
    ),
    _ENDS: lambda _: mock.patch.object(engine_module, "_append", _end_at_the_last),
    "each draft has its own mask": lambda bench: mock.patch.object(
        bench, "repeats_masks", new=True
    ),
}


# The rules are those of whole prompts and of prompts in chunks.
@pytest.mark.thorough
@pytest.mark.parametrize("bench", first(1, [40, 2048]), indirect=True)
@pytest.mark.parametrize("rule", CONTROLS)
def test_an_answer_changes_if_a_rule_is_dropped(bench: Bench, rule: str) -> None:
    # More drafts are right where an answer ends among them.
    engine = bench.engine(*((8, 1.0) if rule == _ENDS else (4, 0.7)))
    with CONTROLS[rule](bench):
        found = bench.run(engine)
    with pytest.raises(AssertionError):
        assert_equal(found, bench.expected)
