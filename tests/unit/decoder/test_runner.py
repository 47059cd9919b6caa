"""The runner: a sequence's tokens do not depend on how its prompt is chunked or on its batch."""

import copy
import multiprocessing
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kernels.sampling import ALL_MASKED
from services.common.nn.device import resolve_device
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, EngineInfo, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.pending_step import DevicePendingStep
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.run.step_computer import Computed, StepComputer
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.step import ComputeStep, Step
from tests.decoder_harness import Harness, completion_of, write_checkpoint
from tests.engine_harness import small_pieces
from tests.sampling_twins import mask_of

HIDDEN, NUM_TOKENS = 32, 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="module")
def harness(directory: Path) -> Harness:
    return Harness(directory)


def start(harness: Harness, kind: int, row: int, sampling: SamplingParams | None = None):
    """Three kinds of sequence: text, an image with its own positions, two images."""
    rng = np.random.default_rng(kind)
    images = {0: [], 1: [(4, 6)], 2: [(2, 9), (15, 4)]}[kind % 3]
    length = 19 + kind
    token_ids = rng.integers(0, 90, length).tolist()
    positions, delta, placed = None, 0, []
    if images:
        positions = np.sort(rng.integers(0, length, (3, length))).astype(np.int32)
        delta = int(positions.max()) + 1 - length
        for offset, count in images:
            token_ids[offset : offset + count] = [95] * count
            shape = harness.runner.info.num_features, count, HIDDEN
            placed.append((offset, torch.from_numpy(rng.normal(0, 2, shape)).float()))
    return harness.start(token_ids, row, sampling, positions=positions, delta=delta, images=placed)


@pytest.fixture(scope="module")
def alone(harness: Harness) -> dict[int, list[int]]:
    """Completions of six sequences, each run by itself, prompts in one chunk."""
    found = {}
    for kind in range(6):
        sequence = start(harness, kind, 0)
        found[kind] = harness.generate(sequence, NUM_TOKENS)
        harness.finish(sequence)
    return found


def test_completions_differ(alone: dict[int, list[int]]) -> None:
    """Otherwise equality below would mean little."""
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    assert all(len(set(tokens)) > 3 for tokens in alone.values())


def test_images_decide_the_answer(harness: Harness, alone: dict[int, list[int]]) -> None:
    sequence = start(harness, 1, 0)
    for offset in sequence.image_offsets.values():
        harness.arena[offset : offset + 64] = bytes(64)
    assert harness.generate(sequence, NUM_TOKENS) != alone[1]
    harness.finish(sequence)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 7, 11, 16])
def test_chunk_sizes_do_not_matter(harness: Harness, alone, chunk_size: int) -> None:
    for kind in range(6):
        sequence = start(harness, kind, 3)
        assert harness.generate(sequence, NUM_TOKENS, chunk_size) == alone[kind]
        harness.finish(sequence)


@pytest.mark.parametrize("seed", range(25))
def test_any_interleaving_gives_the_same_tokens(
    harness: Harness, alone: dict[int, list[int]], seed: int
) -> None:
    """Mixed batches, any chunk sizes, preemptions, and up to two steps in flight."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(8)
    running = {kind: start(harness, kind, int(rows[kind])) for kind in range(6)}
    flying: list[tuple] = []
    while running or flying:
        if flying and (not running or len(flying) == 2 or rng.random() < 0.5):
            pending, chunks = flying.pop(0)
            harness.take(pending, chunks)
            for sequence in (chunk.sequence for chunk in chunks):
                if sequence.num_in_flight:
                    continue
                if sequence.num_generated == NUM_TOKENS:
                    kind = sequence.num_prompt_tokens - 19
                    assert completion_of(sequence) == alone[kind]
                    harness.finish(running.pop(kind))
                elif rng.random() < 0.1:
                    harness.restart(sequence, sequence.row)
        ready = [s for s in running.values() if s.num_generated + s.num_in_flight < NUM_TOKENS]
        chosen = [s for s in ready if rng.random() < 0.6]
        if chosen:
            chunks = [harness.chunk(s, int(rng.integers(1, 13))) for s in chosen]
            pending = harness.launch(*chunks)
            flying.append((pending, harness.order))


class RecordingRunner:
    """A `Runner` that keeps copies of the steps that another runner executes, and tokens."""

    def __init__(self, runner: ModelRunner, info: EngineInfo) -> None:
        self._runner, self.info = runner, info
        self.steps: list[tuple[Step, list[list[int]]]] = []

    def prepare(self, step: Step) -> None:
        self._runner.prepare(step)

    def execute(self, step: Step) -> DevicePendingStep:
        pending = self._runner.execute(step)
        self.steps.append((copy.deepcopy(step), pending.result().token_ids.tolist()))
        return pending


@pytest.mark.nightly
def test_a_runner_that_is_fed_from_bytes_alone_samples_the_same(
    harness: Harness, directory: Path
) -> None:
    """Steps of an engine (chunks, preemptions, penalties, images) in another process, which has
    neither scheduler nor sequences, only what each step's bytes say, and the images.
    """
    info = msgspec.structs.replace(
        harness.runner.info, num_blocks=24, max_batched_tokens=20, max_num_sequences=8
    )
    runner = RecordingRunner(harness.runner, info)
    engine = Engine(runner, overlap=True)
    small_pieces(engine)
    offsets: dict[bytes, int] = {}
    for kind, params in enumerate(SAMPLED * 2):
        given = start(harness, kind % 6, 0)
        positions = b"" if given.positions is None else given.positions.tobytes()
        limits = {"max_tokens": 12, "min_tokens": params.min_tokens}
        engine.add(
            AddSequence(
                sequence_id=kind, prompt_token_ids=given.token_ids.tobytes(), positions=positions,
                position_delta=given.message.position_delta, images=given.message.images,
                sampling=msgspec.structs.replace(params, **limits),
            )
        )  # fmt: skip
        for key, offset in given.image_offsets.items():
            engine.image_ready(kind, key, offset)
        offsets |= given.image_offsets
    while engine.has_work:
        done = engine.step()
        for wanted in done.images_wanted if done else ():
            for key in wanted.keys:
                engine.image_ready(wanted.sequence_id, key, offsets[key])
    harness.started.clear()
    assert engine.stats().num_preemptions > 0
    sent, expected = zip(*runner.steps, strict=True)
    threads, spawned = torch.get_num_threads(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, torch.set_num_threads, (threads,)) as other:
        found = other.submit(run_steps, directory, harness.arena[:], sent).result(120)
    assert found == list(expected)
    assert sum(len(token_ids) for token_ids in found) >= 12 * 12


class ComparedComputer(StepComputer):
    """A step computer whose steps another computer runs, too, from their bytes alone."""

    def __init__(self, computer: StepComputer, other: StepComputer) -> None:
        parts = computer.parts
        super().__init__(computer.info, computer.model, parts.backend, computer.state, parts.images)
        self._other = other
        self.largest = 0  # bytes of a step of decodes alone

    def run(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        data = step.to_bytes()
        if step.num_from_device == step.num_tokens:
            self.largest = max(self.largest, len(data))
        self._other.state.rows.last_tokens.copy_(self.state.rows.last_tokens)
        received = ComputeStep.from_bytes(data)
        other = self._other.run(received, self._other.stage(received))
        found = super().run(step, inputs)
        assert (other.logits is None) == (found.logits is None)
        if found.logits is not None and other.logits is not None:
            assert torch.equal(other.logits, found.logits)
        return found


def test_a_rank_computes_the_logits_by_its_half_of_a_step_alone(directory: Path) -> None:
    """It has the `ComputeStep` as bytes, the images, and the tokens that another rank sampled."""
    harness, rank = Harness(directory), Harness(directory)
    computer = ComparedComputer(harness.runner.computer, rank.runner.computer)
    harness.runner = ModelRunner(computer)
    for kind, params in enumerate(SAMPLED[:3]):
        sequence = start(harness, kind, kind, params)
        rank.arena[:] = harness.arena[:]
        harness.generate(sequence, 3, chunk_size=7)
        chunks = [harness.chunk(sequence) for _ in range(3)]  # two are from the device
        for pending, chunk in [(harness.launch(chunk), chunk) for chunk in chunks]:
            harness.take(pending, [chunk])
        harness.finish(sequence)
    assert 0 < computer.largest < 400, "what a rank gets for a decode is small"


def run_steps(directory: Path, arena: bytes, steps: Seq[Step]) -> list[list[list[int]]]:
    """The tokens of each step, in a process that has nothing but these and the images."""
    harness = Harness(directory)
    harness.arena[:] = arena
    run = harness.runner.execute
    return [run(step).result().token_ids.tolist() for step in steps]


def test_two_steps_in_flight_on_reused_rows(harness: Harness, alone) -> None:
    """A row is given to another sequence while its former owner's step is in flight."""
    first, second = start(harness, 0, 2), None
    harness.step(harness.chunk(first))
    chunk = harness.chunk(first)
    flying = harness.launch(chunk)
    second = start(harness, 1, 2)
    prefill = harness.chunk(second)
    next_flying = harness.launch(prefill)
    harness.take(flying, [chunk])
    assert completion_of(first) == alone[0][:2]
    harness.take(next_flying, [prefill])
    harness.finish(first)
    assert harness.generate(second, NUM_TOKENS) == alone[1]
    harness.finish(second)


SAMPLED = (
    SamplingParams(temperature=1.2, seed=3),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=2**63),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.7, presence_penalty=0.2),
    SamplingParams(temperature=1.5, min_p=0.05, seed=8, logit_bias={3: 2.0}, top_logprobs=2),
    SamplingParams(min_tokens=4, stop_token_ids=(5, 6)),
)


def test_sampled_sequences_are_the_same_alone_together_and_preempted(harness: Harness) -> None:
    expected = []
    for kind, params in enumerate(SAMPLED):
        sequence = start(harness, kind, 1, params)
        expected.append(harness.generate(sequence, NUM_TOKENS))
        harness.finish(sequence)
    together = [start(harness, kind, kind, params) for kind, params in enumerate(SAMPLED)]
    for n in range(NUM_TOKENS):
        harness.step(*[harness.chunk(sequence) for sequence in together])
        if n == 4:
            for sequence in together[::2]:
                harness.restart(sequence, sequence.row)
    for sequence, tokens in zip(together, expected, strict=True):
        assert completion_of(sequence) == tokens
        harness.finish(sequence)


def test_masked_sequences_have_allowed_tokens_and_change_nothing_for_others(
    harness: Harness,
) -> None:
    """Greedy and sampled rows, with masks for some, none for others, alone and in one batch."""
    chooser = np.random.default_rng(4)
    vocab_size = harness.runner.info.vocab_size
    allowed = {kind: chooser.random((NUM_TOKENS, vocab_size)) < 0.15 for kind in (0, 1, 3, 4)}

    def run(kinds: list[int]) -> dict[int, list[int]]:
        running = {kind: start(harness, kind, kind, SAMPLED[kind]) for kind in kinds}
        for number in range(NUM_TOKENS):
            for kind, sequence in running.items():
                if kind in allowed:
                    sequence.token_mask = mask_of(allowed[kind][number])
            harness.step(*[harness.chunk(sequence) for sequence in running.values()])
        for sequence in running.values():
            harness.finish(sequence)
        return {kind: completion_of(sequence) for kind, sequence in running.items()}

    together = run(list(range(len(SAMPLED))))
    for kind, tokens in together.items():
        assert run([kind])[kind] == tokens
        if kind in allowed:
            assert all(allowed[kind][number][token] for number, token in enumerate(tokens))


def test_a_row_without_an_allowed_token_fails_alone(harness: Harness, alone) -> None:
    empty, sound = start(harness, 1, 0), start(harness, 2, 1)
    empty.token_mask = mask_of(np.zeros(harness.runner.info.vocab_size, np.bool_))
    output = harness.step(harness.chunk(empty), harness.chunk(sound)).result()
    assert output.token_ids.tolist() == [[ALL_MASKED], [alone[2][0]]]
    for sequence in (empty, sound):
        harness.finish(sequence)


def test_logprobs_are_under_the_index_of_their_token(harness: Harness) -> None:
    params = [None, SamplingParams(top_logprobs=3), None, SamplingParams(top_logprobs=0)]
    sequences = [start(harness, kind, kind, one) for kind, one in enumerate(params)]
    output = harness.step(*[harness.chunk(sequence) for sequence in sequences]).result()
    assert sorted(output.logprobs) == [1, 3]
    assert output.logprobs[1][0].top_token_ids[0] == output.token_ids[1, 0]
    (one,), (three,) = output.logprobs[1], output.logprobs[3]
    assert one.logprob == pytest.approx(one.top_logprobs[0])
    assert len(one.top_token_ids) == 3 and not three.top_token_ids
    for sequence in sequences:
        harness.finish(sequence)


def test_a_step_without_samples_gives_nothing(harness: Harness) -> None:
    sequence = start(harness, 0, 0)
    output = harness.step(harness.chunk(sequence, 5)).result()
    assert output.token_ids.tolist() == [] and output.logprobs == {}
    harness.finish(sequence)


def test_a_sequence_that_is_not_finite_fails_alone(harness: Harness, alone) -> None:
    broken, sound = start(harness, 1, 0), start(harness, 2, 1)
    offset = next(iter(broken.image_offsets.values()))
    harness.arena[offset : offset + 4] = np.float32(np.nan).tobytes()
    output = harness.step(harness.chunk(broken), harness.chunk(sound)).result()
    assert output.token_ids.tolist() == [[-1], [alone[2][0]]]
    broken.token_ids[-1] = 0
    # It may be in the next step already, fed from the device.
    again = harness.step(harness.chunk(broken), harness.chunk(sound)).result()
    assert again.token_ids.tolist() == [[-1], [alone[2][1]]]
    harness.finish(broken)
    harness.finish(sound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(directory: Path, dtype: str) -> None:
    harness = Harness(directory, dtype=dtype)
    assert harness.runner.info.dtype == dtype
    assert len(harness.generate(start_text(harness), 5)) == 5


def start_text(harness: Harness, row: int = 0) -> Sequence:
    return harness.start(list(range(10)), row)


def test_tied_checkpoints_run(tmp_path: Path) -> None:
    harness = Harness(write_checkpoint(tmp_path, tied=True))
    assert len(harness.generate(start_text(harness), 5)) == 5


def test_dummy_weights_need_no_tensors(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    first = Harness(tmp_path, load_format="dummy")
    second = Harness(tmp_path, load_format="dummy")
    assert first.generate(start_text(first), 5) == second.generate(start_text(second), 5)


def test_info_says_what_is_served(harness: Harness) -> None:
    info = harness.runner.info
    assert (info.num_features, info.hidden, info.vocab_size, info.block_size) == (3, 32, 100, 4)
    assert info.max_model_len == 2048 and info.num_blocks * 4 >= 2048


def test_the_models_length_bounds_max_model_len(directory: Path) -> None:
    options = RunnerOptions(model_directory=directory, device="cpu", max_model_len=4097)
    with pytest.raises(ValueError, match="limit of 4096"):
        create_runner(options)


def test_the_pool_bounds_max_model_len(directory: Path) -> None:
    harness = Harness(directory, max_model_len=None, kv_cache_bytes=1 << 20)
    info = harness.runner.info
    assert info.max_model_len == info.num_blocks * 4 < 4096


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int8"),
        ("load_format", "gguf"),
        ("kernels", "decode_attention=x"),
        ("device", "tpu"),
    ],
)
def test_an_unknown_option_is_refused(directory: Path, option: str, value: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        Harness(directory, **{option: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="sees no such GPU"):
        resolve_device("cuda:0")


def test_image_segments_are_cut_by_chunks(harness: Harness) -> None:
    sequence = start(harness, 2, 0)
    first, second = sequence.message.images
    other = start_text(harness, 1)
    chunks = harness.chunk(other, 5), harness.chunk(sequence, 8)
    (part,) = harness.inputs(*chunks).images
    assert (part.row, part.num_rows, part.first_token, part.num_tokens) == (7, 6, 0, 9)
    chunk = harness.chunk(sequence, 9)
    left, right = harness.inputs(chunk).images
    assert (left.row, left.num_rows, left.first_token) == (0, 3, 6)
    assert (right.row, right.num_rows, right.first_token) == (15 - 8, 2, 0)
    assert left.arena_offset == sequence.image_offsets[first.key]
    assert right.arena_offset == sequence.image_offsets[second.key]
    harness.finish(sequence)
    harness.finish(other)
