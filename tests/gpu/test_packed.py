"""Kernels of packed integers and of int8 against their plain twins, at the shapes of the 8B.

Tolerance as in `twins`: both round once to bf16, and sums are in another order. Weights of small
groups are rounded to bf16 before they are multiplied, in the kernel as in the twin; those of larger
ones in the twin alone, which the sum over thousands of columns evens out. Sums of int8 are exact.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests import int8_checkpoints, packed_checkpoints
from tests.decoder_harness import Harness, write_tensors
from tests.gpu.test_fp8 import CONFIG
from tests.gpu.twins import CUDA, TOLERANCE, error, random

pytest.importorskip("triton")
from kernels import plain
from kernels.device import DeviceFacts
from kernels.gemm import (
    int8_kernels,
    int8_weight,
    packed_kernels,
    packed_tiles,
    packed_weight,
    quantizing,
)
from kernels.gemm.int8_weight import Int8Weight
from kernels.gemm.packed_weight import PackedWeight
from kernels.gemm.skinny_gemm import summed
from services.common.nn import int8
from services.common.nn.packed import BYTES_TOKENS

pytestmark = pytest.mark.gpu
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048)]


def make(rows: int, columns: int, bits: int, group: int, zeros: bool) -> PackedWeight:
    """Scales differ by a factor of 4, so that a wrong one shows."""
    codes = torch.randint(256, (rows, columns * bits // 8), dtype=torch.uint8, device=CUDA)
    size = rows, columns // group
    scale = (torch.rand(size, device=CUDA) * 3e-3 + 1e-3).half()
    zero = torch.randint(1 << bits, size, dtype=torch.uint8, device=CUDA) if zeros else None
    return PackedWeight(codes, scale, zero, bits, group, columns)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 128, False), (4, 128, True), (4, 32, True), (8, 128, False)]
)
def test_the_skinny_gemm_agrees_with_its_twin(
    rows: int, columns: int, bits: int, group: int, zeros: bool
) -> None:
    facts, weight = DeviceFacts.of(torch.device("cuda", 0)), make(rows, columns, bits, group, zeros)
    assert packed_weight.has_kernels(weight)
    for num_tokens in (1, 2, 5, BYTES_TOKENS):
        x, bias = random(num_tokens, columns), random(rows)
        twin = packed_weight.weight_only_linear(x, weight)
        found = summed(packed_kernels.split_k_partials, x, weight, device=facts)
        assert found.shape == twin.shape and found.dtype == torch.bfloat16
        assert error(found, twin) <= TOLERANCE, num_tokens
        partials = packed_kernels.split_k_partials(x, weight, bias, device=facts)
        total = partials.view(-1, num_tokens, rows).float().sum(0)
        assert error(total, twin.float() + bias.float()) <= TOLERANCE, num_tokens
    wrong = PackedWeight(weight.codes, weight.scale.flip(1), weight.zero, bits, group, columns)
    x = random(4, columns)
    right = packed_weight.weight_only_linear(x, weight)
    assert (
        error(summed(packed_kernels.split_k_partials, x, wrong, device=facts), right)
        > 50 * TOLERANCE
    )


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "zeros"), [(128, False), (128, True), (64, False), (32, True)])
def test_kernels_of_tiles_agree_with_their_twin(
    rows: int, columns: int, dtype: torch.dtype, group: int, zeros: bool
) -> None:
    facts = DeviceFacts.of(torch.device("cuda", 0))
    weight = packed_weight.tiled(make(rows, columns, 4, group, zeros))
    for num_tokens in (1, 3, 16, 33, 64, 150):
        x, bias = random(num_tokens, columns).to(dtype), random(rows).to(dtype)
        twin = packed_weight.weight_only_linear(x, weight)
        partials = packed_tiles.split_k_partials(x, weight, bias, device=facts)
        total = partials.view(-1, num_tokens, rows).float().sum(0)
        assert error(total, twin.float() + bias.float()) <= TOLERANCE, num_tokens
        gated = packed_tiles.linear_swiglu(x, weight, bias, device=facts)
        assert error(gated, plain.silu_and_mul(twin + bias)) <= 2 * TOLERANCE, num_tokens
    wide = packed_tiles.dequantized(weight, dtype, device=facts)
    assert wide.equal(packed_weight.dequantize(weight, dtype))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_gemm_of_integers_is_exact(rows: int, columns: int) -> None:
    """Where K is split, the sum of scaled parts is rounded otherwise."""
    facts = DeviceFacts.of(torch.device("cuda", 0))
    values = torch.randint(-128, 128, (rows, columns), device=CUDA).to(torch.int8)
    weight = Int8Weight(values, torch.rand(rows, 1, device=CUDA) * 3e-4 + 1e-4)
    for num_tokens in (1, 16, 33, 1008):
        x = random(num_tokens, columns)
        twin = int8_weight.w8a8_linear(x, weight)
        assert int8_weight.int_mm_linear(x, weight).equal(twin), num_tokens
        if num_tokens <= int8.SKINNY_TOKENS:
            found = summed(int8_kernels.split_k_partials, x, weight, device=facts)
            assert error(found, twin) <= TOLERANCE, num_tokens
        if facts.is_hopper:
            assert int8_kernels.gemm(x, weight, device=facts).equal(twin), num_tokens
            found = int8_kernels.gemm(x, weight, device=facts, is_swiglu=True)
            assert error(found, plain.silu_and_mul(twin)) <= TOLERANCE, num_tokens


@pytest.mark.parametrize("splits", [0, 1, 4])
def test_a_norm_that_quantizes_agrees_with_its_twin(splits: int) -> None:
    """A value at a half of the unit may be rounded to the other side."""
    for num_tokens in (1, 70):
        residual, norm = random(num_tokens, 4096), random(4096)
        x = random(num_tokens, 4096) if splits == 1 else None
        if splits > 1:
            x = torch.randn(splits, num_tokens, 4096, device=CUDA)
        total = residual.clone()
        if x is not None:
            total += plain.reduce_split_k(x, residual.dtype) if splits > 1 else x
        wanted = int8_weight.quantize_activations(plain.rms_norm(total, norm, 1e-6))
        found = quantizing.norm_quantize(x, residual, norm, 1e-6, torch.int8, 4096, pdl=True)
        values, scale = found.values[:num_tokens], found.scale[:num_tokens]
        assert error(residual, total) <= TOLERANCE
        assert error(scale, wanted[1]) <= TOLERANCE
        assert error(values * scale, wanted[0] * wanted[1]) <= TOLERANCE


def test_a_graph_replays_the_skinny_gemm() -> None:
    """With other inputs than at capture."""
    facts, weight = DeviceFacts.of(torch.device("cuda", 0)), make(4096, 4096, 4, 128, True)
    x = random(8, 4096)
    summed(packed_kernels.split_k_partials, x, weight, device=facts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = summed(packed_kernels.split_k_partials, x, weight, device=facts)
    x.copy_(random(8, 4096))
    graph.replay()
    assert out.equal(summed(packed_kernels.split_k_partials, x, weight, device=facts))


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip


def run(directory: Path, length: int, device: torch.device = CUDA, **options: object):
    """The logits of a prompt in one step with plain attention, and the kernels' calls."""
    plain_attention = "decode_attention=plain,prefill_attention=plain"
    options = {"max_model_len": 512, "kernels": plain_attention} | options
    with closing(Harness(directory, device=str(device), **options)) as harness:
        sequence = harness.start(list(range(length)))
        logits = harness.logits(harness.chunk(sequence)).float().cpu()
        return logits, harness.model.ops.table.calls()


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("name", ["ct-128-zeros", "awq-64", "gptq-64-8bit", "int8"])
@pytest.mark.parametrize("length", [1, 12, 300])
def test_a_models_kernels_agree_with_plain_ones(
    name: str, length: int, experts: bool, tmp_path: Path
) -> None:
    """No further from float32's on a CPU than plain kernels are, but for rounding; CUDA graphs are
    captured on the way.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG | (EXPERTS if experts else {})))

    def modules(module: str) -> bool:
        return "layers" in module and not module.endswith("mlp.gate")

    writer = int8_checkpoints.write if name == "int8" else packed_checkpoints.write
    writer(write_tensors(source), tmp_path / name, name, modules=modules)
    found, calls = run(tmp_path / name, length)
    if length <= BYTES_TOKENS:
        row = {"int8": "int8_skinny_gemm", "gptq-64-8bit": "packed_skinny_gemm"}.get(name, "tiles")
        assert calls["project", row]
    if experts:
        assert calls["moe", "int8" if name == "int8" else "packed"]
    exact, _ = run(tmp_path / name, length, torch.device("cpu"))
    plain, _ = run(tmp_path / name, length, kernels="plain", cuda_graphs=not experts)
    # With experts, rounding may send a token to another one, whichever the kernels.
    assert error(found, exact) <= 1.3 * error(plain, exact) < (0.5 if experts else 0.3)
