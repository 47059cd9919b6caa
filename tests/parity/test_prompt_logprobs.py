"""Logprobs of a prompt are those of Hugging Face's logits, however the prompt is cut into chunks,
whatever the prefix cache has, and when the sequence is preempted meanwhile.
"""

import mmap

import numpy as np
import pytest
import torch

from services.common.embeddings.embedding import EmbeddingSpec
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, ImageSpan, SamplingParams
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from tests.engine_harness import small_pieces
from tests.parity import text_oracle
from tests.parity.oracle import CONFIGS, Prompt, make_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
TOP = 4


class Scored:
    """An engine over a tiny checkpoint, and the logprobs that it sent."""

    def __init__(self, oracle, **options) -> None:
        self.oracle = oracle
        self.arena = mmap.mmap(-1, 4 << 20)
        chosen = {
            "device": "cpu", "dtype": "float32", "block_size": 16, "max_num_sequences": 8,
            "max_batched_tokens": 40, "kv_cache_bytes": 16 << 20, "max_model_len": 512,
        } | options  # fmt: skip
        runner = create_runner(
            RunnerOptions(model_directory=oracle.directory, **chosen), self.arena
        )
        self.engine = Engine(runner, overlap=False)
        small_pieces(self.engine)
        self._used = 0
        self.parts: dict[int, list] = {}
        self.cached: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    def add(
        self, number: int, prompt: Prompt, wanted: int | None = TOP, num_tokens: int = 3, **sampling
    ) -> None:
        answer, spans, used = self.oracle.answer(prompt), [], self._used
        offsets: dict[bytes, int] = {}
        for index, embedding in enumerate(answer.embeddings):
            key = b"%032d" % (id(prompt) * 10 + index)
            size = EmbeddingSpec("float32", *embedding.shape).size_bytes
            self.arena[used : used + size] = embedding.numpy().tobytes()
            offsets[key] = used
            used += -(-size // 4096) * 4096
            spans.append(ImageSpan(key, prompt.offsets[index], embedding.shape[1]))
        self._used = used
        params = SamplingParams(max_tokens=num_tokens, prompt_logprobs=wanted, **sampling)
        self.engine.add(
            AddSequence(
                number, np.array(prompt.token_ids, np.int32).tobytes(),
                answer.positions.tobytes() if spans else b"", answer.delta if spans else 0,
                spans, params,
            )
        )  # fmt: skip
        for key, offset in offsets.items():
            self.engine.image_ready(number, key, offset)

    def run(self) -> None:
        while self.engine.has_work:
            done = self.engine.step()
            for event in done.events if done else ():
                assert event.end is None or event.end.reason == "length", event.end
                if event.prompt_logprobs is not None:
                    assert not self.tokens.get(event.sequence_id), "after the first token"
                    self.parts.setdefault(event.sequence_id, []).append(event.prompt_logprobs)
                self.tokens.setdefault(event.sequence_id, []).extend(event.token_ids)
                if event.start is not None:
                    self.cached[event.sequence_id] = event.start.num_cached_tokens

    def check(self, number: int, prompt: Prompt) -> None:
        logits = self.oracle.answer(prompt).logits.float()[:-1]
        right = torch.log_softmax(logits, -1)
        ids = torch.tensor(prompt.token_ids[1:])
        own = right.gather(-1, ids[:, None])[:, 0].numpy()
        place = 1
        for part in self.parts[number]:
            assert part.start == place
            found = np.frombuffer(part.logprobs, "<f4")
            rows = slice(place - 1, place - 1 + len(found))
            assert np.abs(found - own[rows]).max() < TOLERANCE
            ranks = (logits[rows] > logits[rows].gather(-1, ids[rows, None])).sum(-1) + 1
            assert np.frombuffer(part.ranks, "<i4").tolist() == ranks.tolist()
            top = right[rows].topk(TOP)
            shape = (len(found), TOP)
            assert np.frombuffer(part.top_token_ids, "<i4").reshape(shape).tolist() == (
                top.indices.tolist()
            )
            values = np.frombuffer(part.top_logprobs, "<f4").reshape(shape)
            assert np.abs(values - top.values.numpy()).max() < TOLERANCE
            place += len(found)
        assert place == len(prompt.token_ids)


@pytest.fixture(scope="module", params=["text", "images"])
def oracle(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    if request.param == "text":
        return text_oracle.make_text_oracle(
            text_oracle.CONFIGS["qwen3-odd-heads-tied"](), directory
        )
    return make_oracle(CONFIGS["gqa4-hd64-three-taps"], directory)


def prompt_of(oracle, length: int, seed: int = 0) -> Prompt:
    if oracle.spec.vision is None:
        return oracle.prompt(length, seed=seed)
    return oracle.prompt(length // 2, (8, 12), length - length // 2, seed=seed)


@pytest.mark.parametrize("budget", [16, 40, 512])
def test_chunks_and_neighbours(oracle, budget):
    scored = Scored(oracle, max_batched_tokens=budget)
    first, second = prompt_of(oracle, 75), prompt_of(oracle, 33, seed=1)
    scored.add(0, first)
    scored.add(1, first, wanted=None)
    scored.add(2, second, temperature=0.9, seed=3)
    scored.run()
    scored.check(0, first)
    scored.check(2, second)
    assert 1 not in scored.parts


def test_a_cached_prefix_is_computed_again(oracle):
    scored = Scored(oracle)
    prompt = prompt_of(oracle, 75)
    scored.add(0, prompt, wanted=None)
    scored.run()
    scored.add(1, prompt)
    scored.run()
    scored.check(1, prompt)
    scored.add(2, prompt, wanted=None)
    scored.run()
    assert (scored.cached[1], scored.cached[2]) == (0, (len(prompt.token_ids) - 1) // 16 * 16)
    assert scored.tokens[0] == scored.tokens[1] == scored.tokens[2]


def test_a_preempted_prompt_sends_each_token_once(oracle):
    if oracle.spec.vision is not None:
        pytest.skip("the same scheduler")
    # Eleven blocks: three prompts of three, and not each of them its fourth.
    scored = Scored(oracle, kv_cache_bytes=150_000, max_model_len=80)
    prompts = [prompt_of(oracle, 48, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        scored.add(number, prompt, num_tokens=20)
    scored.run()
    for number, prompt in enumerate(prompts):
        scored.check(number, prompt)
    assert scored.engine.stats().num_preemptions > 0


def test_one_token_has_none(oracle):
    if oracle.spec.vision is not None:
        pytest.skip("an image is more than one token")
    scored = Scored(oracle)
    scored.add(0, oracle.prompt(1))
    scored.run()
    assert not scored.parts
