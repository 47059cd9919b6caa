"""Each fused operation of the vision tower against its plain twin, on fresh random inputs.

Tolerance as in test_kernels.py: ‖out - twin‖ / ‖twin‖ <= 4e-3 in bf16.
"""

import pytest
import torch

pytest.importorskip("triton")
from services.encoder.engine.patches import pack_patches
from services.encoder.kernels.ops import PlainOps, create_ops

pytestmark = pytest.mark.gpu
TOLERANCE = 4e-3
CUDA = torch.device("cuda")
FUSED, PLAIN = create_ops(CUDA), PlainOps()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.float() - twin.float()).norm() / twin.float().norm()).item()


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


@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (16, 72)])
@pytest.mark.parametrize("rows", [4, 4096, 20000])
def test_rotate(rows: int, heads: int, dim: int) -> None:
    qkv, angles = random(rows, 3, heads, dim), torch.rand(rows, dim // 2, device=CUDA) * 6.28
    cos, sin, value = angles.cos(), angles.sin(), qkv[:, 2].clone()
    expected = PLAIN.rotate(qkv[:, :2], cos, sin)
    assert error(FUSED.rotate(qkv[:, :2], cos, sin), expected) <= TOLERANCE
    assert torch.equal(qkv[:, 2], value)


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
    pixels = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = pack_patches(pixels, grids, 16, 2, torch.float32)
    found = pack_patches(pixels.to(CUDA), grids, 16, 2, torch.float32).cpu()
    # A device may divide by multiplying with the reciprocal: one unit in the last place of 1.
    assert (found - expected).abs().max() <= 2**-23
    halves = pack_patches(pixels.to(CUDA), grids, 16, 2, torch.bfloat16).cpu()
    assert torch.equal(halves, found.bfloat16())
