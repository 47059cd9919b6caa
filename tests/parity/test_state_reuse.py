"""Reuse of recurrent states never changes an answer: Qwen3.5, the real engine over the real runner,
float32 on the CPU, token for token. What all models share is in test_same_answers.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.linear_attention.states import StateCache
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, ImageSpan, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from tests.integrity import check_engine
from tests.parity.oracle import Prompt
from tests.parity.qwen3_5_oracle import CONFIGS, make_qwen3_5
from tests.parity.test_same_answers import Bench, Part, Question

NUM_TOKENS = 10
# Checkpoints are kept within the image and before the end.
SHAPES: tuple[tuple[Part, ...], ...] = ((5, (8, 12), 45), (50,), (3, (8, 12), 70))


class Conversations(Bench):
    """A few requests, and others that begin as they do."""

    def __init__(self, directory: Path) -> None:
        tiny = replace(CONFIGS["odd-heads-repeated-thrice"], layers=4)
        super().__init__(make_qwen3_5(tiny, directory, seed=3, gain=1.5), SHAPES)
        del self.questions[3:]

    def beginning_as(self, number: int, num_tokens: int, seed: int) -> int:
        """Adds a request that has a request's first tokens and others behind them."""
        message = self.questions[number].message
        ids = np.frombuffer(message.prompt_token_ids, np.int32)[:num_tokens]
        own = np.random.default_rng(seed).integers(0, 300, 40, dtype=np.int32)
        positions = b""
        if message.positions:
            given = np.frombuffer(message.positions, np.int32).reshape(3, -1)[:, :num_tokens]
            behind = given.max() + 1 + np.arange(40, dtype=np.int32)
            positions = np.concatenate((given, np.tile(behind, (3, 1))), axis=1).tobytes()
        images: list[ImageSpan] = list(message.images)
        assert all(span.offset + span.num_tokens <= num_tokens for span in images)
        added = AddSequence(
            0, np.concatenate((ids, own)).tobytes(), positions, message.position_delta, images,
            SamplingParams(max_tokens=NUM_TOKENS),
        )  # fmt: skip
        self.questions.append(Question(added, self.questions[number].offsets))
        return len(self.questions) - 1

    def poisoned_engine(self, **options: object) -> Engine:
        """States of all rows and checkpoints hold NaN."""
        engine = self.engine(**options)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        for states in (runner.computer.state.states, runner.computer.state.checkpoints):
            assert states is not None
            states.conv.fill_(torch.nan)
            states.recurrent.fill_(torch.nan)
        return engine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversations]:
    torch.set_num_threads(1)
    yield Conversations(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def sharers(bench: Conversations) -> list[int]:
    """Other questions about the first two images, and other texts."""
    return [
        bench.beginning_as(number, length, seed)
        for number, length in ((0, 30), (1, 40), (2, 28))  # the image's end, or within the text
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def alone(bench: Conversations, sharers: list[int]) -> dict[int, list[int]]:
    engine = bench.engine(prefix_caching=False)
    answers: dict[int, list[int]] = {}
    for number in range(len(bench.questions)):
        answers |= bench.ask(engine, [number])
    assert all(len(set(tokens)) > 4 for tokens in answers.values()), "tokens that tell little"
    return answers


def hits(engine: Engine) -> int:
    return engine.stats().num_prefix_hit_tokens


def test_one_token_at_a_time(bench: Conversations, alone: dict[int, list[int]]) -> None:
    engine = bench.poisoned_engine(max_batched_tokens=1, max_num_sequences=1)
    assert bench.ask(engine, [0, 1, 3]) == {number: alone[number] for number in (0, 1, 3)}


@pytest.mark.parametrize("state_tokens", [1, 16])
def test_sharers_of_a_checkpoint_diverge(
    bench: Conversations, sharers: list[int], alone: dict[int, list[int]], state_tokens: int
) -> None:
    engine = bench.poisoned_engine()
    engine.scheduler.blocks.states.state_tokens = state_tokens
    bench.ask(engine, [0, 1, 2])
    assert hits(engine) == 0
    found = bench.ask(engine, sharers)
    assert found == {number: alone[number] for number in sharers}
    assert hits(engine) == 2 * (16 + 32 + 16)
    for one, other in zip(sharers[::2], sharers[1::2], strict=True):
        assert found[one] != found[other]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_and_the_same_question(
    bench: Conversations, alone: dict[int, list[int]], overlap: bool
) -> None:
    """The history is the prompt, its answer, and a new question."""
    engine = bench.poisoned_engine(overlap=overlap)
    first = bench.questions[1].message
    ids = np.frombuffer(first.prompt_token_ids, np.int32)
    assert bench.ask(engine, [1])[1] == alone[1]
    answer = np.array(alone[1], np.int32)
    new = np.random.default_rng(9).integers(0, 300, 20, dtype=np.int32)
    prompt = Prompt(np.concatenate((ids, answer, new)).tolist(), [], [], None)
    expected, _ = bench.oracle.generate(prompt, NUM_TOKENS)
    message = AddSequence(
        0, np.array(prompt.token_ids, np.int32).tobytes(), b"", 0, [],
        SamplingParams(max_tokens=NUM_TOKENS),
    )  # fmt: skip
    bench.questions.append(Question(message, {}))
    try:
        assert bench.ask(engine, [len(bench.questions) - 1]).popitem()[1] == expected
        assert hits(engine) == 32
        assert bench.ask(engine, [1])[1] == alone[1]
        assert hits(engine) == 64
    finally:
        bench.questions.pop()


@pytest.mark.parametrize("steps", [1, 2])
def test_cancelled_while_its_state_is_copied(
    bench: Conversations, alone: dict[int, list[int]], steps: int
) -> None:
    engine = bench.poisoned_engine(overlap=True)
    question = bench.questions[1].message
    for number in (100, 101):
        engine.add(AddSequence(number, question.prompt_token_ids, b"", 0, [], question.sampling))
        for _ in range(steps):
            engine.step()
        engine.abort(number)
        check_engine(engine)
        while engine.has_work:
            engine.step()
    assert bench.ask(engine, [1])[1] == alone[1]
    assert hits(engine) >= 32


def test_preempted_and_restored_from_its_own_checkpoint(
    bench: Conversations, alone: dict[int, list[int]]
) -> None:
    text = bench.oracle.spec.text
    block = 2 * 16 * text.num_kv_heads * text.head_dim * 4 * len(text.attention_layers)
    engine = bench.poisoned_engine(
        kv_cache_bytes=10 * block, checkpoint_bytes=1 << 20, max_model_len=128
    )
    numbers = [0, 1, 2, 3, 4]
    assert bench.ask(engine, numbers) == {number: alone[number] for number in numbers}
    assert engine.stats().num_preemptions > 0


def test_restored_from_the_host(
    bench: Conversations, sharers: list[int], alone: dict[int, list[int]]
) -> None:
    """The cache holds one request's blocks, so blocks and states of the others leave it."""
    text = bench.oracle.spec.text
    block = 2 * 16 * text.num_kv_heads * text.head_dim * 4 * len(text.attention_layers)
    engine = bench.poisoned_engine(
        kv_cache_bytes=10 * block, checkpoint_bytes=1 << 20, kv_host_bytes=4 << 20,
        max_model_len=128,
    )  # fmt: skip
    for number in (0, 1, 2, *sharers):
        assert bench.ask(engine, [number])[number] == alone[number]
    assert engine.stats().num_blocks_from_host >= 4
    assert hits(engine) == 2 * (16 + 32 + 16)


def test_states_are_not_kept_on_the_host_without_room_for_a_block(bench: Conversations) -> None:
    """Three quarters of the memory are for blocks, each of which is larger than a few states."""
    spec = bench.oracle.spec.text.linear_attention
    assert spec is not None
    size = StateCache.slot_bytes(spec, len(bench.oracle.spec.text.linear_layers), torch.float32)
    info = bench.engine(
        block_size=1024, kv_cache_bytes=1 << 24, checkpoint_bytes=1 << 20, max_model_len=128,
        kv_host_bytes=4 * size,
    ).info  # fmt: skip
    assert info.num_checkpoints > 0
    assert (info.num_host_blocks, info.num_host_states) == (0, 0)


# Controls.


@pytest.mark.parametrize("change", ["not restored", "convolution shifted", "another's state"])
def test_control_a_state_that_is_restored_wrongly(
    bench: Conversations, sharers: list[int], alone: dict[int, list[int]], change: str
) -> None:
    engine = bench.engine()
    bench.ask(engine, [0, 1, 2])

    class Wrong(StateCache):
        def copy_slot(self, slot: int, target: StateCache, to: int) -> None:
            super().copy_slot(slot, target, to)
            if change == "not restored":
                target.recurrent[:, to] = 0.0
            elif change == "convolution shifted":
                target.conv[:, to] = target.conv[:, to].roll(1, dims=1)
            else:
                target.recurrent[:, to] = target.recurrent[:, to].roll(1, dims=1)

    state = engine.runner.computer.state
    state.checkpoints = Wrong(state.checkpoints.conv, state.checkpoints.recurrent)
    found = bench.ask(engine, sharers)
    assert found != {number: alone[number] for number in sharers}
