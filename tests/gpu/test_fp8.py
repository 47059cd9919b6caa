"""FP8 kernels against their plain twins, at the shapes of the 2B and the 8B.

Tolerance as in `twins`: both round once to bf16; sums are in another order. Activations are
quantized to the same values (exactly: the same divisions and roundings), so that the tolerance of
W8A8 is no larger.
"""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.decoder_harness import Harness, write_tensors
from tests.fp8_checkpoints import FORMATS, write
from tests.gpu.twins import CUDA, TOLERANCE, error, random

pytest.importorskip("triton")
from kernels.device import DeviceFacts
from kernels.gemm import fp8_kernels, fp8_w8a8, fp8_weight, quantizing, silu_mul
from kernels.gemm.fp8_weight import E4M3, Fp8Weight
from kernels.plain import rms_norm, silu_and_mul
from services.common.nn import fp8
from services.common.nn.dispatch import KernelTable

pytestmark = pytest.mark.gpu
SHAPES = [
    (4096, 2048), (6144, 4096), (24576, 4096), (4096, 12288), (2048, 6144), (151936, 4096),
    (16384, 5120), (5120, 17408),
]  # fmt: skip
TOKENS = [1, 2, 16, 64, 256, 1008]
EPS = 1e-6


def make(rows: int, columns: int, block: bool) -> Fp8Weight:
    """Scales differ by a factor of 4, so that a wrong one shows."""
    values = (torch.randn(rows, columns, device=CUDA) * 100).clamp(-448, 448).to(E4M3)
    size = (-(-rows // 128), columns // 128) if block else (rows, 1)
    scale = torch.rand(size, device=CUDA) * 3e-4 + 1e-4
    return Fp8Weight(values, scale, *((128, 128) if block else (1, columns)))


def options() -> dict[str, DeviceFacts]:
    return {"device": DeviceFacts.of(CUDA)}


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("block", [True, False])
def test_every_implementation_agrees_with_its_twin(rows: int, columns: int, block: bool) -> None:
    facts = SimpleNamespace(device=DeviceFacts.of(torch.device("cuda", 0)))
    operation = "fp8_block_linear" if block else "fp8_channel_linear"
    weight = make(rows, columns, block)
    seen = set()
    for row in fp8.linear_rows(operation):
        if row.obstacle(facts):
            continue
        kernel, tokens = row.create(facts), row.tokens(facts)
        assert kernel is not None
        for num_tokens in TOKENS:
            if not tokens.has(num_tokens, captured=True):
                continue
            x = random(num_tokens, columns)
            is_w8a8 = row.name in ("skinny_w8a8", "scaled_mm", "triton_gemm")
            twin = (fp8_weight.w8a8_linear if is_w8a8 else fp8.weight_only_linear)(x, weight)
            found = kernel(x, weight)
            assert found.shape == twin.shape and found.dtype == torch.bfloat16
            assert error(found, twin) <= TOLERANCE, (row.name, num_tokens)
            seen.add(row.name)
    assert seen >= {"gemv", "skinny_gemm", "plain"}


@pytest.mark.parametrize("columns", [2048, 4096, 12288])
@pytest.mark.parametrize("num_tokens", [1, 5, 1008])
def test_activations_are_quantized_exactly(columns: int, num_tokens: int) -> None:
    x = random(num_tokens, columns) * torch.logspace(-6, 6, num_tokens, device=CUDA)[:, None]
    x = x.bfloat16()
    x[0, :128] = 0
    for block_columns in (128, columns):
        values, scale = fp8_weight.quantize_activations(x, block_columns)
        pdl = DeviceFacts.of(CUDA).supports_pdl
        found = quantizing.quantize_activations(x, E4M3, block_columns, pdl=pdl)
        assert found.scale[:num_tokens].equal(scale)
        assert found.values[:num_tokens].float().equal(values.float())


@pytest.mark.parametrize("columns", [1536, 6144, 12288])
@pytest.mark.parametrize("num_tokens", [1, 65, 1008])
def test_swiglus_activations_are_quantized(columns: int, num_tokens: int) -> None:
    """The kernels' SwiGLU may round to another neighbour in bf16 than the twin's."""
    gate_up, pdl = random(num_tokens, 2 * columns), DeviceFacts.of(CUDA).supports_pdl
    activated = silu_mul.silu_and_mul(gate_up)
    assert error(activated, silu_and_mul(gate_up)) <= TOLERANCE
    for block_columns in (128, columns):
        values, scale = fp8_weight.quantize_activations(activated, block_columns)
        found = quantizing.swiglu_quantize(gate_up, E4M3, block_columns, pdl=pdl)
        assert found.scale[:num_tokens].equal(scale)
        assert found.values[:num_tokens].float().equal(values.float())
        assert not found.values[num_tokens:].float().any()


@pytest.mark.parametrize("num_tokens", [2, 5, 16, 33, 64])
@pytest.mark.parametrize("block", [True, False])
def test_fused_skinny_gemms_agree_with_their_twins(num_tokens: int, block: bool) -> None:
    facts, norm = DeviceFacts.of(torch.device("cuda", 0)), random(4096)
    if not facts.is_hopper:
        pytest.skip("another kernel serves few tokens here")
    weight = make(24576, 4096, block)
    x, residual = random(num_tokens, 4096), random(num_tokens, 4096)
    total = x + residual
    normed = rms_norm(total, norm, EPS)
    quantized = quantizing.norm_quantize(
        x, residual, norm, EPS, E4M3, weight.block_columns, pdl=facts.supports_pdl
    )
    assert residual.equal(total)
    # A sum in another order may move an activation to a neighbour in bf16, then in e4m3.
    expected = fp8_weight.w8a8_linear(normed, weight)
    found = fp8_w8a8.split_k_partials(quantized, weight, device=facts)
    assert error(found.view(-1, num_tokens, 24576).float().sum(0), expected) <= 2 * TOLERANCE
    found = fp8_w8a8.linear_swiglu(quantized, weight, device=facts)
    assert error(found, silu_and_mul(expected)) <= 4 * TOLERANCE


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 12288), (5120, 17408)])
def test_fused_gemvs_agree_with_their_twins(block: bool, hidden: int, inner: int) -> None:
    weight, norm = make(2 * inner, hidden, block), random(hidden)
    x = random(1, hidden)
    normed = fp8.weight_only_linear(rms_norm(x, norm, EPS), weight)
    assert (
        error(fp8_kernels.norm_gemv(x, norm, EPS, weight, None, **options()), normed) <= TOLERANCE
    )
    found = fp8_kernels.norm_swiglu_gemv(x, norm, EPS, weight, None, **options())
    assert error(found, silu_and_mul(normed)) <= 2 * TOLERANCE
    weight, x, residual = (
        make(hidden, inner, block),
        random(1, inner),
        random(1, hidden),
    )
    expected = residual + fp8.weight_only_linear(x, weight)
    fp8_kernels.gemv_add(x, weight, None, residual, **options())
    assert error(residual, expected) <= TOLERANCE


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "eos_token_id": 511, "tie_word_embeddings": False, "rope_theta": 1e6,
}  # fmt: skip
# Logits may be this much further from float32's, by relative L2, than with plain kernels. Two W8A8
# computations need not be near each other: where they differ by a rounding to bf16, an activation
# may become either of two neighbouring e4m3 values (0.14 between bf16 and float32 on a CPU, where
# quantized activations make a difference of 0.12).
FURTHER = 1.3


def run(directory: Path, length: int, device: torch.device = CUDA, **options: object):
    """The logits of a prompt in one step with plain attention, and the kernels' calls."""
    plain_attention = "decode_attention=plain,prefill_attention=plain"
    options = {"max_model_len": 512, "kernels": plain_attention} | options
    with closing(Harness(directory, device=str(device), **options)) as harness:
        sequence = harness.start(list(range(length)))
        logits = harness.logits(harness.chunk(sequence)).float().cpu()
        return logits, harness.model.ops.table.calls()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("length", "used"),
    [
        (1, [{("norm_linear", "fp8_gemv"), ("linear_residual", "fp8_gemv")}] * 2),
        (
            20,
            [
                {("project", "fp8_skinny_gemm")},
                {
                    ("norm_linear", "fp8_norm"),
                    ("norm_swiglu", "fp8_norm"),
                    ("project", "fp8_skinny_w8a8"),
                },
            ],
        ),
        (300, [set(), {("norm_linear", "fp8_norm"), ("norm_swiglu", "fp8_norm")}]),
    ],
)
def test_a_models_kernels_agree_with_plain_ones(
    name: str, length: int, used: list[set], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For many tokens activations are quantized, in the plain run, too."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    write(write_tensors(source), tmp_path / name, name)
    found, calls = run(tmp_path / name, length)
    operation = "fp8_block_linear" if "block" in name else "fp8_channel_linear"
    is_hopper = DeviceFacts.of(CUDA).is_hopper
    assert used[is_hopper] <= set(calls)
    if length > 1 and (is_hopper or length > fp8.SKINNY_TOKENS):
        monkeypatch.setattr(fp8, "weight_only_linear", fp8_weight.w8a8_linear)
    plain, plain_calls = run(tmp_path / name, length, kernels="plain")
    assert plain_calls[operation, "plain"] == 4 * CONFIG["num_hidden_layers"]
    monkeypatch.undo()
    exact, _ = run(tmp_path / name, length, torch.device("cpu"))
    assert error(found, exact) <= FURTHER * error(plain, exact) < 0.3


def test_control_a_wrong_scale_is_seen() -> None:
    weight, x = make(4096, 4096, block=True), random(16, 4096)
    wrong = Fp8Weight(weight.values, weight.scale.t().contiguous(), 128, 128)
    expected = fp8.weight_only_linear(x, weight)
    assert error(fp8.weight_only_linear(x, wrong), expected) > 50 * TOLERANCE


def test_a_graph_replays_every_implementation() -> None:
    """With other inputs than at capture."""
    facts = SimpleNamespace(device=DeviceFacts.of(torch.device("cuda", 0)))
    rows = [*fp8.linear_rows("fp8_block_linear"), *fp8.linear_rows("fp8_channel_linear")]
    table = KernelTable.resolve(rows, facts)
    for operation, block in (("fp8_block_linear", True), ("fp8_channel_linear", False)):
        weight = make(4096, 4096, block)
        for num_tokens in (1, 16, 256):
            x = random(num_tokens, 4096)
            with table.warming_up():
                table.call(operation, x, weight)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = table.call(operation, x, weight)
            x.copy_(random(num_tokens, 4096))
            graph.replay()
            expected = table.call(operation, x, weight)
            assert out.equal(expected)
