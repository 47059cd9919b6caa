"""NVFP4 and MXFP4, weights only: our logits are those of Hugging Face's model with dequantized
weights. Float32, CPU, the tolerance of unquantized models; the quantizer shares no code with ours.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.gemm import packed_weight
from services.common.nn.checkpoint import CheckpointError
from tests.decoder_harness import Harness
from tests.fp4_checkpoints import LAYOUTS, MODELOPT, VALUES, compressed, write
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import Quantized, changed, dummy_layer, fixtures
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.test_moe_fp8 import Model as ExpertsModel
from tests.parity.test_moe_fp8 import is_quantized

pytestmark = pytest.mark.usefixtures("one_thread")

_OF_INPUTS = ("input_scale", "input_global_scale")


model, text = fixtures(write)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_dequantized_checkpoint(model: Quantized, name: str) -> None:
    model.check(name)


@pytest.mark.parametrize("name", ["nvfp4-inputs", "modelopt", "weights alone"])
def test_scales_of_activations_may_be_missing(text: Quantized, name: str) -> None:
    """As in files for kernels that leave activations as they are."""
    directory, meant = text.write(
        "modelopt" if name == "weights alone" else name,
        change=lambda key, tensor: None if key.endswith(_OF_INPUTS) else tensor,
        config=MODELOPT | {"quant_algo": "W4A16_NVFP4"} if name == "weights alone" else None,
    )
    assert error(text.ours(directory), text.expected(meant)) < TOLERANCE


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_agree(name: str, tmp_path: Path) -> None:
    model = ExpertsModel(tmp_path, 96)
    left = ["lm_head", "*mlp.gate" if name == "modelopt" else "re:.*mlp.gate$"]
    meant = write(
        model.source, model.directory, name, modules=is_quantized,
        config=LAYOUTS[name] | {"ignore": left},
    )  # fmt: skip
    assert error(model.ours(), model.expected(meant)) < TOLERANCE


def test_modelopts_own_file_says_it(text: Quantized) -> None:
    """Beside a config.json that says nothing."""
    directory, meant = text.write("modelopt", config={})
    inner = {key: MODELOPT[key] for key in ("quant_algo", "group_size", "kv_cache_quant_algo")}
    own = {
        "producer": MODELOPT["producer"],
        "quantization": inner | {"exclude_modules": ["lm_head"]},
    }
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    assert error(text.ours(directory), text.expected(meant)) < TOLERANCE


def test_codes_and_scales_take_five_bits_a_weight(text: Quantized) -> None:
    for name, dtype in (("nvfp4", torch.float16), ("mxfp4", torch.float16)):
        directory, _ = text.write(name)
        layer = Harness(directory).model.layers[0].mlp.gate_up_proj  # type: ignore[attr-defined]
        weight = layer.method.weight(layer)
        assert weight.codes.shape == (640, 96) and weight.scale.dtype == dtype
        if name == "nvfp4":
            assert weight.row_scale.shape == (640, 1)
            assert len(weight.row_scale.unique()) == 2  # gate's and up's


def test_dummy_weights(text: Quantized) -> None:
    for name in LAYOUTS:
        directory, _ = text.write(name)
        layer = dummy_layer(directory)
        weight = packed_weight.dequantize(layer.method.weight(layer), torch.float32)
        assert 0.01 < float(weight.std()) < 0.04


def test_each_code_has_its_value() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert packed_weight._e2m1(codes).equal(VALUES)


# Controls.


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "modelopt"])
@pytest.mark.parametrize("fault", ["scales", "order of groups", "halves", "row scales"])
def test_control(text: Quantized, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "row scales" and name == "mxfp4":
        pytest.skip("MXFP4 has none")
    directory, meant = text.write(name)
    expected = text.expected(meant)
    dequantize = packed_weight.dequantize

    def faulty(weight: packed_weight.PackedWeight, dtype: torch.dtype) -> Tensor:
        match fault:
            case "scales":
                mean = torch.full_like(weight.scale, float(weight.scale.float().mean()))
                weight = replace(weight, scale=mean)
            case "order of groups":
                weight = replace(weight, scale=weight.scale.flip(-1))
            case "row scales":
                weight = replace(weight, row_scale=weight.row_scale * 1.5)
            case _:
                weight = replace(weight, codes=weight.codes << 4 | weight.codes >> 4)
        return dequantize(weight, dtype)

    monkeypatch.setattr(packed_weight, "dequantize", faulty)
    assert error(text.ours(directory), expected) > CLEARLY_WRONG


def test_scales_of_activations_are_not_needed(text: Quantized) -> None:
    """Whatever the configuration says of them."""
    text.check("nvfp4-inputs", config=compressed("nvfp4"))


@pytest.mark.parametrize(
    ("name", "change", "config", "message"),
    [
        (
            "nvfp4", changed("mlp.up_proj.weight_global_scale", lambda _: None), None,
            r"missing tensors: .*1\.mlp\.up_proj\.weight_global_scale$",
        ),
        (
            "modelopt", changed("mlp.up_proj.weight_scale_2", lambda _: None), None,
            r"missing tensors: .*1\.mlp\.up_proj\.weight_scale_2$",
        ),
        (
            "modelopt", changed("mlp.up_proj.weight_scale", lambda scale: scale[:, 1:]), None,
            r"up_proj\.weight_scale is \[320, 11\], the model wants \[320, 12\]",
        ),
        (
            "mxfp4", changed("mlp.up_proj.weight_scale", lambda x: x.view(torch.int8)), None,
            r"up_proj\.weight_scale is int8, the model wants uint8",
        ),
        ("nvfp4", lambda _, x: x, compressed("mxfp4"), r"unexpected.*weight_global_scale"),
        ("nvfp4", lambda _, x: x, MODELOPT, r"missing.*weight_scale_2.*unexpected.*weight_packed"),
    ],
    ids=["global", "scale-2", "groups", "dtype", "kind", "producer"],
)  # fmt: skip
def test_files_that_do_not_fit_are_errors(
    text: Quantized, name: str, change: Callable, config: dict | None, message: str
) -> None:
    directory, _ = text.write(name, change=change, config=config)
    with pytest.raises(CheckpointError, match=message):
        Harness(directory)
