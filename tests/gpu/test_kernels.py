"""Each fused kernel but those of attention against its plain twin; tolerance as in `twins`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests import sampling_twins
from tests.gpu.twins import CUDA, TOLERANCE, error, fused, random
from tests.step_entries import check_step_entry

pytest.importorskip("triton")
from kernels import launches, plain, tuning
from kernels.attention import qk_rope_cache
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.device import DeviceFacts
from kernels.gemm import add_norm, cublaslt, gemv, silu_mul, skinny_gemm, swiglu_gemm
from kernels.tuning import SwigluGemmConfig
from services.common.model_spec import RopeSpec
from services.common.nn.linear import Linear
from services.decoder.models.rope import RotaryEmbedding
from services.decoder.operations import table
from services.decoder.operations.ops import PlainOps

pytestmark = pytest.mark.gpu
EPS = 1e-6
# hidden, intermediate, rows of q/k/v, columns of the output projection.
SIZES = {
    "2b": (2048, 6144, 4096, 2048), "4b": (2560, 9728, 6144, 4096), "8b": (4096, 12288, 6144, 4096),
    "32b": (5120, 25600, 10240, 8192),
}  # fmt: skip


def layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    with torch.device("meta"):
        made = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = torch.nn.Parameter(bias, requires_grad=False)
    return made


@pytest.mark.parametrize("num_tokens", [900, 1024, 1088, 1280, 2048, 3000, 8192])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (2048, 2048), (2048, 6144)])
def test_gemms_by_chosen_tiles_are_those_of_torch(num_tokens: int, rows: int, columns: int) -> None:
    x, weight, bias = random(num_tokens, columns), random(rows, columns), random(rows)
    tile = cublaslt.tile_tokens(num_tokens, rows, columns, num_sms=DeviceFacts.of(CUDA).num_sms)
    assert (tile == 0) == (columns > 2048 and num_tokens in (2048, 8192))
    found = [cublaslt.linear(x, weight), cublaslt.linear(x, weight, bias)]
    gelu = cublaslt.linear(x, weight, bias, gelu=True)
    if tile == 0:
        assert found == [None, None] and gelu is None
        return
    assert torch.equal(found[0], F.linear(x, weight))
    assert torch.equal(found[1], F.linear(x, weight, bias))
    assert torch.equal(gelu, torch._addmm_activation(bias, x, weight.t(), use_gelu=True))


def test_a_graph_of_gemms_gives_what_they_give_eagerly() -> None:
    """They share one workspace for tile counters, whatever ran before."""
    x, weights = random(3000, 2048), [random(2048, 2048) / 45 for _ in range(3)]

    def chain() -> torch.Tensor:
        found = x
        for weight in weights:
            output = cublaslt.linear(found, weight)
            assert output is not None
            found = output
        return found

    with torch.cuda.stream(torch.cuda.Stream()):
        chain()
        with launches.captured_graph(None) as graph:
            out = chain()
        for _ in range(3):
            x.copy_(random(3000, 2048))
            graph.replay()
            assert torch.equal(out, chain())


@pytest.mark.parametrize("num_tokens", [700, 900, 3000, 8192])
@pytest.mark.parametrize(("rows", "columns"), [(2048, 2048), (2048, 6144), (1024, 4096)])
@pytest.mark.parametrize("biased", [False, True])
def test_gemms_that_add_are_as_exact_as_a_gemm_and_a_sum(
    num_tokens: int, rows: int, columns: int, biased: bool
) -> None:
    """To a hundredth, for chance: the GEMM's output may be rounded before it is added, or not.
    (Without that rounding the error would be 0.73 to 0.78 of a GEMM's and a sum's here.)
    """
    x, weight = random(num_tokens, columns), random(rows, columns)
    residual, bias = random(num_tokens, rows) * 50, random(rows) if biased else None
    wide = None if bias is None else bias.double()
    truth = residual.double() + F.linear(x.double(), weight.double(), wide)
    twin, found = residual + F.linear(x, weight, bias), residual.clone()
    rest = table._gemm_residual(table.plain_facts())(x, layer(weight, bias), found)
    if rest is None:
        assert error(found, truth) <= 1.01 * error(twin, truth)
    else:  # a bias, and too few tokens for a tile of our choice
        assert biased and num_tokens == 700 and torch.equal(found, residual)
        assert torch.equal(rest, F.linear(x, weight, bias))


@pytest.mark.parametrize("num_tokens", [1000, 1024, 1408, 8058])
@pytest.mark.parametrize("rows", [6144, 9728])
def test_swiglu_of_prompts_agrees_with_its_twin(num_tokens: int, rows: int) -> None:
    x, weight = random(num_tokens, 2048), random(2 * rows, 2048) / 45
    config = SwigluGemmConfig(DeviceFacts.of(CUDA).num_sms)
    found = swiglu_gemm.linear_swiglu(x, weight, config)
    assert error(found, plain.linear_swiglu(x, weight)) <= TOLERANCE
    if rows == 6144 and config.num_sms == 132:  # the 2B's: these lengths fill the SMs
        ops = fused()
        with ops.table.for_graph():
            assert config.is_faster(num_tokens, 2 * rows)
            chosen = ops.for_tokens(num_tokens).linear_swiglu
            assert torch.equal(chosen(x, layer(weight)), found)
        assert ops.table.calls() == {("linear_swiglu", "swiglu_gemm"): 1}


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("width", [256, 2048, 2560, 5120])
def test_norms_agree_with_their_twins(num_tokens: int, width: int) -> None:
    x, residual, weight = random(num_tokens, width), random(num_tokens, width), random(width)
    expected, expected_residual = plain.add_rms_norm(x, residual.clone(), weight, EPS)
    out, new_residual = add_norm.add_rms_norm(x, residual.clone(), weight, EPS)
    assert error(out, expected) <= TOLERANCE
    assert torch.equal(new_residual, expected_residual)  # one addition, one rounding
    assert error(add_norm.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS)) <= TOLERANCE


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 768), (300, 6144), (7, 9728)])
def test_silu_and_mul_agrees_with_its_twin(num_tokens: int, width: int) -> None:
    gate_up = random(num_tokens, 2 * width)
    assert error(silu_mul.silu_and_mul(gate_up), plain.silu_and_mul(gate_up)) <= TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 127, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(16, 8, 128), (32, 8, 128), (4, 2, 64), (5, 5, 32), (16, 1, 80), (12, 4, 96), (4, 2, 256)],
)
@pytest.mark.parametrize("normed", [True, False])
def test_qk_rope_cache_agrees_with_its_twin(
    num_tokens: int, heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    qkv = random(num_tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(num_tokens, dim // 2, device="cuda") * 6.28
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    slots = torch.randperm(39 * 16, device="cuda")[:num_tokens]
    slots[-1] = -1  # a padding token
    rows = kv_rows(slots, 16)
    cache = torch.full((40, 2, 16, kv_heads, dim), torch.nan, device="cuda").bfloat16()
    twin = cache.clone()
    weights = (random(dim), random(dim)) if normed else None
    expected = plain.qk_rope_cache(ProjectedHeads(qkv, weights, EPS, rope, twin, rows))
    query = qk_rope_cache.qk_rope_cache(ProjectedHeads(qkv, weights, EPS, rope, cache, rows))
    assert error(query, expected) <= TOLERANCE
    cache, twin = cache[:39], twin[:39]  # the last block is scratch
    assert torch.equal(cache.isnan(), twin.isnan())  # the same slots, and no other
    assert error(cache.nan_to_num(), twin.nan_to_num()) <= TOLERANCE or num_tokens == 1


def test_rotation_rounds_each_product_as_torch_does() -> None:
    """All but where the sum of squares in another order moves a rounding: 3 in a million here. A
    fifth differed while products and sums became one operation.
    """
    qkv, rows = random(1000, 32 * 128), kv_rows(torch.arange(1000, device="cuda"), 16)
    angles = torch.rand(1000, 64, device="cuda") * 6.28
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    heads = ProjectedHeads(
        qkv, (random(128), random(128)), EPS, rope, random(64, 2, 16, 8, 128), rows
    )
    twin = replace(heads, kv_cache=heads.kv_cache.clone())
    few = qk_rope_cache.qk_rope_cache(heads) != plain.qk_rope_cache(twin)
    assert few.float().mean() <= 1e-4
    assert (heads.kv_cache != twin.kv_cache).float().mean() <= 1e-4


@pytest.mark.parametrize("count", [1, 64, 3000])
def test_what_comes_before_the_layers_agrees_with_its_twins(count: int) -> None:
    ops, twins = fused(), PlainOps()
    check_step_entry(ops.enter_step, count, "cuda")
    mrope = RotaryEmbedding(
        RopeSpec(theta=5e6, rotary_dim=128, mrope_section=(24, 20, 20), attention_factor=1.3)
    )
    mrope.reset_buffers(CUDA)
    positions = torch.randint(0, 262_144, (3, count), dtype=torch.int32, device="cuda")
    slots = torch.randint(-1, 1_000_000, (count,), device="cuda")
    arguments = (positions, slots, mrope, torch.bfloat16, 16)
    (cos, sin), found = ops.rope_and_rows(*arguments)
    (twin_cos, twin_sin), expected = twins.rope_and_rows(*arguments)
    assert torch.equal(found, expected)
    assert error(cos, twin_cos) <= TOLERANCE and error(sin, twin_sin) <= TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_skinny_gemms_agree_with_their_twins(num_tokens: int, size: str, biased: bool) -> None:
    """With the table's configurations, and the kernels that reduce their partials."""
    facts, (hidden, intermediate, qkv_rows, query) = DeviceFacts.of(CUDA), SIZES[size]
    shared = {"shared_memory_bytes": facts.shared_memory_bytes, "pdl": facts.supports_pdl}
    for rows, columns in ((qkv_rows, hidden), (hidden, query), (hidden, intermediate)):
        x, weight = random(num_tokens, columns), random(rows, columns) * columns**-0.5
        bias = random(rows) if biased else None
        config = tuning.split_k_config(facts, rows, columns)
        assert config is not None
        partials = skinny_gemm.split_k_partials(x, weight, bias, config, **shared)
        whole = F.linear(x, weight, bias)
        assert error(plain.reduce_split_k(partials, torch.bfloat16), whole) <= TOLERANCE
        residual, norm = random(num_tokens, rows), random(rows)
        expected = plain.add_rms_norm(partials, residual.clone(), norm, EPS)
        found = add_norm.add_rms_norm(partials, residual.clone(), norm, EPS)
        assert error(found[0], expected[0]) <= TOLERANCE
        assert torch.equal(found[1], expected[1]) or error(found[1], expected[1]) <= TOLERANCE
        if rows != qkv_rows:
            continue
        for norms in ((random(128), random(128)), None):
            heads = ProjectedHeads(
                partials, norms, EPS, (random(num_tokens, 64), random(num_tokens, 64)),
                random(9, 2, 16, 8, 128), kv_rows(torch.arange(num_tokens, device="cuda"), 16),
            )  # fmt: skip
            twin = replace(heads, kv_cache=heads.kv_cache.clone())
            query_heads = qk_rope_cache.qk_rope_cache(heads, pdl=facts.supports_pdl)
            assert error(query_heads, plain.qk_rope_cache(twin)) <= TOLERANCE
            assert error(heads.kv_cache, twin.kv_cache) <= TOLERANCE
    x, weight = random(num_tokens, hidden), random(2 * intermediate, hidden) * hidden**-0.5
    bias = random(2 * intermediate) if biased else None
    config = tuning.skinny_swiglu_config(facts, 2 * intermediate, hidden)
    assert config is not None
    found = skinny_gemm.linear_swiglu(x, weight, bias, config, **shared)
    assert error(found, plain.linear_swiglu(x, weight, bias)) <= 2 * TOLERANCE


@pytest.mark.parametrize(
    ("width", "rows"),
    [
        (2048, 4096), (6144, 2048), (2560, 9728), (9728, 2560), (4096, 12288), (12288, 4096),
        (5120, 25600), (25600, 5120), (8192, 5120), (256, 100), (14336, 4096),
    ],
)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
def test_gemvs_agree_with_their_twins(width: int, rows: int, biased: bool) -> None:
    pdl = {"pdl": DeviceFacts.of(CUDA).supports_pdl}
    x, norm, residual = random(1, width), random(width), random(1, rows)
    weight = (torch.randn(2 * rows, width, device="cuda") * 0.02).bfloat16()
    both = random(2 * rows) if biased else None
    half, one = weight[:rows], None if both is None else both[:rows]
    assert error(gemv.linear(x, half, **pdl), plain.linear(x, half)) <= TOLERANCE
    expected = plain.norm_linear(x, norm, EPS, half, one)
    assert error(gemv.norm_linear(x, norm, EPS, half, one, **pdl), expected) <= TOLERANCE
    expected = plain.norm_swiglu(x, norm, EPS, weight, both)
    found = gemv.norm_swiglu(x, norm, EPS, weight, both, **pdl)
    assert error(found, expected) <= 2 * TOLERANCE
    twin = residual.clone()
    gemv.linear_residual(x, half, one, residual, **pdl)
    plain.linear_residual(x, half, one, twin)
    assert error(residual, twin) <= TOLERANCE


@pytest.mark.parametrize("vocab_size", [100, 1024, 151936])
def test_greedy_agrees_with_its_twin(vocab_size: int) -> None:
    logits = random(9, vocab_size)
    logits[3, 7], logits[4, 11], logits[5, -1] = torch.nan, torch.inf, -torch.inf
    logits[6] = 0.5  # all equal: the first wins
    logits[7, -1] = 100.0
    found = fused().greedy(logits).tolist()
    assert found[3:8] == [-1, -1, -1, 0, vocab_size - 1]
    values = logits.gather(1, torch.tensor(found, device="cuda").clamp(min=0)[:, None].long())
    for row in (0, 1, 2, 6, 7, 8):
        assert values[row] == logits[row].max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [100, 1024, 151936])
def test_greedy_tokens_under_masks_agree_with_their_twin(
    vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(9, vocab_size, dtype=dtype, device=CUDA)
    sampling_twins.check_greedy_masked(fused().greedy_masked, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "few", "far"])
@pytest.mark.parametrize("vocab_size", [151_936, 50_000, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_samples_are_those_of_the_distribution(
    vocab_size: int, kind: str, dtype: torch.dtype, masked: bool
) -> None:
    logits = torch.randn(len(sampling_twins.ROWS), vocab_size, device=CUDA) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.full_like(logits, -2.5)
    elif kind == "few":  # the others are forbidden
        logits[:, 7:] = -torch.inf
    elif kind == "far":
        logits = logits * 300 - 5000
    allowed = None
    if masked:
        allowed = np.random.default_rng(vocab_size).random(logits.shape) < 0.3
        allowed[:, 3] = True  # one that all kinds may have
    rows = sampling_twins.ROWS
    sampling_twins.check(fused().sample, logits.to(dtype), rows, vocab_size, allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_whose_tokens_are_all_masked_fails_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 151_936, device=CUDA).to(dtype)
    sampling_twins.check_masked_out(fused().sample, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [151_936, 50_001, 40])
def test_penalties_are_those_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    sampling_twins.check_penalties(fused(), vocab_size, dtype, CUDA)
