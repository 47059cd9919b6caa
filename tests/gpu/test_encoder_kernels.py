"""Each fused operation of the vision tower against its plain twin; tolerance as in `twins`."""

import pytest
import torch

from tests.gpu.twins import CUDA, TOLERANCE, error, random

pytest.importorskip("triton")
from kernels.attention.segments import BatchSegments, StaticSegments
from kernels.device import DeviceFacts
from kernels.tower import plain
from services.common.families.qwen3_vl import DeepStackTower
from services.common.nn.dispatch import UnknownOverride
from services.encoder.operations.ops import Ops
from services.encoder.operations.table import TowerFacts, resolve
from tests.tower import cpu_ops

pytestmark = pytest.mark.gpu

TWO_B = DeepStackTower(24, 1024, 4096, 16, 3, 16, 2, 2, 2048, 2304, (5, 11, 17))
HEADS = 16


def ops_for(head_dim: int, dtype: torch.dtype = torch.bfloat16, **kernels: str) -> Ops:
    facts = TowerFacts(DeviceFacts.of(CUDA), dtype, HEADS, head_dim)
    return Ops(resolve(facts, kernels))


@pytest.fixture(scope="module")
def fused() -> Ops:
    return ops_for(64)


# 4,608: the norm of the 8B's DeepStack mergers.
@pytest.mark.parametrize("width", [1024, 1152, 4096, 4608])
@pytest.mark.parametrize("rows", [4, 4096, 20000])
def test_add_layer_norm(fused: Ops, rows: int, width: int) -> None:
    x, residual = random(rows, width), random(rows, width) * 9
    weight, bias, kept = random(width), random(width), residual.clone()
    expected = plain.add_layer_norm(x, residual, weight, bias, 1e-6)
    found = fused.add_layer_norm(x.clone(), residual, weight, bias, 1e-6)
    assert error(found[0], expected[0]) <= TOLERANCE
    assert torch.equal(found[1], expected[1])  # one addition, one rounding
    assert torch.equal(residual, kept)
    assert torch.equal(fused.layer_norm(found[1], weight, bias, 1e-6), found[0])


@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (16, 72), (16, 80)])
@pytest.mark.parametrize("rows", [4, 4096, 20000])
def test_rotary(fused: Ops, rows: int, heads: int, dim: int) -> None:
    qkv, angles = random(rows, 3, heads, dim), torch.rand(rows, dim // 2, device=CUDA) * 6.28
    cos, sin, value = angles.cos(), angles.sin(), qkv[:, 2].clone()
    expected = plain.rotary(qkv[:, :2], cos, sin)
    assert error(fused.rotary(qkv[:, :2], cos, sin), expected) <= TOLERANCE
    assert torch.equal(qkv[:, 2], value)


@pytest.mark.parametrize("name", ["hopper", "torch_varlen"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [63, 64, 65, 127, 128, 129], [4096], [1000, 4, 2304, 640], [16] * 40],
    ids=["one", "edges", "large", "mixed", "many"],
)
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 72, 80])
def test_attention_agrees_with_its_twin(
    dim: int, lengths: list[int], overflow: bool, dtype: torch.dtype, name: str
) -> None:
    """Eager, and in a graph that was captured for more rows."""
    try:
        attend = ops_for(dim, dtype, ragged_attention=name).ragged_attention
    except UnknownOverride as why:
        pytest.skip(str(why))
    count = sum(lengths)
    # As the fused projection leaves them: strided rows, heads side by side.
    query, key, value = random(count, 3, HEADS, dim).to(dtype).unbind(1)
    if overflow:  # row sums relative to the first tile's row max overflow, see `softmax`
        key[::7] *= 60
    segments = BatchSegments(lengths, CUDA)
    expected = plain.ragged_attention(query.float(), key.float(), value.float(), segments)
    found = attend(query, key, value, segments)
    assert found.is_contiguous() and error(found, expected) <= TOLERANCE
    static = StaticSegments(count + 300, 64, CUDA)
    static.set([count + 300])
    inputs = [
        torch.full((count + 300, HEADS, dim), torch.nan, dtype=dtype, device=CUDA) for _ in range(3)
    ]
    attend(*inputs, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*inputs, static)
    for rows, given in zip(inputs, (query, key, value), strict=True):
        rows[:count] = given
    for _ in range(2):
        static.set(lengths)
        graph.replay()
        assert error(out[:count], expected) <= TOLERANCE
        if name == "hopper":  # the same blocks of queries in the same order
            assert torch.equal(out[:count], found)


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("lengths", [[300, 200], [64, 1000], [1, 1, 1], [1000, 1100]])
def test_a_segment_that_is_not_finite_changes_no_other(lengths: list[int], dim: int) -> None:
    count = sum(lengths)
    qkv = random(count, 3, HEADS, dim)
    attend, segments = ops_for(dim).ragged_attention, BatchSegments(lengths, CUDA)
    first = slice(lengths[0])
    expected = attend(*qkv.unbind(1), segments)[first].clone()
    qkv[lengths[0] :] = torch.nan
    assert torch.equal(attend(*qkv.unbind(1), segments)[first], expected)


def test_a_heads_tail_holds_nothing_of_the_next_head() -> None:
    """A TMA tile of a head of 72 has 8 columns of its neighbour."""
    lengths, dim = [500, 77], 72
    query, key, value = random(sum(lengths), 3, HEADS, dim).unbind(1)
    attend, segments = ops_for(dim).ragged_attention, BatchSegments(lengths, CUDA)
    expected = attend(query, key, value, segments)[:, ::2].clone()
    for x in (query, key, value):
        x[:, 1::2] *= 1e4
    assert torch.equal(attend(query, key, value, segments)[:, ::2], expected)


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 4096), (1152, 4304)])
@pytest.mark.parametrize("rows", [4, 4096])
def test_linear_gelu_is_the_tanh_form(fused: Ops, rows: int, hidden: int, inner: int) -> None:
    """Nearer to the truth than the twin, which rounds once more, and than the exact form."""
    x, weight, bias = random(rows, hidden), random(inner, hidden) * 0.05, random(inner)
    gemm = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    truth = torch.nn.functional.gelu(gemm, approximate="tanh")
    other = torch.nn.functional.gelu(gemm)
    found = fused.linear_gelu(x, weight, bias)
    assert error(found, truth) <= min(
        TOLERANCE, 1.05 * error(plain.linear_gelu(x, weight, bias), truth)
    )
    small = (gemm < -2) & (gemm > -4)  # where the two forms differ most, relatively
    assert error(found[small], truth[small]) < 0.5 * error(other[small], truth[small])


@pytest.mark.parametrize(("hidden", "out"), [(1024, 3072), (1152, 3456), (4608, 4096)])
@pytest.mark.parametrize("rows", [4, 1000, 4096])
def test_linear_agrees_with_its_twin(fused: Ops, rows: int, hidden: int, out: int) -> None:
    x, weight, bias = random(rows, hidden), random(out, hidden) / 32, random(out)
    expected = plain.linear(x, weight, bias)
    with fused.table.for_graph():
        found = fused.linear(x, weight, bias)
    assert error(found, expected) <= TOLERANCE


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 4096), (1152, 4304)])
@pytest.mark.parametrize("rows", [4, 4096])
def test_linear_add_and_its_twin_have_one_sum(
    fused: Ops, rows: int, hidden: int, inner: int
) -> None:
    x, weight, bias = random(rows, inner), random(hidden, inner) / 64, random(hidden)
    residual = random(rows, hidden)
    truth = torch.nn.functional.linear(x.float(), weight.float(), bias.float()) + residual.float()
    total = residual.clone()
    rest = fused.linear_add(x, weight, bias, total)
    assert error(total if rest is None else total + rest, truth) <= TOLERANCE
    if rest is not None:
        assert torch.equal(total, residual)


def test_patches_are_the_hosts(fused: Ops) -> None:
    grids = [(1, 4, 6), (1, 4, 6), (1, 8, 2)]
    size = sum(h * w for _, h, w in grids) * 768
    pixels = torch.arange(size).remainder(251).add(torch.arange(size) // 768 % 5).to(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = cpu_ops(TWO_B).pack_patches(pixels, grids, 16, 2, dtype)
        assert torch.equal(fused.pack_patches(pixels.to(CUDA), grids, 16, 2, dtype).cpu(), expected)
