"""The layer for multi-token prediction of Qwen3.5 drafts what a plain reference drafts, and its
drafts change no answer: the real engine over the real runner, float32 on the CPU.
"""

import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from msgspec import structs

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.drafting_runner import DraftingRunner
from services.decoder.engine.schedule.head_drafts import HeadDrafts, HeadSources
from tests.cases import THOROUGH
from tests.known_drafts import KnownDrafts, from_answer
from tests.parity.mtp_oracle import Head, drafts_of, make_with_head
from tests.parity.oracle import Prompt
from tests.parity.qwen3_5_oracle import CONFIGS
from tests.parity.test_same_answers import Bench, Part, Question

NUM_TOKENS = 12
SHAPES: tuple[tuple[Part, ...], ...] = ((5, (8, 12), 45), (50,), (3, (8, 12), 5, (6, 4), 20))
NAMES = ["odd-heads-repeated-thrice", "experts-one-shared"]


class Recorded(HeadDrafts):
    """Notes what the head drafts, and proposes tokens of a known answer, of which a share is right,
    so that drafts are accepted although the head knows nothing.
    """

    def __init__(self, known: KnownDrafts | None, drafts: dict[int, list[int]]) -> None:
        super().__init__(None)
        self._known, self.drafts = known, drafts

    def read(self, token_ids: "array[int]") -> None:
        super().read(token_ids)
        if self._known is not None:
            self._known.read(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        super().offer(drafts)
        if self._offered:
            self.drafts[self._num_tokens] = list(self._offered)

    def propose(self, most: int) -> list[int]:
        return super().propose(most) if self._known is None else self._known.propose(most)


class Sources(HeadSources):
    def __init__(self, answers: dict[int, list[int]], share: float | None) -> None:
        self.answers, self.share = answers, share
        self.drafts: dict[int, dict[int, list[int]]] = {}

    def of(self, message: AddSequence) -> Recorded:
        number = message.sequence_id
        known = None
        if self.share is not None:
            known = KnownDrafts(
                lambda index: from_answer(message, self.answers[number], index), self.share, number
            )
        return Recorded(known, self.drafts.setdefault(number, {}))


class Heads(Bench):
    """Requests over a checkpoint with a random head.

    Attributes:
        answers: greedy answers of an engine without drafts.
        expected: what the reference drafts behind each token of an answer.
    """

    def __init__(self, name: str, directory: Path) -> None:
        tiny = replace(CONFIGS[name], layers=4)
        oracle, head = make_with_head(tiny, directory, seed=3)
        super().__init__(oracle, SHAPES)
        self.head: Head = head
        del self.questions[len(SHAPES) :]
        for question in self.questions:
            sampling = question.message.sampling
            question.message.sampling = type(sampling)(max_tokens=NUM_TOKENS)
        self.answers = self.ask(self.engine(), range(len(SHAPES)))
        self.expected = {
            number: drafts_of(oracle, head, self.prompt(number), self.answers[number], 3)
            for number in range(len(SHAPES))
        }

    def prompt(self, number: int) -> Prompt:
        return self.oracle.prompt(*SHAPES[number], seed=number)

    def drafting(self, share: float | None, **options: Any) -> tuple[Engine, Sources]:
        engine = self.engine(max_drafts=4, draft_head=True, max_num_sequences=16, **options)
        sources = Sources(self.answers, share)
        engine.speculation.sources = sources
        return engine, sources


@pytest.fixture(scope="module", params=NAMES if THOROUGH else NAMES[:1])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Heads]:
    torch.set_num_threads(1)
    yield Heads(request.param, tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize(
    ("tokens", "share", "sizes"),
    [(8192, None, []), (8192, 0.7, [2, 16]), (19, None, [16]), (19, 0.7, [])],
)
def test_the_head_drafts_what_the_reference_drafts(
    bench: Heads, tokens: int, share: float | None, sizes: list[int]
) -> None:
    """Wherever prompts are cut, behind images and hits, whichever drafts were accepted, and with
    padding as for graphs of these sizes.
    """
    engine, sources = bench.drafting(share, max_batched_tokens=tokens)
    assert isinstance(engine.runner, DraftingRunner)
    engine.runner.drafter.sizes = sizes
    for _ in range(2):  # the second round begins at checkpoints of the first
        assert bench.ask(engine, range(len(SHAPES))) == bench.answers
        num_drafts = 0
        for number, expected in bench.expected.items():
            for end, drafts in sources.drafts[number].items():
                assert drafts == expected[end][: len(drafts)], (number, end)
                num_drafts += len(drafts)
        # Sequences pause after wrong drafts, so that the head does not draft in each step.
        assert num_drafts > 3 * len(SHAPES)
        sources.drafts.clear()
    assert engine.stats().num_prefix_hit_tokens > 0


class OnDevice:
    """Replaces the layer's drafts on the device by tokens of known answers, of which a share is
    right, so that drafts are accepted whose ids the host does not know when it launches their step.

    Args:
        engine: the engine, whose runner drafts.
        answers: the known answers.
        share: probability that a draft is right.
    """

    def __init__(self, engine: Engine, answers: dict[int, list[int]], share: float = 0.8) -> None:
        assert isinstance(engine.runner, DraftingRunner)
        self._engine, self._answers, self._drafter = engine, answers, engine.runner.drafter
        self._draft = self._drafter.draft
        self._share, self._draw = share, random.Random(0)

    def draft(self, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Drafts like `Drafter.draft`."""
        found, entered = self._draft(token_ids), self._drafter._entered
        assert entered is not None and token_ids is not None
        sequences = {s.row: s for s in self._engine.scheduler.running()}
        for group, (row, sample, index, _, *given) in enumerate(entered.T.tolist()):
            if row not in sequences:
                continue
            accepted = 0
            while given[accepted : accepted + 1] == [int(token_ids[sample + accepted])]:
                accepted += 1
            for place in range(found.shape[1]):
                if found[group, place] >= 0 and self._draw.random() < self._share:
                    right = index + accepted + 2 + place
                    answer = self._answers[sequences[row].sequence_id]
                    found[group, place] = from_answer(sequences[row].message, answer, right)
        return found


@pytest.mark.parametrize(("tokens", "sizes"), [(8192, []), (19, [2, 16])])
def test_steps_are_launched_before_the_host_knows_their_drafts(
    bench: Heads, tokens: int, sizes: list[int]
) -> None:
    engine = bench.engine(
        max_drafts=4, draft_head=True, max_num_sequences=16, overlap=True, max_batched_tokens=tokens
    )
    assert isinstance(engine.runner, DraftingRunner)
    drafter = engine.runner.drafter
    drafter.sizes = sizes
    with (
        mock.patch.object(drafter, "draft", OnDevice(engine, bench.answers).draft),
        mock.patch.object(drafter, "amend", side_effect=drafter.amend) as amend,
    ):
        for _ in range(2):  # the second round begins at checkpoints of the first
            assert bench.ask(engine, range(len(SHAPES))) == bench.answers
        found = engine.stats().drafts
        assert found is not None
        assert amend.call_count >= 6 and found.num_accepted >= 20, (amend.call_count, found)
    # A control: without the copy, the device computes other tokens than the host has accepted.
    with (
        mock.patch.object(drafter, "draft", OnDevice(engine, bench.answers).draft),
        mock.patch.object(drafter, "amend"),
    ):
        assert bench.ask(engine, range(len(SHAPES))) != bench.answers


@pytest.mark.parametrize("parameter", ["presence_penalty", "top_logprobs"])
def test_penalties_count_drafts_that_the_host_knows(bench: Heads, parameter: str) -> None:
    """Their counts contain the ids of drafts, and log-probabilities do not depend on them."""
    has_penalty = parameter == "presence_penalty"
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        presence_penalty=0.5 if has_penalty else 0.0,
        top_logprobs=None if has_penalty else 2,
    )
    questions = [
        replace(question, message=structs.replace(question.message, sampling=params))
        for question in bench.questions
    ]
    with mock.patch.object(bench, "questions", questions):
        answers = bench.ask(bench.engine(), range(len(SHAPES)))
        engine = bench.engine(max_drafts=4, draft_head=True, max_num_sequences=16, overlap=True)
        assert isinstance(engine.runner, DraftingRunner)
        drafter = engine.runner.drafter
        with (
            mock.patch.object(drafter, "draft", OnDevice(engine, answers).draft),
            mock.patch.object(drafter, "amend", side_effect=drafter.amend) as amend,
        ):
            assert bench.ask(engine, range(len(SHAPES))) == answers
        found = engine.stats().drafts
        assert found is not None and found.num_accepted >= 10
        assert bool(amend.call_count) is not has_penalty


@pytest.mark.parametrize(("length", "num_blocks"), [(7, 40), (11, 40), (11, 8)])
def test_drafts_end_with_the_context_and_with_free_blocks(
    bench: Heads, length: int, num_blocks: int
) -> None:
    """The host offers as many drafts as the device has blocks for, and no step goes beyond them."""
    prompt = bench.prompt(0).token_ids
    assert len(prompt) % 16 == 12  # the context enters another block
    block_bytes = (64 << 20) // bench.engine(max_drafts=4, draft_head=True).info.num_blocks
    engine = bench.engine(
        max_drafts=4, draft_head=True, max_num_sequences=16, overlap=True,
        max_model_len=len(prompt) + length,
        kv_cache_bytes=(1 + num_blocks) * block_bytes,  # with the scratch block
    )  # fmt: skip
    assert isinstance(engine.runner, DraftingRunner) and engine.info.num_blocks == num_blocks
    drafter, amend = engine.runner.drafter, engine.runner.drafter.amend
    num_amended = 0

    def checked(buffer: torch.Tensor, amends: torch.Tensor) -> None:
        nonlocal num_amended
        assert drafter.drafts is not None
        assert (drafter.drafts.view(-1)[amends[1]] >= 0).all(), "a draft that was not made"
        num_amended += 1
        amend(buffer, amends)

    with (
        mock.patch.object(drafter, "draft", OnDevice(engine, bench.answers, 1.0).draft),
        mock.patch.object(drafter, "amend", checked),
    ):
        assert bench.ask(engine, [0]) == {0: bench.answers[0][:length]}
    assert num_amended >= 2


def test_the_head_drafts_beyond_32_768_positions_what_it_drafts_at_the_start(bench: Heads) -> None:
    """Rotary positions are relative, so that only rounding differs."""
    questions: list[Question] = []
    for number, question in enumerate(bench.questions):
        count = len(bench.prompt(number).token_ids)
        positions = np.arange(count) + np.zeros((3, 1))
        if question.message.positions:
            positions = np.frombuffer(question.message.positions, np.int32).reshape(3, -1)
        message = structs.replace(
            question.message,
            positions=(positions + 40_000).astype(np.int32).tobytes(),
            position_delta=question.message.position_delta + 40_000,
        )
        questions.append(replace(question, message=message))
    with mock.patch.object(bench, "questions", questions):
        engine, sources = bench.drafting(None)
        found = bench.ask(engine, range(len(SHAPES)))
    pairs = [
        (draft, right)
        for number, expected in bench.expected.items()
        for end, drafts in sources.drafts[number].items()
        if found[number] == bench.answers[number]
        for draft, right in zip(drafts, expected[end], strict=False)
    ]
    assert len(pairs) > 10
    assert sum(draft == right for draft, right in pairs) > 0.9 * len(pairs)
