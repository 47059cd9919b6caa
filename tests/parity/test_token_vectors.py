"""The vectors of a prompt's tokens equal those of the code of ColQwen3 and ColQwen3.5 in
transformers, float32 on the CPU: alone, in a batch, in chunks, after equal prompts, and with blocks
for one prompt at a time. ColQwen3.5 has recurrent states beside the blocks.

The vectors are normalized, so 1e-5 is the tolerance of test_pooling.
"""

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from tests.integrity import check_engine
from tests.late_interaction import DIMENSIONS, Late
from tests.parity.oracle import CONFIGS, Prompt, make_oracle
from tests.parity.qwen3_5_oracle import CONFIGS as HYBRIDS
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.parity.test_pooling import MIXED, TOLERANCE, Bench

pytestmark = pytest.mark.usefixtures("one_thread")
ALL_TOKENS = SamplingParams(max_tokens=1, prompt_logprobs=0)


class TokenBench(Bench):
    """Prompts over a tiny model for late interaction, with the vectors of all their tokens."""

    def __init__(self, late: Late) -> None:
        self.late = late
        super().__init__(late.oracle, "token_embed", MIXED)

    def reference(self, prompt: Prompt) -> np.ndarray:
        return self.late.vectors(**self.oracle._inputs(prompt)).numpy()

    def ask(self, engine: Engine, numbers: Seq[int]) -> dict[int, np.ndarray]:
        parts: dict[int, list[bytes]] = {number: [] for number in numbers}
        starts: dict[int, list[int]] = {number: [] for number in numbers}
        for number in numbers:
            question, m = self.questions[number], self.questions[number].message
            engine.add(
                AddSequence(
                    number, m.prompt_token_ids, m.positions, m.position_delta, m.images, ALL_TOKENS
                )
            )
            for key, offset in question.offsets.items():
                engine.image_ready(number, key, offset)
        num_left = len(parts)
        while num_left:
            done = engine.step()
            assert done is not None, "the engine has stopped with work left"
            for event in done.events:
                found = parts[event.sequence_id]
                if event.prompt_logprobs is not None:
                    starts[event.sequence_id].append(event.prompt_logprobs.start)
                    found.append(event.prompt_logprobs.top_logprobs)
                if event.end is not None:
                    assert event.end.reason == "length", event
                    found.append(event.vector)
                    num_left -= 1
            for wanted in done.images_wanted:
                for key in wanted.keys:
                    offset = self.questions[wanted.sequence_id].offsets[key]
                    engine.image_ready(wanted.sequence_id, key, offset)
        check_engine(engine)
        assert all(each == sorted(set(each)) for each in starts.values())
        return {
            number: np.frombuffer(b"".join(found), "<f4").reshape(-1, DIMENSIONS)
            for number, found in parts.items()
        }

    def check(self, found: dict[int, np.ndarray]) -> None:
        for number, vectors in found.items():
            assert vectors.shape == self.expected[number].shape
        super().check(found)


@pytest.fixture(scope="module", params=["colqwen3", "colqwen3_5"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenBench:
    """ColQwen3's files have a head, which is not read."""
    torch.set_num_threads(1)
    directory = Path(tmp_path_factory.mktemp("checkpoint"))
    if request.param == "colqwen3":
        base = make_oracle(CONFIGS["gqa3-hd32-odd-heads"], directory, seed=5)
    else:
        base = make_qwen3_5(HYBRIDS["odd-heads-repeated-thrice"], directory, seed=5)
    return TokenBench(Late(base))


def test_the_references_differ(bench: TokenBench) -> None:
    """Otherwise a constant would pass, and so would one vector for all tokens."""
    vectors = bench.expected[1]
    assert float(np.abs(vectors[0] - vectors[-1]).max()) > 100 * TOLERANCE
    lengths = np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=0, atol=1e-5)


def test_each_alone(bench: TokenBench) -> None:
    engine = bench.engine()
    found = {}
    for number in range(len(bench.questions)):
        found |= bench.ask(engine, [number])
    bench.check(found)


@pytest.mark.parametrize("tokens", [8192, 17])
def test_in_a_batch_and_again(bench: TokenBench, tokens: int) -> None:
    """The second time, no prefix is taken from the cache, because all tokens need a vector."""
    engine = bench.engine(max_batched_tokens=tokens)
    numbers = range(len(bench.questions))
    bench.check(bench.ask(engine, numbers))
    bench.check(bench.ask(engine, numbers))
    assert engine.stats().num_prefix_hit_tokens == 0


def test_with_few_blocks_and_steps_launched_early(bench: TokenBench) -> None:
    text = bench.oracle.spec.text
    block = 2 * 16 * text.num_kv_heads * text.head_dim * 4 * text.num_layers
    engine = bench.engine(
        kv_cache_bytes=14 * block, max_model_len=192, overlap=True, max_batched_tokens=40
    )
    bench.check(bench.ask(engine, range(len(bench.questions))))
