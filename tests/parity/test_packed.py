"""Packed integers: our logits are those of Hugging Face's model with dequantized weights.

Weight-only, in float32 on a CPU: the tolerance is that of unquantized models. Quantizer and packer
of the checkpoints share no code with ours.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.gemm import packed_weight
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.linear import Linear
from services.common.nn.packed import PackedLinear
from tests.cases import THOROUGH
from tests.decoder_harness import Harness
from tests.packed_checkpoints import LAYOUTS, awq, compressed, gptq, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import (
    SHAPES,
    TEXTS,
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


model, text = fixtures(
    write, tuple(SHAPES)
)  # columns are multiples of 128, or end inside such a group


# What another layout or another test has, too, is every night's here.
_NIGHTLY = {"ct-128-zeros", "ct-channel", "ct-channel-zeros", "awq-32", "gptq-64-8bit"}
assert LAYOUTS.keys() >= _NIGHTLY


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n in LAYOUTS if THOROUGH or n not in _NIGHTLY])
def test_logits_are_those_of_the_dequantized_checkpoint(model: Quantized, name: str) -> None:
    model.check(name, 0.02 if "8bit" in name else CLEARLY_WRONG)


@pytest.mark.parametrize("name", ["ct-32", "ct-64-zeros", "awq-32", "gptq-64"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_scales_of_any_dtype_agree(text: Quantized, name: str, scale_dtype: torch.dtype) -> None:
    directory, meant = text.write(name, scale_dtype=scale_dtype)
    assert error(text.ours(directory), text.expected(meant)) < TOLERANCE


@pytest.mark.parametrize("name", ["ct-32", "awq-64", "gptq-64"])
@pytest.mark.parametrize("family", ["qwen2-biases", "llama-biases"])
def test_layers_with_biases_agree(family: str, name: str, tmp_path: Path) -> None:
    model = Quantized(TEXTS[family], tmp_path, write)
    directory, meant = model.write(name)
    assert any(key.endswith(".bias") for key in meant)
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE


@pytest.mark.parametrize("name", ["ct-channel", "ct-channel-zeros", "ct-channel-8bit-zeros"])
def test_odd_sizes_agree(name: str, tmp_path: Path) -> None:
    """Neither rows nor columns fill their words, and zero points of merged parts end inside one."""
    sizes = {"hidden_size": 76, "intermediate_size": 90, "head_dim": 10}
    model = Quantized(Qwen3Config(**text_fields(**sizes)), tmp_path, write)
    directory, meant = model.write(name)
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE
    assert error(model.ours(directory, 3), model.expected(meant)) < TOLERANCE


@pytest.mark.parametrize("name", ["ct-32", "gptq-64"])
def test_a_quantized_lm_head_agrees(name: str, tmp_path: Path) -> None:
    model = Quantized(SHAPES["whole-blocks"], tmp_path, write)
    config = gptq(64, lm_head=True) if name == "gptq-64" else compressed(32, ignore=[])
    directory, meant = model.write(
        name, modules=lambda module: "visual" not in module, config=config
    )
    assert meant["lm_head.weight"].equal(model.original["lm_head.weight"]) is False
    assert error(model.ours(directory), model.expected(meant)) < TOLERANCE


def test_gptq_rules_choose_bits_and_groups_by_module(text: Quantized) -> None:
    """The first rule that fits counts; a module that it leaves out is not quantized."""
    rules = {
        r"-:.*layers\.0\.mlp\.down_proj": {},
        r"+:.*down_proj": {"bits": 8, "group_size": 64},
        r".*\.mlp\.": {"group_size": 32},
    }
    of_name = {name: LAYOUTS[f"gptq-{name}"] for name in ("64", "64-8bit")}
    narrow = replace(LAYOUTS["gptq-64"], group=32)

    def layout(module: str):
        if "down_proj" in module:
            return of_name["64-8bit"]
        return narrow if ".mlp." in module else of_name["64"]

    directory, meant = text.write(
        "gptq-64", config=gptq(64, dynamic=rules), layout=layout,
        modules=lambda module: "layers" in module and "0.mlp.down_proj" not in module,
    )  # fmt: skip
    assert error(text.ours(directory), text.expected(meant)) < TOLERANCE
    layers = Harness(directory).model.layers  # type: ignore[attr-defined]
    found = [layer.mlp.down_proj.weight_format for layer in layers]
    assert found == ["plain", "w8a16"]
    assert layers[1].mlp.gate_up_proj.weight_scale.shape[1] == 192 // 32


def test_biases_of_zeros_that_the_model_has_not_are_read(text: Quantized) -> None:
    """As older producers of GPTQ files write them; others are an error."""
    directory, meant = text.write("gptq-64")
    path = directory / "model.safetensors"
    files = load_file(path)
    biases = {
        name.replace("qweight", "bias"): torch.zeros(words.shape[1]).half()
        for name, words in files.items() if name.endswith("qweight")
    }  # fmt: skip
    assert len(biases) == 14
    save_file(files | biases, path)
    assert error(text.ours(directory), text.expected(meant)) < TOLERANCE
    biases["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    save_file(files | biases, path)
    with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj\.bias: the model has no such bias"):
        Harness(directory)


def test_layers_call_the_dispatch_table(tmp_path: Path) -> None:
    """Those whose sizes are whole tiles."""
    model = Quantized(SHAPES["whole-blocks"], tmp_path, write)
    directory, _ = model.write("awq-64")
    harness = Harness(directory)
    harness.logits(harness.chunk(harness.start(list(range(9)))))
    calls = harness.model.ops.table.calls()
    assert calls["w4a16_linear", "plain"] == 4 * model.oracle.spec.text.num_layers


def test_one_layout_holds_what_each_packing_says(text: Quantized) -> None:
    """A quarter of a byte more than half a byte per weight for scales of 16 bits and group 64."""
    for name in ("ct-64-zeros", "awq-64", "gptq-64"):
        directory, _ = text.write(name)
        layer = Harness(directory).model.layers[0].mlp.down_proj  # type: ignore[attr-defined]
        weight = layer.method.weight(layer)
        assert weight.codes.dtype == torch.uint8 and weight.codes.shape == (192, 160)
        assert weight.scale.dtype == torch.float16 and weight.scale.shape == (192, 5)
        assert (weight.zero is None) == (name == "gptq-64")
        held = {name: tuple(each.shape) for name, each in layer.named_parameters()}
        assert held.pop("weight_zero", (192, 5)) == (192, 5)
        assert held == {"weight": (192, 160), "weight_scale": (192, 5)}


def test_dummy_weights_are_packed_as_the_configuration_says(text: Quantized) -> None:
    for name in ("ct-64-zeros", "awq-64", "gptq-64"):
        directory, _ = text.write(name)
        layer = dummy_layer(directory)
        weight = packed_weight.dequantize(layer.method.weight(layer), torch.float32)
        assert layer.weight_format == "w4a16" and 0.01 < float(weight.std()) < 0.04


# Other models.


def test_qwen3_5_agrees(tmp_path: Path) -> None:
    check_qwen3_5(write, "ct-32", tmp_path)


class PackedExperts(ExpertsModel):
    def write(self, name: str = "ct-32", **options: object) -> dict[str, Tensor]:
        chosen = {"modules": is_quantized, "config": EXPERT_CONFIGS[name]} | options
        return write(self.source, self.directory, name, **chosen)  # type: ignore[arg-type]


EXPERT_CONFIGS = {
    "ct-32": compressed(32, ignore=["lm_head", "re:.*mlp.gate$"]),
    "ct-64-zeros": compressed(64, symmetric=False, ignore=["lm_head", "re:.*mlp.gate$"]),
    "awq-32": awq(32, modules_to_not_convert=["lm_head", "mlp.gate"]),
    "gptq-64": gptq(64, dynamic={"-:.*mlp.gate$": {}}),
}


@pytest.mark.parametrize("size", [64, 160])
@pytest.mark.parametrize("name", EXPERT_CONFIGS)
def test_experts_agree(name: str, size: int, tmp_path: Path) -> None:
    model = PackedExperts(tmp_path, size)
    expected = model.expected(model.write(name))
    assert error(model.ours(), expected) < TOLERANCE
    assert error(model.ours(3), expected) < TOLERANCE
    model.oracle.model.load_state_dict(model.original)
    assert error(model.oracle.answer(model.prompt).logits, expected) > CLEARLY_WRONG


def test_control_scales_of_another_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackedExperts(tmp_path, 64)
    expected = model.expected(model.write())
    of_stack = PackedLinear.weight

    def faulty(self: PackedLinear, layer: Linear) -> packed_weight.PackedWeight:
        weight = of_stack(self, layer)
        return replace(weight, scale=weight.scale.roll(1, 0)) if weight.scale.dim() > 2 else weight

    monkeypatch.setattr(PackedLinear, "weight", faulty)
    assert error(model.ours(), expected) > CLEARLY_WRONG


def test_an_experts_missing_scale_is_an_error(tmp_path: Path) -> None:
    model, lost = PackedExperts(tmp_path, 64), "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    model.write(change=lambda key, tensor: None if key == lost else tensor)
    with pytest.raises(CheckpointError, match=rf"missing tensors: {lost}$"):
        model.ours()


# Controls: what is read wrongly is seen.


@pytest.mark.parametrize("name", ["ct-64-zeros", "awq-64", "gptq-64"])
@pytest.mark.parametrize("fault", ["scales", "zero points", "order of groups", "halves"])
def test_control(text: Quantized, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, meant = text.write(name)
    expected = text.expected(meant)
    assert error(text.ours(directory), expected) < TOLERANCE
    dequantize = packed_weight.dequantize

    def faulty(weight: packed_weight.PackedWeight, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = weight.codes, weight.scale, weight.zero
        match fault:
            case "scales":
                scale = torch.full_like(scale, float(scale.float().mean()))
            case "zero points":
                zero = torch.full_like(scale, 7.0) if zero is None else None
            case "order of groups":
                scale = scale.flip(-1)
            case _:
                codes = codes << 4 | codes >> 4
        return dequantize(replace(weight, codes=codes, scale=scale, zero=zero), dtype)

    monkeypatch.setattr(packed_weight, "dequantize", faulty)
    assert error(text.ours(directory), expected) > CLEARLY_WRONG


LAYER = "model.layers.1."


def _without(_: Tensor) -> None:
    return None


FAULTS = {
    "no scale": (
        "ct-32", changed("self_attn.k_proj.weight_scale", _without),
        rf"missing tensors: {LAYER}self_attn\.k_proj\.weight_scale$",
    ),
    "no codes": (
        "ct-32", changed("mlp.down_proj.weight_packed", _without),
        rf"missing tensors: {LAYER}mlp\.down_proj\.weight_packed$",
    ),
    "group count": (
        "ct-32", changed("mlp.up_proj.weight_scale", lambda scale: scale[:, 1:]),
        r"up_proj\.weight_scale is \[320, 5\], the model wants \[320, 6\]",
    ),
    "another group size": (
        "awq-32", changed("mlp.up_proj.scales", lambda scale: scale[::2]),
        r"up_proj\.scales is \[3, 320\], the model wants \[6, 320\]",
    ),
    "scale dtype": (
        "gptq-64", changed("mlp.up_proj.scales", Tensor.int),
        r"up_proj\.scales is int32, the model wants float32 or",
    ),
    "shape": (
        "ct-32", changed("mlp.up_proj.weight_shape", lambda shape: shape.flip(0)),
        r"1\.mlp\.up_proj\.weight_shape: the value is not the shape of the module",
    ),
    "act-order": (
        "gptq-64", changed("mlp.down_proj.g_idx", lambda columns: columns.flip(0)),
        r"1\.mlp\.down_proj\.g_idx: .* act-order \(desc_act\) is not supported",
    ),
    "v2 that says v1": (
        "gptq-64",
        changed("self_attn.q_proj.qzeros", lambda zeros: torch.full_like(zeros, -0x77777778)),
        r"1\.self_attn\.q_proj\.qzeros: zero points are not those of symmetric gptq files",
    ),
    "wide codes": (
        "ct-32", changed("mlp.up_proj.weight_packed", Tensor.long),
        r"up_proj\.weight_packed is int64, the model wants int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_errors(text: Quantized, fault: str) -> None:
    name, change, message = FAULTS[fault]
    directory, _ = text.write(name, change=change)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ct-64-zeros", compressed(64), r"unexpected tensors: .*weight_zero_point"),
        ("ct-32", compressed(32, symmetric=False), r"missing tensors: .*weight_zero_point"),
        ("ct-32", compressed(64), r"weight_scale is \[\d+, 6\], the model wants \[\d+, 3\]"),
        ("awq-32", gptq(32), r"missing tensors: .*g_idx.*wrong shapes: .*qweight"),
        ("ct-32", awq(32), r"missing tensors: .*qweight.*unexpected tensors: .*weight_packed"),
        ("ct-32", compressed(32, ignore=["re:.*down_proj"]), r"down_proj: quantized in the files"),
        ("ct-32", {}, r"missing tensors: .*weight.*unexpected tensors: .*weight_packed"),
    ],
    ids=["zeros", "no-zeros", "group", "packing", "method", "ignored", "none"],
)
def test_files_of_another_kind_than_the_configuration_are_errors(
    text: Quantized, name: str, config: dict, message: str
) -> None:
    directory, _ = text.write(name, config=config)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)
