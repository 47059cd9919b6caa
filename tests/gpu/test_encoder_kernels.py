"""Each fused operation of the vision tower against its plain twin; tolerance as in `twins`."""

import pytest
import torch

from tests.gpu.twins import CUDA, TOLERANCE, error, random

pytest.importorskip("triton")
from services.encoder.attention.hopper import HopperAttention
from services.encoder.attention.sdpa import SdpaAttention
from services.encoder.engine.patches import pack_patches
from services.encoder.kernels.ops import PlainOps, create_ops

pytestmark = pytest.mark.gpu
FUSED, PLAIN = create_ops(CUDA), PlainOps()


@pytest.mark.parametrize("width", [1024, 1152])
@pytest.mark.parametrize("rows", [4, 4096, 20000])
def test_add_layer_norm(rows: int, width: int) -> None:
    x, residual = random(rows, width), random(rows, width) * 9
    weight, bias, kept = random(width), random(width), residual.clone()
    expected = PLAIN.add_layer_norm(x, residual, weight, bias, 1e-6)
    found = FUSED.add_layer_norm(x.clone(), residual, weight, bias, 1e-6)
    assert error(found[0], expected[0]) <= TOLERANCE
    assert torch.equal(found[1], expected[1])  # one addition, one rounding
    assert torch.equal(residual, kept)
    assert torch.equal(FUSED.layer_norm(found[1], weight, bias, 1e-6), found[0])


@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (16, 72)])
@pytest.mark.parametrize("rows", [4, 4096, 20000])
def test_rotate(rows: int, heads: int, dim: int) -> None:
    qkv, angles = random(rows, 3, heads, dim), torch.rand(rows, dim // 2, device=CUDA) * 6.28
    cos, sin, value = angles.cos(), angles.sin(), qkv[:, 2].clone()
    expected = PLAIN.rotate(qkv[:, :2], cos, sin)
    assert error(FUSED.rotate(qkv[:, :2], cos, sin), expected) <= TOLERANCE
    assert torch.equal(qkv[:, 2], value)


@pytest.mark.parametrize(
    "lengths",
    [[1], [63, 64, 65, 127, 128, 129], [4096], [1000, 4, 2304, 640], [16] * 40],
    ids=["one", "edges", "large", "mixed", "many"],
)
@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_agrees_with_its_twin(
    lengths: list[int], rising: bool, dtype: torch.dtype
) -> None:
    """Eager, and in a graph that was captured for more."""
    count, heads, dim = sum(lengths), 16, 64
    query, key = random(count, 2, heads, dim).to(dtype).unbind(1)
    value = random(count, 3, heads, dim).to(dtype)[:, 2]
    if rising:  # scores that a float's exponent would not have room for, see `softmax`
        key[::7] *= 60
    exact, fast = SdpaAttention(heads, dim, torch.float32), HopperAttention(heads, dim, dtype)
    plan = exact.plan(lengths, CUDA)
    expected = exact.forward(query.float(), key.float(), value.float(), plan)
    found = fast.forward(query, key, value, fast.plan(lengths, CUDA))
    assert error(found, expected) <= TOLERANCE
    lasting = fast.lasting_plan(count + 300, 64, CUDA)
    lasting.set([count + 300])
    wide = [torch.full((count + 300, heads, dim), torch.nan, dtype=dtype, device=CUDA)] * 3
    inputs = [rows.clone() for rows in wide]
    fast.forward(*inputs, lasting)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(*inputs, lasting)
    for rows, given in zip(inputs, (query, key, value), strict=True):
        rows[:count] = given
    for _ in range(2):
        lasting.set(lengths)
        graph.replay()
        assert torch.equal(out[:count], found)


@pytest.mark.parametrize("lengths", [[300, 200], [64, 1000], [1, 1, 1]])
def test_a_neighbour_that_is_not_finite_changes_nothing(lengths: list[int]) -> None:
    count = sum(lengths)
    rows = [random(count, 16, 64) for _ in range(3)]
    attend = HopperAttention(16, 64, torch.bfloat16)
    first = slice(lengths[0])
    expected = attend.forward(*rows, attend.plan(lengths, CUDA))[first].clone()
    for given in rows:
        given[lengths[0] :] = torch.nan
    assert torch.equal(attend.forward(*rows, attend.plan(lengths, CUDA))[first], expected)


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 4096), (1152, 4304)])
@pytest.mark.parametrize("rows", [4, 4096])
def test_linear_gelu_is_the_tanh_form(rows: int, hidden: int, inner: int) -> None:
    """Nearer to the truth than the twin, which rounds once more, and than the exact form."""
    x, weight, bias = random(rows, hidden), random(inner, hidden) * 0.05, random(inner)
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    truth = torch.nn.functional.gelu(product, approximate="tanh")
    other = torch.nn.functional.gelu(product)
    found = FUSED.linear_gelu(x, weight, bias)
    assert error(found, truth) <= min(
        TOLERANCE, 1.05 * error(PLAIN.linear_gelu(x, weight, bias), truth)
    )
    small = (product < -2) & (product > -4)  # where the two forms differ most, relatively
    assert error(found[small], truth[small]) < 0.5 * error(other[small], truth[small])


def test_patches_are_the_hosts() -> None:
    grids = [(1, 4, 6), (1, 4, 6), (1, 8, 2)]
    size = sum(h * w for _, h, w in grids) * 768
    pixels = torch.arange(size).remainder(251).add(torch.arange(size) // 768 % 5).to(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = pack_patches(pixels, grids, 16, 2, dtype)
        assert torch.equal(pack_patches(pixels.to(CUDA), grids, 16, 2, dtype).cpu(), expected)
