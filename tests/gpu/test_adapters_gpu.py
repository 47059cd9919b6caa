"""Adapters on a GPU: shrink and expand against float64, and engines in CUDA graphs.

Tolerances. The products of shrink are rounded to bf16 once, as is the output: the change of a layer
differs from float64 by at most 2^-8 = 4e-3 of its norm for each rounding. Answers of engines are
compared by logits, as in `test_decoder_graphs`: GEMMs of another size differ by up to 5e-2.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.adapters import write_adapter, write_model
from kernels.adapters import plain
from kernels.adapters.factors import AdapterRows, Norm, SlotFactors
from services.common.model_spec import RopeSpec, TextSpec
from services.common.nn.layers import RMSNorm
from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import options, prompts, relative
from tests.gpu.twins import CUDA, error, random

pytest.importorskip("triton")
from kernels.adapters import shrink_expand

pytestmark = pytest.mark.gpu
SLOTS = 8
CHANGE = 8e-3  # of the norm of a change, see above
QKV, GATE_UP, DOWN = (4096, 1024, 1024), (12288, 12288), (4096,)
CASES = [
    (QKV, 8, 1), (QKV, 8, 64), (QKV, 8, 3000), (GATE_UP, 8, 1), (GATE_UP, 8, 64),
    (GATE_UP, 8, 3000), (DOWN, 32, 65), (QKV, 64, 64), (QKV, 256, 5), (GATE_UP, 256, 64),
    (QKV, 256, 3000),
]  # fmt: skip


def factors_of(sizes: tuple[int, ...], columns: int, rank: int, slots: int = SLOTS) -> SlotFactors:
    """Random factors, whose changes are as large as outputs."""
    made = SlotFactors.zeros(sizes, columns, slots, rank, random(0))
    made.a[:, :, :rank].copy_(random(slots, len(sizes), rank, columns) * columns**-0.5)
    made.b[..., :rank].copy_(random(sum(sizes), slots, rank) * rank**-0.5)
    return made


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


def slots_of(count: int, kind: str) -> Tensor:
    """Slots of tokens: `none`, `one`, `eight` in turn, or `some`, of which a third has none."""
    turn = torch.arange(count, device=CUDA)
    return {
        "none": torch.full_like(turn, -1),
        "one": torch.full_like(turn, 5),
        "eight": turn % SLOTS,
        "some": torch.where(turn % 3 == 0, -1, turn // 100 % SLOTS),
    }[kind]


@pytest.mark.parametrize(("sizes", "rank", "count"), CASES)
def test_shrink_and_expand_agree_with_float64(
    sizes: tuple[int, ...], rank: int, count: int
) -> None:
    torch.manual_seed(0)
    columns = 12288 if sizes == DOWN else 4096
    factors, x = factors_of(sizes, columns, rank), random(count, columns)
    for kind in ("none", "one", "eight", "some"):
        slots = slots_of(count, kind)
        rows, without = AdapterRows(slots, SLOTS, 0, SLOTS), slots < 0
        out = random(count, sum(sizes))
        if count <= 64:  # partials
            out = torch.randn(2, count, sum(sizes), device=CUDA)
        before = out.double().view(-1, count, sum(sizes)).sum(0)
        wanted = exact(before, x, factors, slots)
        products = shrink_expand.shrink_adapters(x, None, factors, rows, pdl=2)
        if sizes == GATE_UP:
            found = shrink_expand.expand_adapters_swiglu(out, products, factors, rows, pdl=2)
            gate, up = wanted.chunk(2, 1)
            assert error(found, torch.nn.functional.silu(gate) * up) < 2 * CHANGE, kind
            continue
        found = shrink_expand.expand_adapters(out.clone(), products, factors, rows, pdl=2)
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
    given: Norm = norm
    found = shrink_expand.shrink_adapters(x, given, factors, rows, pdl=2).sum(0)
    assert error(found, plain.shrink_adapters(x, given, factors, rows).sum(0)) < CHANGE


@pytest.mark.parametrize("count", [1, 33, 1000])
def test_dora_scales_the_output_of_its_slots(count: int) -> None:
    made = factors_of(QKV, 4096, 16)
    bias = random(sum(QKV))
    factors = SlotFactors(made.a, made.b, made.sizes, bias).with_factor()
    assert factors.factor is not None
    factors.factor[5].uniform_(0.5, 2)
    rows = AdapterRows(slots_of(count, "some"), SLOTS, 0, SLOTS)
    x, out = random(count, 4096), random(2, count, sum(QKV)).float()
    products = shrink_expand.shrink_adapters(x, None, factors, rows)
    found = shrink_expand.expand_adapters(out.clone(), products, factors, rows).sum(0)
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
        max_batched_tokens=2048,
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
    """The same step runs eagerly, with shrink and expand in plain torch."""
    slots = [row % SLOTS if row % 5 else -1 for row in range(count)] if count > 1 else [2]
    ids = prompts(count)
    captured = replayed(served, slots, ids)
    running = [
        served.start([token % 4000 for token in prompt], row, adapter=slot)
        for row, (prompt, slot) in enumerate(zip(ids, slots, strict=True))
    ]
    for sequence in running:
        served.step(served.chunk(sequence))
    ops = served.model.ops
    names = "shrink_adapters", "expand_adapters", "expand_adapters_swiglu"
    for name in names:
        found = [each for each in ops.table._operations[name] if each.name == "plain"]
        assert len(ops.table._operations[name]) == 2, f"{name}: Triton was dropped"
        monkeypatch.setitem(ops.table._operations, name, found)
    monkeypatch.setattr(ops, "_choices", {})
    eager = served.logits(*[served.chunk(sequence) for sequence in running])
    assert relative(captured, eager) < 5e-2
    for sequence in running:
        served.finish(sequence)


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
