"""MXFP8, weights only: our logits are those of Hugging Face's model with dequantized weights.
Float32, CPU, the tolerance of unquantized models; the quantizer shares no code with ours.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.gemm import packed_weight
from kernels.gemm.packed_weight import PackedWeight
from services.common.model_spec import QuantizationSpec
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.linear import Linear
from services.common.nn.packed import PackedLinear
from tests import fp4_checkpoints, fp8_checkpoints
from tests.decoder_harness import Harness
from tests.mxfp8_checkpoints import GROUP, LAYOUTS, VALUES, compressed, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import (
    SHAPES,
    Quantized,
    changed,
    check_qwen3_5,
    dummy_layer,
    fixtures,
    text_fields,
)
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.test_moe_fp8 import Model as ExpertsModel
from tests.parity.test_moe_fp8 import is_quantized

# isort: split
from transformers import Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")


model, text = fixtures(write)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_dequantized_checkpoint(model: Quantized, name: str) -> None:
    model.check(name)


def test_odd_sizes_agree(tmp_path: Path) -> None:
    """The last group of a row is narrow, and merged parts have odd numbers of rows."""
    sizes = {"hidden_size": 76, "intermediate_size": 91, "head_dim": 10}
    model = Quantized(Qwen3Config(**text_fields(**sizes)), tmp_path, write)
    directory, meant = model.write("mxfp8")
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE
    assert error(model.ours(directory, 3), model.expected(meant)) < TOLERANCE


def test_a_quantized_lm_head_agrees(tmp_path: Path) -> None:
    model = Quantized(SHAPES["whole-blocks"], tmp_path, write)
    directory, meant = model.write(
        "mxfp8", modules=lambda module: "visual" not in module,
        config=compressed(ignore=["re:.*visual.*"]),
    )  # fmt: skip
    assert meant["lm_head.weight"].equal(model.original["lm_head.weight"]) is False
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE


def test_qwen3_5_agrees(tmp_path: Path) -> None:
    check_qwen3_5(write, "mxfp8", tmp_path)


class Mxfp8Experts(ExpertsModel):
    def write(self, **options: object) -> dict[str, Tensor]:
        chosen = {
            "modules": is_quantized, "config": compressed(ignore=["lm_head", "re:.*mlp.gate$"]),
        } | options  # fmt: skip
        return write(self.source, self.directory, "mxfp8", **chosen)


@pytest.mark.parametrize("size", [64, 100])
def test_experts_agree(size: int, tmp_path: Path) -> None:
    model = Mxfp8Experts(tmp_path, size)
    expected = model.expected(model.write())
    assert error(model.ours(), expected) < TOLERANCE
    assert error(model.ours(3), expected) < TOLERANCE
    model.oracle.model.load_state_dict(model.original)
    assert error(model.oracle.answer(model.prompt).logits, expected) > CLEARLY_WRONG


def test_experts_that_a_gpu_dequantizes_are_those_of_the_files(tmp_path: Path) -> None:
    """Before its grouped GEMM; here on a CPU."""
    pytest.importorskip("triton")
    from services.decoder.operations.moe import weights_of

    model = Mxfp8Experts(tmp_path, 100)
    meant = model.write()
    layers = Harness(model.directory).model.layers
    stack = layers[0].mlp.experts.down_proj  # type: ignore[attr-defined]
    names = [f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(*stack.stack)]
    expected = torch.stack([meant[name] for name in names])
    assert weights_of(stack, torch.float32).values.equal(expected)


def test_layers_call_the_dispatch_table(tmp_path: Path) -> None:
    """Those whose sizes are whole tiles."""
    model = Quantized(SHAPES["whole-blocks"], tmp_path, write)
    harness = Harness(model.write("mxfp8")[0])
    harness.logits(harness.chunk(harness.start(list(range(9)))))
    calls = harness.model.ops.table.calls()
    assert calls["mxfp8_linear", "plain"] == 4 * model.oracle.spec.text.num_layers


def test_codes_stay_in_a_byte_and_scales_in_two(text: Quantized) -> None:
    model = Harness(text.write("mxfp8")[0]).model
    layer = model.layers[0].mlp.gate_up_proj  # type: ignore[attr-defined]
    weight = layer.method.weight(layer)
    assert weight.codes.shape == (640, 192) and weight.codes.dtype == torch.float8_e4m3fn
    assert weight.scale.shape == (640, 6) and weight.scale.dtype == torch.float16


def test_dummy_weights(text: Quantized) -> None:
    directory, _ = text.write("mxfp8")
    layer = dummy_layer(directory)
    weight = packed_weight.dequantize(layer.method.weight(layer), torch.float32)
    assert layer.weight_format == "mxfp8" and 0.01 < float(weight.std()) < 0.04


def test_each_code_and_each_exponent_has_its_value() -> None:
    """But those of NaN; a float32 that is too large is infinite."""
    method = PackedLinear(QuantizationSpec(format="mxfp8", group_size=GROUP))
    layer = Linear(8 * GROUP, 255, method=method)
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    codes[:, 127::128] = 0
    layer.weight.data = codes.view(torch.float8_e4m3fn)
    exponents = torch.arange(255.0)[:, None]
    layer.weight_scale.data = exponents.expand(-1, 8)
    method.process_weights_after_loading(layer)
    half = torch.cat((VALUES, torch.zeros(1))).double()
    expected = (torch.cat((half, -half)) * 2.0 ** (exponents.double() - 127)).float()
    assert method.dequantize(method.weight(layer), torch.float32).equal(expected)


# Controls: what is read wrongly is seen.


@pytest.mark.parametrize("fault", ["scales", "order of groups", "bias", "signs"])
def test_control(text: Quantized, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, meant = text.write("mxfp8")
    expected, dequantize = text.expected(meant), packed_weight.dequantize
    assert error(text.ours(directory), expected) < TOLERANCE

    def faulty(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        codes, scale = weight.codes, weight.scale
        match fault:
            case "scales":
                scale = torch.full_like(scale, float(scale.float().mean()))
            case "order of groups":
                scale = scale.flip(-1)
            case "bias":
                scale = scale * 2
            case _:
                codes = (codes.view(torch.uint8) & 127).view(torch.float8_e4m3fn)
        return dequantize(replace(weight, codes=codes, scale=scale), dtype)

    monkeypatch.setattr(packed_weight, "dequantize", faulty)
    assert error(text.ours(directory), expected) > CLEARLY_WRONG


def test_control_scales_of_another_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mxfp8Experts(tmp_path, 64)
    expected, of_stack = model.expected(model.write()), PackedLinear.weight

    def faulty(self: PackedLinear, layer: Linear) -> PackedWeight:
        weight = of_stack(self, layer)
        return replace(weight, scale=weight.scale.roll(1, 0)) if weight.scale.dim() > 2 else weight

    monkeypatch.setattr(PackedLinear, "weight", faulty)
    assert error(model.ours(), expected) > CLEARLY_WRONG


def test_an_experts_missing_scale_is_an_error(tmp_path: Path) -> None:
    model, lost = Mxfp8Experts(tmp_path, 64), "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    model.write(change=lambda key, tensor: None if key == lost else tensor)
    with pytest.raises(CheckpointError, match=rf"missing tensors: {lost}$"):
        model.ours()


FAULTS = {
    "no scale": (
        changed("self_attn.k_proj.weight_scale", lambda _: None),
        r"missing tensors: .*1\.self_attn\.k_proj\.weight_scale$",
    ),
    "no weight": (
        changed("mlp.down_proj.weight", lambda _: None),
        r"missing tensors: .*1\.mlp\.down_proj\.weight$",
    ),
    "groups": (
        changed("mlp.up_proj.weight_scale", lambda scale: scale[:, 1:]),
        r"up_proj\.weight_scale is \[320, 5\], the model wants \[320, 6\]",
    ),
    "scales that are no exponents": (
        changed("mlp.up_proj.weight_scale", Tensor.float),
        r"up_proj\.weight_scale is float32, the model wants uint8",
    ),
    "e5m2": (
        changed("mlp.up_proj.weight", lambda weight: weight.float().to(torch.float8_e5m2)),
        r"up_proj\.weight is float8_e5m2, the model wants float8_e4m3fn",
    ),
    "an unquantized part": (
        changed("self_attn.v_proj.weight", Tensor.float),
        r"q_proj, .*k_proj, .*v_proj are one layer, and not all are quantized",
    ),
    "an unquantized layer with a scale": (
        changed("self_attn.o_proj.weight", Tensor.float),
        r"unexpected tensors: .*1\.self_attn\.o_proj\.weight_scale$",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_errors(text: Quantized, fault: str) -> None:
    change, message = FAULTS[fault]
    directory, _ = text.write("mxfp8", change=change)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (fp8_checkpoints.compressed(), r"weight_scale is \[\d+, 6\], the model wants \[\d+, 1\]"),
        (fp4_checkpoints.compressed("mxfp4"), r"missing.*weight_packed.*unexpected.*weight"),
        (compressed(ignore=["re:.*down_proj"]), r"down_proj: quantized in the files"),
        ({}, r"unexpected tensors: .*weight_scale.*wrong dtypes: .*float8_e4m3fn"),
    ],
    ids=["channel", "mxfp4", "ignored", "none"],
)
def test_files_of_another_kind_than_the_configuration_are_errors(
    text: Quantized, config: dict, message: str
) -> None:
    directory, _ = text.write("mxfp8", config=config)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)
