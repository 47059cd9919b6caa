"""Each fused kernel against its plain twin, on fresh random inputs.

Tolerance: ‖out - twin‖ / ‖twin‖ <= 4e-3 in bf16: half a unit in the last place of each value on
average is 2^-9 = 2e-3, and a sum taken in another order may move each value's rounding by one.
"""

import pytest
import torch

pytest.importorskip("triton")
from services.decoder.attention.base import kv_rows
from services.decoder.kernels.ops import PlainOps
from services.decoder.kernels.triton_ops import TritonOps

pytestmark = pytest.mark.gpu
TOLERANCE = 4e-3
EPS = 1e-6
FUSED, PLAIN = TritonOps(max_few_tokens=2), PlainOps()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.float() - twin.float()).norm() / twin.float().norm()).item()


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("width", [256, 2048, 2560, 5120])
def test_norms_agree_with_their_twins(num_tokens: int, width: int) -> None:
    x, residual, weight = random(num_tokens, width), random(num_tokens, width), random(width)
    expected, expected_residual = PLAIN.add_rms_norm(x, residual.clone(), weight, EPS)
    out, new_residual = FUSED.add_rms_norm(x, residual.clone(), weight, EPS)
    assert error(out, expected) <= TOLERANCE
    assert torch.equal(new_residual, expected_residual)  # one addition, one rounding
    assert error(FUSED.rms_norm(x, weight, EPS), PLAIN.rms_norm(x, weight, EPS)) <= TOLERANCE


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 768), (300, 6144), (7, 9728)])
def test_silu_and_mul_agrees_with_its_twin(num_tokens: int, width: int) -> None:
    gate_up = random(num_tokens, 2 * width)
    assert error(FUSED.silu_and_mul(gate_up), PLAIN.silu_and_mul(gate_up)) <= TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 127, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (4, 2, 64), (5, 5, 32), (3, 1, 16)]
)
def test_qk_rope_cache_agrees_with_its_twin(
    num_tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = random(num_tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(num_tokens, dim // 2, device="cuda") * 6.28
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    slots = torch.randperm(39 * 16, device="cuda")[:num_tokens]
    slots[-1] = -1  # a padding token
    rows = kv_rows(slots, 16)
    cache = torch.full((40, 2, 16, kv_heads, dim), torch.nan, device="cuda").bfloat16()
    twin = cache.clone()
    weights = (random(dim), random(dim))
    expected = PLAIN.qk_rope_cache(qkv, weights, EPS, rope, twin, rows)
    query = FUSED.qk_rope_cache(qkv, weights, EPS, rope, cache, rows)
    assert error(query, expected) <= TOLERANCE
    cache, twin = cache[:39], twin[:39]  # the last block is scratch
    assert torch.equal(cache.isnan(), twin.isnan())  # the same slots, and no other
    assert error(cache.nan_to_num(), twin.nan_to_num()) <= TOLERANCE or num_tokens == 1


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(
    ("width", "rows"), [(2048, 4096), (6144, 2048), (2560, 9728), (12288, 4096), (256, 100)]
)
def test_products_of_few_tokens_agree_with_their_twins(
    num_tokens: int, width: int, rows: int
) -> None:
    x, norm, residual = random(num_tokens, width), random(width), random(num_tokens, rows)
    weight = (torch.randn(2 * rows, width, device="cuda") * 0.02).bfloat16()
    half = weight[:rows]
    assert error(FUSED.linear(x, half), PLAIN.linear(x, half)) <= TOLERANCE
    expected = PLAIN.norm_linear(x, norm, EPS, half)
    assert error(FUSED.norm_linear(x, norm, EPS, half), expected) <= TOLERANCE
    # Two products are rounded, then their product is.
    expected = PLAIN.norm_swiglu(x, norm, EPS, weight)
    assert error(FUSED.norm_swiglu(x, norm, EPS, weight), expected) <= 2 * TOLERANCE
    twin = residual.clone()
    FUSED.linear_add(x, half, residual)
    PLAIN.linear_add(x, half, twin)
    assert error(residual, twin) <= TOLERANCE


@pytest.mark.parametrize("vocab_size", [100, 1024, 151936])
def test_greedy_agrees_with_its_twin(vocab_size: int) -> None:
    logits = random(9, vocab_size)
    logits[3, 7], logits[4, 11], logits[5, -1] = torch.nan, torch.inf, -torch.inf
    logits[6] = 0.5  # all equal: the first wins
    logits[7, -1] = 100.0
    found = FUSED.greedy(logits).tolist()
    assert found[3:8] == [-1, -1, -1, 0, vocab_size - 1]
    values = logits.gather(1, torch.tensor(found, device="cuda").clamp(min=0)[:, None].long())
    for row in (0, 1, 2, 6, 7, 8):
        assert values[row] == logits[row].max()
