"""Drafts over recurrent states on a GPU: the kernels against their twin, alone and within a CUDA
graph that serves runs of other lengths, and an engine whose steps with drafts run in graphs.

Kernels: float32 within 1e-4 of values of the order of 1, bf16 by the relative L2 of the worst row,
as in test_qwen3_5_gpu.py.

The engine runs in bf16, because no kernel of attention is captured in float32. Batches of other
sizes then round otherwise, so that two nearly equal logits may change places, and answers are not
compared word for word. Instead the model scores each answer without drafts, graphs and kernels of
decodes, as one prompt: the logit of each token has to be the largest within `CLOSE` standard
deviations of its row. A state that lacks a draft, or has seen a rejected one, leads to tokens which
are several standard deviations away, and a control shows it.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from kernels.linear_attention import delta_rule_drafts
from kernels.linear_attention.draft_runs import KeptInputs, StepRuns, run_table
from kernels.linear_attention.states import StateCache
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.schedule.lookup import Lookups
from services.decoder.engine.step import ComputeStep
from tests.decoder_harness import Harness, write_hybrid
from tests.engine_harness import Untimed, small_pieces
from tests.gpu.decoder_2b import GPU, options, relative
from tests.known_drafts import KnownSources, from_answer
from tests.unit.kernels.delta_rule_steps import difference, random_inputs, random_runs, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
pytest.importorskip("triton")
from kernels.linear_attention import delta_rule_verify  # noqa: E402

SPECS = {
    "4b": spec_of(16, 32, 128, 128),
    "27b": spec_of(16, 48, 128, 128),
    "odd": spec_of(3, 9, 64, 96, 3),
}
RNG = np.random.default_rng(7)
# Runs of (tokens before the step, kept inputs that are folded, drafts), and the most drafts.
MANY = [
    (int(context), int(min(folds, context)), int(drafts))
    for context, folds, drafts in zip(
        RNG.integers(1, 50, 64), RNG.integers(0, 4, 64), RNG.integers(0, 4, 64), strict=True
    )
]
STEPS = {
    "one": ([(700, 2, 3)], 3),
    "first": ([(0, 0, 3)], 3),
    "each": ([(40, folds, drafts) for folds in range(9) for drafts in range(9)], 8),
    "many": (MANY, 3),
    "no drafts": ([(index % 7, 0, 0) for index in range(64)], 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", SPECS)
def test_kernels_agree_with_their_twin(size: str, name: str, dtype: torch.dtype) -> None:
    spec, (runs, most) = SPECS[size], STEPS[name]
    layout, kept = random_runs(spec, runs, most, dtype, GPU, num_padding=5)
    count = layout.num_decodes
    inputs = random_inputs(spec, count, dtype, GPU)
    cache = StateCache(layout.cache.conv.clone(), layout.cache.recurrent.clone())
    twin, others = replace(layout, cache=cache), KeptInputs(kept.qkv.clone(), kept.gates.clone())
    shape = count, spec.num_value_heads, spec.value_head_dim
    found, expected = (torch.full(shape, torch.nan, dtype=dtype, device=GPU) for _ in range(2))
    states, own = layout.cache.layer(0), kept.layer(0)
    delta_rule_verify.verify(inputs, states, layout, own, found, pdl=2)
    delta_rule_drafts.verify(inputs, cache.layer(0), twin, others.layer(0), expected)
    assert found.isfinite().all(), "a decode that pads a captured step has no output"
    scratch, used = int(layout.slots[-1]), slice(count - 5)
    for each in (layout.cache.conv, layout.cache.recurrent, cache.conv, cache.recurrent):
        each[:, scratch] = 0.0
    assert difference(layout.cache.conv, cache.conv) == 0
    assert difference(kept.qkv, others.qkv) == difference(kept.gates, others.gates) == 0
    if dtype == torch.float32:
        output = difference(found[used], expected[used])
        state = difference(layout.cache.recurrent, cache.recurrent)
    else:
        output = relative(found[used].flatten(1), expected[used].flatten(1))
        live = layout.slots[used].unique()
        ours, theirs = (x.recurrent[0, live].flatten(1) for x in (layout.cache, cache))
        state = relative(ours, theirs)
    print(f"\n{size} {name} {dtype}: output {output:.2e}, state {state:.2e}")
    assert max(output, state) < (1e-4 if dtype == torch.float32 else 1.5e-2)


def test_a_graph_serves_steps_with_other_runs() -> None:
    """Captured for 16 decodes without drafts, and replayed for runs of every kind."""
    spec, dtype, most = SPECS["27b"], torch.bfloat16, 3
    layout, kept = random_runs(spec, [(5, 0, 0)] * 16, most, dtype, GPU)
    inputs = random_inputs(spec, 16, dtype, GPU)
    out = torch.zeros(16, 48, 128, dtype=dtype, device=GPU)
    states, own = layout.cache.layer(0), kept.layer(0)
    delta_rule_verify.verify(inputs, states, layout, own, out, pdl=2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        delta_rule_verify.verify(inputs, states, layout, own, out, pdl=2)
    assert layout.runs is not None
    for runs in ([(9, 3, 3)] * 4, [(9, 1, 2), (30, 0, 3), (5, 2, 0), (4, 3, 3), (8, 0, 3)]):
        lengths = [1 + drafts for _, _, drafts in runs]
        slots = np.repeat(np.arange(1, len(runs) + 1), lengths).astype(np.int32)
        lens = np.concatenate(
            [context + 1 + np.arange(1 + drafts) for context, _, drafts in runs]
        ).astype(np.int32)
        firsts = np.cumsum([0, *lengths[:-1]]).tolist()
        folds = {first: n for first, (_, n, _) in zip(firsts, runs, strict=True) if n}
        padding = 16 - len(slots)
        slots = np.concatenate((slots, np.full(padding, 17, np.int32)))
        lens = np.concatenate((lens, np.ones(padding, np.int32)))
        table = torch.from_numpy(run_table(slots, lens, folds))
        layout.runs.table.copy_(table)
        layout.slots.copy_(torch.from_numpy(slots))
        layout.seq_lens_device.copy_(torch.from_numpy(lens))
        cache = StateCache(layout.cache.conv.clone(), layout.cache.recurrent.clone())
        others = KeptInputs(kept.qkv.clone(), kept.gates.clone())
        used = 16 - padding
        twin = replace(layout, cache=cache)
        twin.runs = StepRuns(layout.runs.table, slots[:used], lens[:used], folds)
        expected = torch.zeros_like(out)
        delta_rule_drafts.verify(inputs, cache.layer(0), twin, others.layer(0), expected)
        graph.replay()
        assert relative(out[:used].flatten(1), expected[:used].flatten(1)) < 1.5e-2
        live = slice(1, len(runs) + 1)
        ours, theirs = (x.recurrent[0, live].flatten(1) for x in (layout.cache, cache))
        assert relative(ours, theirs) < 1.5e-2
        assert difference(layout.cache.conv[:, live], cache.conv[:, live]) == 0
        assert difference(kept.qkv, others.qkv) == 0


# An engine.

CLOSE, NUM_TOKENS = 0.3, 48
SIZES: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
        "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
DEVICE: dict[str, object] = options(
    max_num_sequences=32, max_batched_tokens=512, max_model_len=1024, kv_cache_bytes=256 << 20
)


class Bench:
    """Greedy requests on a hybrid model.

    Attributes:
        harness: the runner.
        messages: the requests. The prompts are 130 to 260 tokens long, and every third repeats
            itself, so that lookup finds drafts.
        expected: their answers without drafts.
        eager: number of steps with drafts that no graph ran.
        captured: number of steps with drafts that graphs ran.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness, self.eager, self.captured = harness, 0, 0
        rng, self.messages = np.random.default_rng(2), list[AddSequence]()
        for number, length in enumerate(rng.integers(130, 260, 10).tolist()):
            ids = rng.integers(0, 90, length)
            if number % 3 == 0:
                ids = np.tile(ids[:20], 13)[:length]
            sequence = harness.start(ids.tolist(), 0, SamplingParams(max_tokens=NUM_TOKENS))
            self.messages.append(msgspec.structs.replace(sequence.message, sequence_id=number))
        harness.started.clear()
        self.expected = self.run(self.engine())

    def engine(self, max_drafts: int = 0, share: float = 1.0, *, overlap: bool = False) -> Engine:
        engine = Engine(
            self.harness.runner, overlap=overlap, max_drafts=max_drafts, step_cost=Untimed()
        )
        small_pieces(engine)

        def token(message: AddSequence, index: int) -> int:
            return from_answer(message, self.expected[message.sequence_id % 100], index)

        engine.speculation.sources = KnownSources(token, share)
        return engine

    def run(self, engine: Engine, *, first: int = 0, change: int = 0) -> list[list[int]]:
        """Runs all requests, with ids from `first` on.

        Args:
            engine: an engine on the runner.
            first: id of the first sequence.
            change: number by which folds are changed, for a control.
        """
        computer, answers = self.harness.runner.computer, [list[int]() for _ in self.messages]
        stage, num_left = computer.stage, len(self.messages)

        def counted(step: ComputeStep) -> StepInputs:
            if step.folds is not None and change:
                folds = step.folds.copy()
                folds[:, 1] = np.clip(folds[:, 1] + change, 0, 8)
                step.folds = folds[folds[:, 1] > 0]
            inputs = stage(step)
            if step.has_drafts:
                self.captured += inputs.graphs is not None
                self.eager += inputs.graphs is None
            return inputs

        with mock.patch.object(computer, "stage", counted):
            for number, message in enumerate(self.messages):
                engine.add(msgspec.structs.replace(message, sequence_id=first + number))
            while num_left:
                done = engine.step()
                assert done is not None or engine.pending, "the engine has stopped"
                for event in done.events if done else []:
                    answers[event.sequence_id - first] += event.token_ids
                    num_left -= event.end is not None
        return answers

    def worst_gap(self, answers: list[list[int]]) -> float:
        """The most by which a token's logit is below the largest, in standard deviations."""
        worst = 0.0
        for message, answer in zip(self.messages, answers, strict=True):
            prompt = np.frombuffer(message.prompt_token_ids, np.int32).tolist()
            sequence = self.harness.start(prompt + answer, 31)
            logits = self.harness.prompt_logits(sequence).float()[len(prompt) - 1 : -1]
            chosen = logits[range(len(answer)), answer]
            worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
        return worst


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = write_hybrid(tmp_path_factory.mktemp("hybrid"), **SIZES)
    with closing(Harness(directory, checkpoint_bytes=64 << 20, max_drafts=8, **DEVICE)) as harness:
        yield Bench(harness)
    torch.cuda.empty_cache()


def test_without_drafts_answers_are_the_models(bench: Bench) -> None:
    gap = bench.worst_gap(bench.expected)
    print(f"\nworst gap {gap:.3f}")
    assert gap < CLOSE
    if bench.harness.runner.info.on_gpu:
        assert len(bench.harness.runner.computer.graphs) >= 1
        assert bench.harness.runner.kernel_calls["delta_verify=triton"] > 0


@pytest.mark.parametrize(("max_drafts", "share"), [(3, 0.0), (3, 0.7), (8, 0.9), (8, 1.0)])
def test_answers_with_drafts_are_the_models(bench: Bench, max_drafts: int, share: float) -> None:
    """Also after prefix hits, and all of it in graphs."""
    bench.eager = bench.captured = 0
    engine = bench.engine(max_drafts, share)
    found = bench.run(engine), bench.run(engine, first=100)
    drafts, equal = engine.stats().drafts, np.mean([a == b for a, b in zip(*found, strict=True)])
    assert drafts is not None
    gaps = [bench.worst_gap(answers) for answers in found]
    print(
        f"\naccepted {drafts.num_accepted} of {drafts.num_drafts}, {bench.captured} steps in"
        f" graphs, worst gaps {gaps[0]:.3f} and {gaps[1]:.3f}, {equal:.0%} of both rounds equal"
    )
    assert max(gaps) < CLOSE
    assert engine.stats().num_prefix_hit_tokens > 64
    assert (drafts.num_accepted > 50) == (share > 0.0)
    if bench.harness.runner.info.on_gpu:
        assert bench.captured > 10 and bench.eager == 0


def test_answers_of_lookup_are_the_models(bench: Bench) -> None:
    engine = bench.engine(8)
    engine.speculation.sources = Lookups()
    assert bench.worst_gap(bench.run(engine)) < CLOSE


def test_answers_after_preemptions_are_the_models(bench: Bench) -> None:
    runner = bench.harness.runner
    tokens = 1600
    few = msgspec.structs.replace(
        runner.info, num_blocks=tokens // runner.info.block_size, max_model_len=300
    )
    with mock.patch.object(runner, "info", few):
        engine = bench.engine(8, 0.9, overlap=True)
    assert bench.worst_gap(bench.run(engine)) < CLOSE
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.drafts is not None and stats.drafts.num_accepted > 20


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_folds_is_seen(bench: Bench, change: int) -> None:
    gap = bench.worst_gap(bench.run(bench.engine(3, 0.7), change=change))
    print(f"\nworst gap {gap:.3f}")
    assert gap > 2 * CLOSE
