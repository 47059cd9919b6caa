"""FP8 checkpoints: our logits are those of Hugging Face's model with dequantized weights.

Weight-only, in float32 on a CPU, the tolerance is that of unquantized models. Matrices have whole
blocks or partial ones, and merged layers have parts that end inside a block.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from kernels.device import KNOWN_DEVICES, DeviceFacts
from kernels.gemm import fp8_weight
from kernels.gemm.fp8_weight import E4M3
from kernels.plain import reduce_split_k, rms_norm, silu_and_mul
from services.common.families import read_spec
from services.common.nn import fp8
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.formats import rows_of
from services.decoder.operations import table
from services.decoder.operations.ops import Ops
from services.decoder.operations.table import KernelFacts, Row
from tests.cases import THOROUGH
from tests.decoder_harness import Harness
from tests.fp8_checkpoints import FORMATS, FP8_BLOCK, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import SHAPES, TEXTS, Quantized, fixtures
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE

pytestmark = pytest.mark.usefixtures("one_thread")

# An activation is rounded to 4 significant bits: where two computations differ by float32's
# rounding alone, it may become either of two neighbours, up to 1/8 apart. The difference here is 0,
# and a few such roundings are less than this; leaving quantization out makes a difference of 3.
W8A8_TOLERANCE = 0.5
PARTS = ("q_proj", "k_proj", "v_proj")  # of the largest merged layer

# Blocks, channels and whole matrices, and each name of the list of unquantized modules: for what
# does not depend on how a format is read. `make nightly` has all formats.
SOME_FORMATS = list(FORMATS) if THOROUGH else ["fp8-block", "compressed-channel", "auto-fp8"]

model, _ = fixtures(write, tuple(SHAPES))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(SHAPES["partial-blocks"], tmp_path_factory.mktemp("odd"), write)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(SHAPES["whole-blocks"], tmp_path_factory.mktemp("untied"), write)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_checkpoint(
    model: Quantized, name: str, scale_dtype: torch.dtype
) -> None:
    model.check(name, scale_dtype=scale_dtype)


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
@pytest.mark.parametrize("family", TEXTS)
def test_text_families_agree(family: str, name: str, tmp_path: Path) -> None:
    model = Quantized(TEXTS[family], tmp_path, write)
    directory, meant = model.write(name)
    assert ("biases" in family) == any(key.endswith(".bias") for key in meant)
    expected = model.expected(meant)
    assert error(model.ours(directory), expected) < TOLERANCE
    assert error(model.ours(directory, 3), expected) < TOLERANCE
    assert error(model.expected(model.original), expected) > CLEARLY_WRONG


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FORMATS)
def test_a_quantized_lm_head_agrees(untied: Quantized, name: str) -> None:
    model = untied
    config = FORMATS[name][0]
    (key,) = config.keys() & {"ignore", "ignored_layers", "modules_to_not_convert"}
    config = config | {key: [module for module in config[key] if module != "lm_head"]}
    directory, meant = model.write(
        name, modules=lambda module: "visual" not in module, config=config
    )
    assert meant["lm_head.weight"].equal(model.original["lm_head.weight"]) is False
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE


def test_modules_that_files_leave_unquantized_agree(
    model: Quantized, caplog: pytest.LogCaptureFixture
) -> None:
    """The configuration does not list them; they are reported once."""
    directory, meant = model.write(
        "fp8-block",
        modules=lambda module: "layers" in module and "visual" not in module
        and "down_proj" not in module,
    )  # fmt: skip
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE
    (record,) = [record for record in caplog.records if "not quantized" in record.message]
    assert "2 modules" in record.message and "layers.0.mlp.down_proj" in record.message


def test_layers_call_the_dispatch_table(untied: Quantized) -> None:
    directory, _ = untied.write("fp8-block")
    harness = Harness(directory)
    sequence = harness.start(list(range(9)))
    harness.logits(harness.chunk(sequence))
    calls = harness.model.ops.table.calls()
    assert calls["fp8_block_linear", "plain"] == 4 * untied.oracle.spec.text.num_layers


def kernels_as_twins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weight-only twins in place of kernels; the names of those that are called."""
    from kernels.gemm import fp8_kernels, fp8_w8a8, quantizing, silu_mul

    called = []

    def twin(module: object, function: Callable) -> None:
        def counted(*arguments: object, **_: object) -> object:
            called.append(function.__name__)
            return function(*arguments)

        monkeypatch.setattr(module, function.__name__, counted)

    def split_k_partials(x, weight, bias):
        values = x.values if isinstance(x, quantizing.Quantized) else x
        found = fp8.weight_only_linear(values, weight)
        return (found if bias is None else found + bias)[None].float()

    def norm_gemv(x, norm, eps, weight, bias):
        return split_k_partials(rms_norm(x, norm, eps), weight, bias)[0]

    def norm_swiglu_gemv(x, norm, eps, weight, bias):
        return silu_and_mul(norm_gemv(x, norm, eps, weight, bias))

    def gemv_add(x, weight, bias, residual):
        residual += split_k_partials(x, weight, bias)[0]

    def norm_quantize(x, residual, norm, eps, kind, block_columns):
        assert kind == E4M3 and residual.shape[1] % block_columns == 0
        if x is not None:
            residual += reduce_split_k(x, residual.dtype)
        return unrounded(rms_norm(residual, norm, eps))

    def swiglu_quantize(gate_up, kind, block_columns):
        assert kind == E4M3 and gate_up.shape[1] // 2 % block_columns == 0
        return unrounded(silu_and_mul(gate_up))

    def unrounded(x):
        return quantizing.Quantized(x, x.new_ones(len(x), 1), len(x), x.dtype)

    def linear_swiglu(x, weight, bias):
        return silu_and_mul(split_k_partials(x, weight, bias)[0])

    def scaled_mm(x, weight):
        return split_k_partials(x, weight, None)[0]

    for function in (norm_gemv, norm_swiglu_gemv, gemv_add, split_k_partials):
        twin(fp8_kernels, function)
    for function in (split_k_partials, linear_swiglu, scaled_mm):
        twin(fp8_w8a8, function)
    for function in (norm_quantize, swiglu_quantize):
        twin(quantizing, function)
    twin(silu_mul, silu_and_mul)  # in the layer whose output projection is unquantized
    return called


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FORMATS)
def test_fused_operations_agree(
    untied: Quantized, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU calls for a few tokens, and for many, with the twins of the kernels. One module is
    not quantized: the unquantized operation has to take it.
    """
    pytest.importorskip("triton")
    called = kernels_as_twins(monkeypatch)
    directory, meant = untied.write(
        name, modules=lambda module: "layers" in module and "visual" not in module
        and "layers.1.mlp.down_proj" not in module,
    )  # fmt: skip
    harness, expected = Harness(directory), untied.expected(meant)
    text = harness.model.ops.table.facts.text
    facts = KernelFacts(
        KNOWN_DEVICES["h200"],
        text,
        torch.bfloat16,
        "fp8_block" if "block" in name else "fp8_channel",
    )
    fused = [
        row
        for row in rows_of(facts.weight_format)[facts.weight_format]
        if row.operation in table.LAYER_ARGUMENT
    ]
    assert {row.operation for row in fused} == {
        "norm_linear", "norm_swiglu", "linear_residual", "project"
    }  # fmt: skip
    assert not any(row.obstacle(facts) for row in fused)
    few = fp8.SKINNY_W8A8_TOKENS
    for chosen, most, kernels in (
        (["fp8_gemv"], few, {"norm_gemv", "norm_swiglu_gemv", "gemv_add"}),
        (["fp8_skinny_gemm"], few, {"split_k_partials"}),
        (
            ["fp8_norm", "fp8_skinny_w8a8"], few,
            {"norm_quantize", "split_k_partials", "linear_swiglu"},
        ),
        (["fp8_norm"], 0, {"norm_quantize", "scaled_mm", "swiglu_quantize", "silu_and_mul"}),
    ):  # fmt: skip
        monkeypatch.setattr(fp8, "SKINNY_W8A8_TOKENS", most)
        rows = [
            Row(row.operation, "test", lambda _, create=row.create: create(facts))
            for row in fused
            if row.name in chosen
        ]
        on_cpu = replace(facts, device=DeviceFacts("cpu"), dtype=torch.float32)
        formats = {"plain": (), facts.weight_format: rows}  # a layer is unquantized
        ops = Ops(table.resolve(on_cpu, formats=formats), formats)
        harness.model.ops = ops
        called.clear()
        assert error(untied.run(harness), expected) < TOLERANCE
        assert set(called) == kernels


# With activations quantized, as a GPU does for many tokens.


class QuantizingLinear(torch.nn.Linear):
    """Written without `services.common.nn.fp8`: block by block of the input's columns."""

    columns: int = 0  # of a block; 0: all

    def forward(self, input: Tensor) -> Tensor:
        wide = self.columns or input.shape[-1]
        blocks = []
        for block in input.split(wide, -1):
            scale = block.abs().amax(-1, keepdim=True) / 448
            blocks.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
        return F.linear(torch.cat(blocks, -1), self.weight, self.bias)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FORMATS)
def test_quantized_activations_agree(
    model: Quantized, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, meant = model.write(name)
    weight_only = model.expected(meant)
    monkeypatch.setattr(fp8, "weight_only_linear", fp8_weight.w8a8_linear)
    monkeypatch.setattr(fp8.Fp8Linear, "multiply", staticmethod(fp8_weight.w8a8_linear))
    found = model.ours(directory)
    answer = model.oracle.answer(model.prompt)
    layers = model.oracle.model.model.language_model.layers
    linears = [part for part in layers.modules() if isinstance(part, torch.nn.Linear)]
    assert len(linears) == 7 * len(layers)
    for part in linears:
        part.__class__ = QuantizingLinear
        part.columns = 128 if "block" in name else 0  # type: ignore[assignment]
    try:
        expected = model.oracle.answer(model.prompt).logits
    finally:
        for part in linears:
            part.__class__ = torch.nn.Linear
    assert answer.logits.equal(weight_only)
    assert error(found, expected) < W8A8_TOLERANCE < error(expected, weight_only)


# Controls: what is read wrongly is seen.


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FORMATS)
@pytest.mark.parametrize("fault", ["dropped", "transposed"])
def test_control_scales(
    model: Quantized, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, meant = model.write(name)
    expected = model.expected(meant)
    dequantize = fp8_weight.dequantize

    def faulty(weight: fp8_weight.Fp8Weight, dtype: torch.dtype) -> Tensor:
        scale = weight.scale
        if len(scale.unique()) <= len(PARTS):  # of whole matrices
            scale = torch.ones_like(scale) if fault == "dropped" else scale * 1.5
        elif fault == "dropped":
            scale = torch.full_like(scale, float(scale.mean()))
        elif scale.shape[1] > 1:
            scale = scale.t().reshape(scale.shape)
        else:
            scale = scale.flip(0)
        return dequantize(replace(weight, scale=scale), dtype)

    monkeypatch.setattr(fp8_weight, "dequantize", faulty)
    assert error(model.ours(directory), expected) > CLEARLY_WRONG


@pytest.mark.parametrize("name", ["compressed-tensor", "modelopt"])
def test_each_matrix_of_a_merged_layer_has_its_scale(untied: Quantized, name: str) -> None:
    directory, meant = untied.write(
        name, change=lambda key, tensor: tensor * 4 if "k_proj.weight_scale" in key else tensor
    )
    for key in meant:
        if key.endswith("k_proj.weight"):
            meant[key] = meant[key] * 4
    harness, expected = Harness(directory), untied.expected(meant)
    assert error(untied.run(harness), expected) < TOLERANCE
    layer = harness.model.layers[0].self_attn.qkv_proj  # type: ignore[attr-defined]
    of_parts = layer.weight_scale[:, 0].split(list(layer.parts.values()))
    assert [len(scale.unique()) for scale in of_parts] == [1] * len(PARTS)


LAYER = "model.language_model.layers.1."


def _without(name: str) -> Callable[[str, Tensor], Tensor | None]:
    return lambda key, tensor: None if key == name else tensor


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda key, tensor: change(tensor) if key == LAYER + name else tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without(LAYER + "self_attn.k_proj.weight_scale_inv"),
            rf"missing tensors: {LAYER}self_attn\.k_proj\.weight_scale_inv$",
        ),
        (
            _without(LAYER + "mlp.down_proj.weight"),
            rf"missing tensors: {LAYER}mlp\.down_proj\.weight$",
        ),
        (
            _changed("mlp.up_proj.weight_scale_inv", Tensor.t),
            r"up_proj\.weight_scale_inv is \[2, 3\], the model wants \[3, 2\]",
        ),
        (
            _changed("self_attn.k_proj.weight_scale_inv", Tensor.int),
            r"k_proj\.weight_scale_inv is int32, the model wants float32 or",
        ),
        (
            _changed("self_attn.v_proj.weight", Tensor.float),
            r"q_proj, .*k_proj, .*v_proj are one layer, and not all are quantized",
        ),
        (
            _changed("self_attn.o_proj.weight", Tensor.float),
            r"unexpected tensors: .*layers\.1\.self_attn\.o_proj\.weight_scale_inv$",
        ),
    ],
    ids=["no-scale", "no-weight", "shape", "dtype", "mixed-parts", "dropped-scale"],
)
def test_files_that_do_not_fit_are_errors(odd: Quantized, change: Callable, message: str) -> None:
    directory, _ = odd.write("fp8-block", change=change)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)


def test_a_quantized_module_that_the_configuration_ignores_is_an_error(odd: Quantized) -> None:
    config = FP8_BLOCK | {"modules_to_not_convert": ["model.visual", LAYER + "mlp.down_proj"]}
    directory, _ = odd.write("fp8-block", config=config)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: quantized in the files"):
        Harness(directory)


def test_quantized_files_without_a_configuration_are_an_error(odd: Quantized) -> None:
    directory, _ = odd.write("fp8-block", config={"quant_method": None})
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"quantization_config"', '"other"'))
    assert read_spec(directory).checkpoint.quantization is None
    with pytest.raises(CheckpointError, match=r"unexpected tensors.*wrong dtypes.*float8_e4m3fn"):
        Harness(directory)


def test_files_of_another_format_than_the_configuration_are_an_error(odd: Quantized) -> None:
    directory, _ = odd.write("compressed-channel", config=FP8_BLOCK)
    with pytest.raises(CheckpointError, match=r"wrong shapes: .*weight_scale is"):
        Harness(directory)


def test_a_scale_of_a_tied_lm_head_is_an_error(odd: Quantized) -> None:
    extra = {"lm_head.weight_scale_inv": torch.ones(3, 2)}
    directory, _ = odd.write("fp8-block")
    path = directory / "model.safetensors"
    save_file(load_file(path) | extra, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: lm_head\.weight_scale_inv"):
        Harness(directory)


def test_dummy_weights_are_quantized_as_the_configuration_says(model: Quantized) -> None:
    directory, _ = model.write("compressed-block")
    (directory / "model.safetensors").unlink()
    runner = Harness(directory, load_format="dummy").runner
    layer: Any = runner.computer.model.layers[0]  # type: ignore[attr-defined]
    assert layer.mlp.down_proj.weight_format == "fp8_block"
    projection = layer.mlp.down_proj
    weight = fp8_weight.dequantize(projection.method.weight(projection), torch.float32)
    assert 0.015 < float(weight.std()) < 0.025
    head = runner.computer.model.lm_head  # type: ignore[attr-defined]
    assert head is None or head.is_plain
