"""Vectors and scores equal the reference computation of the model cards in transformers, float32 on
the CPU, and no batch mate, chunk, wait for blocks or cached prefix changes them.

The four kinds of models: text and vision, vectors and scores. A vector is compared after it was
normalized, and a score as a probability, as the cards give them: 1e-5.
"""

import json
import mmap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.nn.checkpoint import CheckpointError
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, ImageSpan, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.pooling_runner import PoolingRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from tests.engine_harness import small_pieces
from tests.integrity import check_engine
from tests.parity import text_oracle
from tests.parity.oracle import CONFIGS, Oracle, Prompt, make_oracle
from tests.search_checkpoints import EMBED_FILES, NO, SCORE_FILES, YES, write_files

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
Part = int | tuple[int, int]  # text tokens, or an image's grid in patches
# Odd sizes, mixtures, images alone, prompts longer than a step, and one that begins as another.
TEXTS: Seq[Seq[Part]] = ((20,), (1,), (75,), (33,), (140,), (77,))
MIXED: Seq[Seq[Part]] = (
    (20,),
    (7, (4, 6), 9),
    (3, (8, 12), 5, (6, 4), 4, (4, 4), 6),
    (40, (16, 20), 8),
    (2, (2, 2), 1),
    (5, (4, 4), 30, (12, 8), 3),
)


@dataclass
class Question:
    """A prompt, its message without an id, and the places of its embeddings in the arena."""

    prompt: Prompt
    message: AddSequence
    offsets: dict[bytes, int]


class Bench:
    """Prompts over one tiny checkpoint, and what transformers makes of them."""

    def __init__(self, oracle: Oracle, task: str, shapes: Seq[Seq[Part]]) -> None:
        self.oracle, self.task = oracle, task
        self.arena = mmap.mmap(-1, 32 << 20)
        self._used = 0
        # Each prompt twice: equal prompts meet in one batch.
        self.questions = [self._question(shapes[n % len(shapes)], n) for n in range(12)]
        self.expected = [self.reference(question.prompt) for question in self.questions]

    def _question(self, shape: Seq[Part], number: int) -> Question:
        prompt = self.oracle.prompt(*shape, seed=number % 6)
        answer = self.oracle.answer(prompt)
        spans, offsets = [], {}
        for index, embedding in enumerate(answer.embeddings):
            key = b"%032d" % (number % 6 * 10 + index)
            spans.append(ImageSpan(key, prompt.offsets[index], embedding.shape[1]))
            offsets[key] = self._put(embedding)
        positions = answer.positions.tobytes() if spans else b""
        ids = np.array(prompt.token_ids, np.int32).tobytes()
        message = AddSequence(0, ids, positions, answer.delta, spans, SamplingParams(max_tokens=1))
        return Question(prompt, message, offsets)

    def _put(self, embedding: torch.Tensor) -> int:
        spec = EmbeddingSpec("float32", *embedding.shape)
        start = self._used
        self.arena[start : start + spec.size_bytes] = embedding.numpy().tobytes()
        self._used += -(-spec.size_bytes // 4096) * 4096
        return start

    @torch.no_grad()
    def reference(self, prompt: Prompt) -> np.ndarray:
        """The card's: a normalized vector, or the probability of "yes"."""
        inputs = self.oracle._inputs(prompt)
        if self.task == "embed":
            hidden = self.oracle.model.model(**inputs).last_hidden_state[:, -1]
            return torch.nn.functional.normalize(hidden, p=2, dim=1)[0].numpy()
        logits = self.oracle.model(**inputs).logits[:, -1]
        pair = torch.stack((logits[:, NO], logits[:, YES]), dim=1)
        return torch.log_softmax(pair, dim=1)[:, 1].exp().numpy()

    def engine(self, *, overlap: bool = False, **options) -> Engine:
        chosen = {
            "device": "cpu", "dtype": "float32", "block_size": 16, "max_num_sequences": 12,
            "max_batched_tokens": 8192, "max_model_len": 512, "kv_cache_bytes": 64 << 20,
        } | options  # fmt: skip
        runner = create_runner(
            RunnerOptions(model_directory=self.oracle.directory, **chosen), self.arena
        )
        engine = Engine(runner, overlap=overlap, out_of_memory=(torch.OutOfMemoryError,))
        small_pieces(engine)
        return engine

    def ask(self, engine: Engine, numbers: Seq[int]) -> dict[int, np.ndarray]:
        """All at once; the result of each in the cards' form."""
        found: dict[int, np.ndarray] = {}
        for number in numbers:
            question, m = self.questions[number], self.questions[number].message
            engine.add(
                AddSequence(
                    number, m.prompt_token_ids, m.positions, m.position_delta, m.images, m.sampling
                )
            )
            for key, offset in question.offsets.items():
                engine.image_ready(number, key, offset)
        while len(found) < len(numbers):
            done = engine.step()
            assert done is not None, "the engine has stopped with work left"
            for event in done.events:
                assert event.end is not None and event.end.reason == "length", event
                assert event.sequence_id not in found and event.start is not None
                found[event.sequence_id] = self.shown(np.frombuffer(event.vector, "<f4"))
            for wanted in done.images_wanted:
                for key in wanted.keys:
                    offset = self.questions[wanted.sequence_id].offsets[key]
                    engine.image_ready(wanted.sequence_id, key, offset)
        check_engine(engine)
        return found

    def shown(self, result: np.ndarray) -> np.ndarray:
        if self.task == "embed":
            return result / np.linalg.norm(result)
        assert result.shape == (1,)
        return 1 / (1 + np.exp(-result.astype(np.float64)))

    def check(self, found: dict[int, np.ndarray]) -> None:
        assert len(found) == len(self.questions)
        errors = [float(np.abs(found[n] - self.expected[n]).max()) for n in found]
        print(f"largest error {max(errors):.1e}")
        assert max(errors) < TOLERANCE


def text_model(directory: Path, name: str) -> Oracle:
    return text_oracle.make_text_oracle(text_oracle.CONFIGS[name](), directory, seed=5)


def without_head(oracle: Oracle, prefix: str) -> Oracle:
    """The files as of a model without a head: as Qwen3-Embedding's, whose names have no `model.`
    (prefix ""), or as Qwen3-VL-Embedding's.
    """
    path = oracle.directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith("lm_head")}
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return oracle


@torch.no_grad()
def bring_answers_closer(oracle: Oracle) -> None:
    """Makes the logits of both answers differ by some units, so that scores are not 0 and 1."""
    weight = oracle.model.get_output_embeddings().weight
    weight[NO] = weight[YES] + 0.12 * weight[NO]
    oracle.model.save_pretrained(oracle.directory)


KINDS = {
    "text vectors": lambda d: without_head(text_model(d, "qwen3-biases"), ""),
    "tied text vectors": lambda d: without_head(text_model(d, "qwen3-odd-heads-tied"), ""),
    "vectors of a chat model's files": lambda d: text_model(d, "qwen3-gqa1-yarn"),
    "text scores": lambda d: text_model(d, "qwen3-gqa1-yarn"),
    "tied text scores": lambda d: text_model(d, "qwen3-odd-heads-tied"),
    "vision vectors": lambda d: without_head(
        make_oracle(CONFIGS["gqa3-hd32-odd-heads"], d, seed=5), "model."
    ),
    "vision scores": lambda d: make_oracle(CONFIGS["gqa4-hd64-three-taps"], d, seed=5),
    "untied vision scores": lambda d: make_oracle(CONFIGS["gqa2-hd32-yarn"], d, seed=5),
}


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    torch.set_num_threads(1)
    oracle = KINDS[request.param](Path(tmp_path_factory.mktemp("checkpoint")))
    task = "rank" if "scores" in request.param else "embed"
    if task == "rank":
        bring_answers_closer(oracle)
    write_files(oracle.directory, SCORE_FILES if task == "rank" else EMBED_FILES)
    shapes = MIXED if "vision" in request.param else TEXTS
    yield Bench(oracle, task, shapes)


def test_the_references_differ(bench: Bench) -> None:
    """Otherwise, a constant would pass. Scores of 0 and 1 would hide errors of their logits."""
    first = bench.expected[:6]
    if bench.task == "rank":
        scores = [float(score[0]) for score in first]
        assert max(scores) - min(scores) > 0.3
        assert any(0.05 < score < 0.95 for score in scores)
        return
    for index, one in enumerate(first):
        for other in first[:index]:
            assert float(np.abs(one - other).max()) > 100 * TOLERANCE


def test_each_alone(bench: Bench) -> None:
    engine = bench.engine()
    engine.scheduler.blocks.find_prefix = lambda sequence: []
    found = {}
    for number in range(len(bench.questions)):
        found |= bench.ask(engine, [number])
    bench.check(found)


def test_all_in_a_batch_and_then_from_the_prefix_cache(bench: Bench) -> None:
    engine = bench.engine()
    numbers = range(len(bench.questions))
    bench.check(bench.ask(engine, numbers))
    hits = engine.stats().num_prefix_hit_tokens
    bench.check(bench.ask(engine, numbers))
    assert engine.stats().num_prefix_hit_tokens > hits + 100


@pytest.mark.parametrize("tokens", [17, 48])
def test_in_chunks(bench: Bench, tokens: int) -> None:
    engine = bench.engine(max_batched_tokens=tokens)
    bench.check(bench.ask(engine, range(len(bench.questions))))


def test_with_blocks_for_one_prompt_and_steps_launched_early(bench: Bench) -> None:
    """A prompt gets all its blocks when it is admitted, so none is preempted for want of them."""
    text = bench.oracle.spec.text
    block = 2 * 16 * text.num_kv_heads * text.head_dim * 4 * text.num_layers
    engine = bench.engine(
        kv_cache_bytes=14 * block, max_model_len=192, overlap=True, max_batched_tokens=40
    )
    bench.check(bench.ask(engine, range(len(bench.questions))))


def test_a_result_that_is_not_finite_is_an_error(bench: Bench) -> None:
    """And it ends no other sequence, and poisons no block."""
    engine = bench.engine()
    runner = engine.runner
    pooler, calls = runner.pooler, iter([True])

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        found = pooler(hidden)
        if next(calls, False):
            found[0] = float("nan")
        return found

    runner.pooler = poisoned
    for number in (0, 2):
        m = bench.questions[number].message
        if not m.images:
            engine.add(AddSequence(number, m.prompt_token_ids, b"", 0, [], m.sampling))
    ends = {}
    while engine.has_work:
        done = engine.step()
        ends |= {e.sequence_id: e for e in (done.events if done else ()) if e.end is not None}
    failed = [event for event in ends.values() if event.end.reason == "failed"]
    assert [event.end.message for event in failed] == ["the model's output is not finite"]
    assert not failed[0].vector
    check_engine(engine)


def test_the_engine_says_its_task(bench: Bench) -> None:
    assert bench.engine().info.task == bench.task


class Allocated(TorchFunctionMode):
    """Counts the bytes of the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.num_bytes += made.nbytes if isinstance(made, torch.Tensor) else 0
        return made


def test_a_runner_for_search_has_no_memory_for_sampling(tmp_path: Path) -> None:
    oracle = text_model(tmp_path, "qwen3-biases")
    write_files(oracle.directory, EMBED_FILES)
    options = {"device": "cpu", "max_num_sequences": 12, "kv_cache_bytes": 1 << 22}
    runner = create_runner(RunnerOptions(model_directory=oracle.directory, **options))
    assert isinstance(runner, PoolingRunner)
    with Allocated() as allocated:
        PoolingRunner(runner.computer, runner.pooler)
    assert allocated.num_bytes == 0
    with Allocated() as allocated:
        ModelRunner(runner.computer)  # the control
    assert allocated.num_bytes >= 4 * 12 * runner.info.vocab_size


def test_a_reranker_without_its_head_is_refused(tmp_path: Path) -> None:
    oracle = without_head(text_model(tmp_path, "qwen3-gqa1-yarn"), "model.")
    write_files(oracle.directory, SCORE_FILES)
    with pytest.raises(CheckpointError, match="lm_head"):
        create_runner(
            RunnerOptions(model_directory=oracle.directory, device="cpu", kv_cache_bytes=1 << 22)
        )


def test_a_headless_architecture_makes_vectors(tmp_path: Path) -> None:
    """As sentence-transformers saves a fine-tuned model: `Qwen3Model`."""
    oracle = without_head(text_model(tmp_path, "qwen3-biases"), "")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_files(tmp_path, EMBED_FILES)
    bench = Bench(oracle, "embed", TEXTS)
    bench.check(bench.ask(bench.engine(), range(len(bench.questions))))
