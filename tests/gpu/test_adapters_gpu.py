"""Adapters on a GPU: shrink and expand against float64, and engines in CUDA graphs.

Tolerances. The products of shrink are rounded to bf16 once, as is the output: the change of a layer
differs from float64 by at most 2^-8 = 4e-3 of its norm for each rounding. Answers of engines are
compared by logits, as in `test_decoder_graphs`: GEMMs of another size differ by up to 5e-2, and
with quantized weights by up to `LIMITS`. Answers with drafts are scored by the model without
drafts, as in `test_draft_kernels_gpu`.

Each engine here takes less than 3 GB.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from benchmarks.adapters import write_adapter, write_model
from kernels.adapters import plain
from kernels.adapters.factors import AdapterRows, Norm, SlotFactors
from kernels.plain import rms_norm
from services.common.model_spec import RopeSpec, TextSpec
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.schedule.lookup import DraftSources, Lookups
from services.decoder.engine.step import ComputeStep
from tests import fp8_checkpoints, packed_checkpoints
from tests.decoder_harness import Harness
from tests.engine_harness import Untimed
from tests.gpu.adapter_kernels import (
    CHANGE,
    DOWN,
    GATE_UP,
    QKV,
    SLOTS,
    factors_of,
    given,
    rows_of,
    slots_of,
)
from tests.gpu.decoder_2b import options, prompts, relative
from tests.gpu.twins import CUDA, error, random
from tests.known_drafts import KnownSources, from_answer

pytest.importorskip("triton")
from kernels import tuning
from kernels.adapters import shrink_expand
from kernels.device import DeviceFacts
from kernels.gemm import gemv, skinny_gemm
from kernels.gemm.changes import Changes
from kernels.launches import captured_graph

pytestmark = pytest.mark.gpu
CASES = [
    (QKV, 8, 1), (QKV, 8, 64), (QKV, 8, 3000), (GATE_UP, 8, 1), (GATE_UP, 8, 64),
    (GATE_UP, 8, 3000), (DOWN, 32, 65), (QKV, 64, 64), (QKV, 256, 5), (GATE_UP, 256, 64),
    (QKV, 256, 3000),
]  # fmt: skip


def exact(out: Tensor, x: Tensor, factors: SlotFactors, slots: Tensor) -> Tensor:
    """The output with the changes in float64."""
    found, start = out.double().clone(), 0
    for module, size in enumerate(factors.sizes):
        for slot in slots.unique().tolist():
            if slot >= 0:
                own = slots == slot
                a = factors.a[slot, module].double()
                b = factors.b[start : start + size, slot].double()
                found[own, start : start + size] += x[own].double() @ a.T @ b.T
        start += size
    return found


@pytest.mark.parametrize(("sizes", "rank", "count"), CASES)
def test_shrink_and_expand_agree_with_float64(
    sizes: tuple[int, ...], rank: int, count: int
) -> None:
    torch.manual_seed(0)
    columns = 12288 if sizes == DOWN else 4096
    factors, x = factors_of(sizes, columns, rank), random(count, columns)
    for kind in ("none", "one", "eight", "some"):
        slots = slots_of(count, kind)
        rows, without = rows_of(slots), slots < 0
        out = random(count, sum(sizes))
        if count <= 64:  # partials
            out = torch.randn(2, count, sum(sizes), device=CUDA)
        before = out.double().view(-1, count, sum(sizes)).sum(0)
        wanted = exact(before, x, factors, slots)
        products = shrink_expand.shrink_adapters(x, None, factors, rows, **given())
        if sizes == GATE_UP:
            found = shrink_expand.expand_adapters_swiglu(out, products, factors, rows, **given())
            gate, up = wanted.chunk(2, 1)
            assert error(found, torch.nn.functional.silu(gate) * up) < 2 * CHANGE, kind
            continue
        found = shrink_expand.expand_adapters(out.clone(), products, factors, rows, **given())
        assert torch.equal(found[..., without, :], out[..., without, :]), kind
        if not without.all():
            whole = found.double().view(-1, count, sum(sizes)).sum(0)
            assert error(whole, wanted) < CHANGE, kind
            change = (whole - before)[~without]
            assert error(change, (wanted - before)[~without]) < CHANGE, kind


@pytest.mark.parametrize("rank", [16, 128])
def test_shrink_normalizes_one_token(rank: int) -> None:
    norm, factors = RMSNorm(4096, 1e-6), factors_of(QKV, 4096, rank)
    norm.weight.data = random(4096)
    rows, x = AdapterRows(slots_of(1, "one"), SLOTS, 0, SLOTS), random(1, 4096) * 7
    first: Norm = norm
    found = shrink_expand.shrink_adapters(x, first, factors, rows, **given()).sum(0)
    assert error(found, plain.shrink_adapters(x, first, factors, rows).sum(0)) < CHANGE


@pytest.mark.parametrize("rank", [16, 256])
@pytest.mark.parametrize("sizes", [QKV, GATE_UP, DOWN])
def test_gemvs_add_the_change_of_one_token(sizes: tuple[int, ...], rank: int) -> None:
    """Without a slot, a GEMV gives the bits of the base layer. Weights are small beside changes."""
    torch.manual_seed(0)
    columns = 12288 if sizes == DOWN else 4096
    factors, x = factors_of(sizes, columns, rank), random(1, columns)
    weight, norm = random(sum(sizes), columns) * columns**-0.5, random(columns)
    residual = random(1, sum(sizes))
    for slot in (5, 0, -1, 7):
        slots = torch.tensor([slot], device=CUDA)

        changes = factors.changes(AdapterRows(slots, SLOTS, 0, SLOTS))
        normed = rms_norm(x, norm, 1e-6)
        wanted = exact(normed.double() @ weight.double().T, normed, factors, slots)
        found = gemv.norm_linear(x, norm, 1e-6, weight, pdl=2, changes=changes)
        assert error(found, wanted) < CHANGE, slot
        if slot < 0:
            assert torch.equal(found, gemv.norm_linear(x, norm, 1e-6, weight, pdl=2))
        if sizes == GATE_UP:
            found = gemv.norm_swiglu(x, norm, 1e-6, weight, pdl=2, changes=changes)
            gate, up = wanted.chunk(2, 1)
            assert error(found, torch.nn.functional.silu(gate) * up) < 2 * CHANGE, slot
        wanted = exact(x.double() @ weight.double().T, x, factors, slots)
        out = residual.clone()
        gemv.linear_residual(x, weight, None, out, pdl=2, changes=changes)
        assert error(out, residual.double() + wanted) < CHANGE, slot
        assert not factors.words.any(), slot


class Skinny:
    """The skinny GEMMs of a layer, with its changes or without."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        self.sizes, self.columns = sizes, 12288 if sizes == DOWN else 4096
        self.factors = factors_of(sizes, self.columns, rank)
        # Small beside the changes.
        self.weight = random(sum(sizes), self.columns) * self.columns**-0.5
        gpu = DeviceFacts.of(torch.device(CUDA))
        self.given: dict[str, Any] = {"shared_memory_bytes": gpu.shared_memory_bytes, "pdl": 2}
        shape = gpu, sum(sizes), self.columns
        self.split, self.whole = tuning.split_k_config(*shape), tuning.skinny_swiglu_config(*shape)

    def changes(self, slots: Tensor) -> Changes:
        return self.factors.changes(AdapterRows(slots, SLOTS, 0, SLOTS))

    def partials(self, x: Tensor, changes: Changes | None) -> Tensor:
        assert self.split is not None
        return skinny_gemm.split_k_partials(
            x, self.weight, None, self.split, changes=changes, **self.given
        )

    def swiglu(self, x: Tensor, changes: Changes) -> Tensor:
        assert self.whole is not None
        return skinny_gemm.linear_swiglu(
            x, self.weight, None, self.whole, changes=changes, **self.given
        )


@pytest.mark.parametrize("count", [2, 17, 64])
@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("sizes", [QKV, GATE_UP, DOWN])
def test_skinny_gemms_add_the_changes_of_a_few_tokens(
    sizes: tuple[int, ...], rank: int, count: int
) -> None:
    """Tokens without a slot have the bits of the base layer."""
    torch.manual_seed(0)
    layer = Skinny(sizes, rank)
    x = random(count, layer.columns)
    for kind in ("none", "one", "eight", "some"):
        slots = slots_of(count, kind)
        wanted = exact(x.double() @ layer.weight.double().T, x, layer.factors, slots)
        found = layer.partials(x, layer.changes(slots))
        assert error(found.sum(0), wanted) < CHANGE, kind
        assert torch.equal(found[:, slots < 0], layer.partials(x, None)[:, slots < 0]), kind
        if sizes == GATE_UP:
            found = layer.swiglu(x, layer.changes(slots))
            gate, up = wanted.chunk(2, 1)
            assert error(found, torch.nn.functional.silu(gate) * up) < 2 * CHANGE, kind
        assert not layer.factors.words.any(), kind


@pytest.mark.parametrize("count", [16, 64])
def test_a_token_does_not_depend_on_the_adapters_of_others(count: int) -> None:
    """Its own output has the same bits, whichever slots the others have."""
    torch.manual_seed(0)
    layer = Skinny(QKV, 16)
    x, slots = random(count, layer.columns), slots_of(count, "eight")
    first = layer.partials(x, layer.changes(slots))
    other = slots.roll(3)
    other[5] = slots[5]
    assert torch.equal(layer.partials(x, layer.changes(other))[:, 5], first[:, 5])


def test_graphs_with_changes_give_the_same_bits_at_each_replay() -> None:
    """Dependent launches of the same layer follow each other, so words are used again at once."""
    torch.manual_seed(0)
    layer, norm = Skinny(QKV, 16), random(4096)
    few, one = random(64, 4096), random(1, 4096)
    eight, alone = slots_of(64, "eight"), slots_of(1, "one")
    changes = layer.changes(alone)

    def both() -> tuple[Tensor, Tensor]:
        found = gemv.norm_linear(one, norm, 1e-6, layer.weight, pdl=2, changes=changes)
        return layer.partials(few, layer.changes(eight)), found

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = both()
        torch.cuda.synchronize()
        with captured_graph(None) as graph:
            results = [both() for _ in range(20)]
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result[0], wanted[0]) and torch.equal(result[1], wanted[1])
    assert not layer.factors.words.any()


@pytest.mark.parametrize("count", [1, 33, 1000])
def test_dora_scales_the_output_of_its_slots(count: int) -> None:
    made = factors_of(QKV, 4096, 16)
    bias = random(sum(QKV))
    factors = replace(made, bias=bias).with_factor()
    assert factors.factor is not None
    factors.factor[5].uniform_(0.5, 2)
    rows = AdapterRows(slots_of(count, "some"), SLOTS, 0, SLOTS)
    x, out = random(count, 4096), random(2, count, sum(QKV)).float()
    products = shrink_expand.shrink_adapters(x, None, factors, rows, **given(0))
    found = shrink_expand.expand_adapters(out.clone(), products, factors, rows, **given(0)).sum(0)
    twin = plain.expand_adapters(out.clone(), products, factors, rows)
    assert error(found, twin) < CHANGE


TEXT = TextSpec(
    vocab_size=4096, hidden_size=2048, intermediate_size=6144, num_layers=4, num_heads=16,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=5e6, rotary_dim=128),
    max_position_embeddings=32768, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model's configuration, and eight adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    write_model(directory / "model", TEXT)
    found = [directory / f"adapter-{slot}" for slot in range(SLOTS)]
    for slot, place in enumerate(found):
        write_adapter(place, TEXT, (16, 8, 32, 16)[slot % 4], slot)
    return [directory / "model", *found]


@pytest.fixture(scope="module")
def served(places: list[Path]) -> Iterator[Harness]:
    """The model with eight adapters and a free slot, in CUDA graphs."""
    chosen = options(
        load_format="dummy", adapters=tuple(places[1:]), max_adapters=SLOTS + 1,
        max_batched_tokens=2048, kv_cache_bytes=512 << 20,
    )  # fmt: skip
    with closing(Harness(places[0], **chosen)) as harness:
        yield harness
    torch.cuda.empty_cache()


def replayed(harness: Harness, slots: list[int], ids: list[list[int]]) -> Tensor:
    """Logits of one decode of each prompt, in one step of a graph."""
    assert harness.model.adapters.fit_graphs
    running = [
        harness.start([token % 4000 for token in prompt], row, adapter=slot)
        for row, (prompt, slot) in enumerate(zip(ids, slots, strict=True))
    ]
    for sequence in running:
        harness.step(harness.chunk(sequence))
    decodes = harness.runner.computer.graphs[0]
    before = sum(each.calls.num_replays for each in decodes._captured.values())
    harness.launch(*[harness.chunk(sequence) for sequence in running]).result()
    after = sum(each.calls.num_replays for each in decodes._captured.values())
    assert after == before + 1, "the step ran outside a graph"
    assert decodes.logits is not None
    found = decodes.logits[: len(running)].clone()
    for sequence in running:
        harness.finish(sequence)
    return found


def test_eight_adapters_in_one_step_equal_each_alone(served: Harness) -> None:
    slots = [*range(SLOTS), -1, SLOTS]
    ids = [prompts(1)[0]] * len(slots)
    together = replayed(served, slots, ids)
    for row, slot in enumerate(slots):
        alone = replayed(served, [slot], [ids[row]])
        assert relative(together[row : row + 1], alone) < 5e-2, slot
    base = together[SLOTS : SLOTS + 1]
    assert relative(together[SLOTS + 1 :], base) < 5e-2  # an empty slot is the base model
    for slot in range(SLOTS):  # control
        assert relative(together[slot : slot + 1], base) > 0.2, slot


@pytest.mark.parametrize("count", [1, 8, 64])
def test_a_graph_with_adapters_agrees_with_the_reference(
    served: Harness, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    slots = [row % SLOTS if row % 5 else -1 for row in range(count)] if count > 1 else [2]
    ids = prompts(count)
    assert relative(replayed(served, slots, ids), reference(served, monkeypatch, slots, ids)) < 5e-2


def reference(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    slots: list[int],
    ids: list[list[int]],
    *,
    is_plain: bool = True,
    without: str = "",
) -> Tensor:
    """Logits of the step of `replayed`, run eagerly.

    Args:
        is_plain: True if shrink and expand are in plain torch.
        without: name of a kernel of `project` that is not used.
    """
    running = [
        harness.start([token % 4000 for token in prompt], row, adapter=slot)
        for row, (prompt, slot) in enumerate(zip(ids, slots, strict=True))
    ]
    for sequence in running:
        harness.step(harness.chunk(sequence))
    ops = harness.model.ops
    names = "shrink_adapters", "expand_adapters", "expand_adapters_swiglu", "expand_swiglu_shrink"
    twins = {"plain", "unfused"}
    with monkeypatch.context() as patch:
        for name in ("adapted_gemv", "adapted_linear"):
            found = [each for each in ops.table._operations[name] if each.name in twins]
            patch.setitem(ops.table._operations, name, found)
        for key, rows in list(ops.table._operations.items()):
            if key.startswith("project"):  # of each weight format
                left = [each for each in rows if each.name != without]
                patch.setitem(ops.table._operations, key, left)
        for name in names if is_plain else ():
            found = [each for each in ops.table._operations[name] if each.name == "plain"]
            assert len(ops.table._operations[name]) == 2, f"{name}: Triton was dropped"
            patch.setitem(ops.table._operations, name, found)
        patch.setattr(ops, "_choices", {})
        eager = harness.logits(*[harness.chunk(sequence) for sequence in running])
    for sequence in running:
        harness.finish(sequence)
    return eager


def test_a_loaded_adapter_needs_no_capture(served: Harness, places: list[Path]) -> None:
    ids = prompts(1, seed=3)
    first, base = replayed(served, [1], ids), replayed(served, [-1], ids)
    served.runner.load_adapter(SLOTS, str(places[2]))
    assert relative(replayed(served, [SLOTS], ids), first) < 1e-2
    served.runner.load_adapter(SLOTS, "")
    assert relative(replayed(served, [SLOTS], ids), base) < 5e-2


@pytest.mark.parametrize("length", [64, 700])
def test_a_prompt_with_an_adapter_runs_in_a_graph(served: Harness, length: int) -> None:
    ids = [token * 7 % 4000 for token in range(length)]
    graphs = served.runner.computer.graphs[1]
    sequence = served.start(ids, adapter=4)
    chunk = served.chunk(sequence)
    eager = served.logits(chunk)[-1:]
    served.launch(chunk).result()
    assert graphs.logits is not None
    assert relative(graphs.logits[:1], eager) < 5e-2
    served.finish(sequence)


# Random codes have a mean of zero with zero points alone. Otherwise, all logits come from the mean.
FORMATS = {
    "FP8": fp8_checkpoints.FP8_BLOCK,
    "W4A16": packed_checkpoints.compressed(128, symmetric=False),
}
# FP8 kernels for several tokens round activations to e4m3, which has 3 bits of mantissa. A value
# near the middle of two codes takes either if an earlier sum is rounded otherwise. In plain torch
# on a CPU, the logits of eight rows of this model differ by 0.057 to 0.067 if only the changes of
# adapters are rounded otherwise, and by 0.090 to 0.102 from those whose activations are not
# quantized. So two independent roundings differ by up to 0.102 * sqrt(2) = 0.144. Without quantized
# activations, the first difference is 0.011. An adapter changes the logits by 0.49 and more.
LIMITS = {"FP8": 0.2, "W4A16": 0.1}
QUANTIZES = "fp8_skinny_w8a8"  # kernel of `project`


def of_each_row(actual: Tensor, expected: Tensor) -> list[float]:
    """Relative L2 of each row."""
    pairs = zip(actual.split(1), expected.split(1), strict=True)
    return [round(relative(*pair), 4) for pair in pairs]


def small(**changes: object) -> dict[str, object]:
    """Options of an engine with few graphs and little memory."""
    return options(
        load_format="dummy", kv_cache_bytes=256 << 20, max_num_sequences=8, max_batched_tokens=512,
        max_model_len=512,
    ) | changes  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_adapters_change_quantized_layers(
    name: str, places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token and of eight, and a prompt. The control is the base model."""
    limit = LIMITS[name]
    config = json.loads((places[0] / "config.json").read_text())
    config["quantization_config"] = FORMATS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = small(adapters=tuple(places[1:5]), max_adapters=4)
    with closing(Harness(tmp_path, **chosen)) as harness:
        layers = [each for each in harness.model.layers.modules() if isinstance(each, Linear)]
        kinds = {type(layer.method).__name__ for layer in layers}
        assert kinds == {"Fp8Linear" if name == "FP8" else "PackedLinear"}
        for slots in ([2], [0, 1, 2, 3, -1, 0, 3, 2]):
            ids = prompts(len(slots))
            found = replayed(harness, slots, ids)
            apart = of_each_row(found, reference(harness, monkeypatch, slots, ids))
            print(f"\n{name}, slots {slots}: {apart} from the reference")
            assert max(apart) < (limit if len(slots) > 1 else 0.1), f"slots {slots}: {apart}"
            if name == "FP8":
                both = [
                    reference(
                        harness, monkeypatch, slots, ids, is_plain=is_plain, without=QUANTIZES
                    )
                    for is_plain in (False, True)
                ]
                apart = of_each_row(*both)
                assert max(apart) < 5e-2, f"slots {slots} without quantized activations: {apart}"
            changes = of_each_row(found, replayed(harness, [-1] * len(slots), ids))
            for slot, change in zip(slots, changes, strict=True):
                assert change > 0.3 if slot >= 0 else change < limit, f"slots {slots}: {changes}"
        sequence = harness.start(list(range(1, 200)), adapter=1)
        chunk = harness.chunk(sequence)
        eager = harness.logits(chunk)[-1:]
        harness.launch(chunk).result()
        captured = harness.runner.computer.graphs[1].logits
        assert captured is not None
        (apart,) = of_each_row(captured[:1], eager)
        assert apart < limit
    torch.cuda.empty_cache()


LENGTH = 40  # tokens of an answer
CLOSE = 0.5  # standard deviations of a row of logits
DRAFT_SLOTS = [0, 1, 2, 3, -1, 2, 0, 3]


class Drafting:
    """Greedy requests with adapters.

    Attributes:
        harness: the runner.
        messages: the requests.
        captured, eager: numbers of steps with drafts that graphs ran, and that none ran.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness, self.captured, self.eager = harness, 0, 0
        self.messages: list[AddSequence] = []
        for number, slot in enumerate(DRAFT_SLOTS):
            ids = np.random.default_rng(number).integers(1, 400, 125).astype(np.int32)
            self.messages.append(
                AddSequence(
                    number, ids.tobytes(), b"", 0, [], SamplingParams(max_tokens=LENGTH),
                    adapter=slot, cache_salt=b"%d" % slot,
                )
            )  # fmt: skip

    def run(
        self, sources: DraftSources | None = None, predictions: list[list[int]] | None = None
    ) -> tuple[list[list[int]], Engine]:
        """Returns the answers of all requests, and the engine.

        Args:
            sources: sources of drafts. None if there are no drafts.
            predictions: the clients' prediction of each answer. None if there are none.
        """
        drafts = 0 if sources is None else 4
        runner, answers = self.harness.runner, [list[int]() for _ in self.messages]
        engine = Engine(runner, overlap=False, max_drafts=drafts, step_cost=Untimed())
        if sources is not None:
            engine.speculation.sources = sources
        stage = runner.computer.stage

        def counted(step: ComputeStep) -> StepInputs:
            inputs = stage(step)
            if step.has_drafts:
                self.captured += inputs.graphs is not None
                self.eager += inputs.graphs is None
            return inputs

        with mock.patch.object(runner.computer, "stage", counted):
            for number, message in enumerate(self.messages):
                predicted = [] if predictions is None else predictions[number]
                prediction = np.array(predicted, np.int32).tobytes()
                engine.add(structs.replace(message, prediction=prediction))
            while engine.has_work:
                done = engine.step()
                for event in done.events if done else []:
                    answers[event.sequence_id] += event.token_ids
        return answers, engine

    def worst_gaps(self, answers: list[list[int]], slots: list[int]) -> list[float]:
        """The most by which a token's logit is below the largest, in standard deviations, for each
        request, if it had the adapter of a slot.
        """
        gaps: list[float] = []
        for message, answer, slot in zip(self.messages, answers, slots, strict=True):
            prompt = np.frombuffer(message.prompt_token_ids, np.int32).tolist()
            sequence = self.harness.start(prompt + answer, adapter=slot)
            logits = self.harness.prompt_logits(sequence).float()[len(prompt) - 1 : -1]
            chosen = logits[range(len(answer)), answer]
            gaps.append(float(((logits.amax(1) - chosen) / logits.std(1)).max()))
        return gaps


def test_answers_with_drafts_are_those_of_the_adapters(places: list[Path]) -> None:
    # A step has at most as many samples as the runner has rows, and each draft is a sample.
    chosen = small(adapters=tuple(places[1:5]), max_adapters=4, max_drafts=4, max_num_sequences=32)
    with closing(Harness(places[0], **chosen)) as harness:
        drafting = Drafting(harness)
        expected, _ = drafting.run()
        assert max(drafting.worst_gaps(expected, DRAFT_SLOTS)) < CLOSE
        known = KnownSources(lambda m, i: from_answer(m, expected[m.sequence_id], i), 0.8)
        # The lookup copies from a prediction, because a random model's answer repeats nothing but
        # by chance. The prediction is the answer with a wrong token in its middle, which is
        # rejected. Four drafts a step are at most five tokens, so 40 tokens take eight steps, all
        # of which have drafts but those right behind the wrong token. On a CPU, 12 have.
        wrong = [[*a[:20], (a[20] + 1) % 4000, *a[21:]] for a in expected]
        for sources in (known, Lookups()):
            drafting.captured = drafting.eager = 0
            found, engine = drafting.run(sources, wrong if sources is not known else None)
            drafts = engine.stats().drafts
            assert drafts is not None
            print(
                f"\n{type(sources).__name__}: accepted {drafts.num_accepted} of"
                f" {drafts.num_drafts}, {drafting.captured} steps in graphs"
            )
            assert max(drafting.worst_gaps(found, DRAFT_SLOTS)) < CLOSE
            assert drafts.num_accepted > 50
            if harness.runner.info.on_gpu:
                assert drafting.captured > 5 and not drafting.eager
        others = [-1 if slot >= 0 else 0 for slot in DRAFT_SLOTS]
        assert np.mean(drafting.worst_gaps(expected, others)) > 2 * CLOSE  # control
    torch.cuda.empty_cache()
