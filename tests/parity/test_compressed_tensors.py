"""Checkpoints that the compressed-tensors library writes: our logits are those of Hugging Face's
model with the weights that the library decompresses. Float32, CPU, the tolerance of unquantized
models.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.quantization import read_quantization
from tests.parity.oracle import largest_difference as error
from tests.parity.quantized import SHAPES, Quantized
from tests.parity.test_int8 import weight_only
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.quantized_checkpoints import is_of_layers, write_quantized

# isort: split
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import is_match

pytestmark = pytest.mark.usefixtures("one_thread")

METHOD = "compressed-tensors"
ZERO = torch.tensor([3], dtype=torch.int8)


def scheme(file_format: str, weights: dict, inputs: dict | None = None) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"], format=file_format, weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )  # fmt: skip


def _packed(bits: int, group: int | None, symmetric: bool) -> QuantizationScheme:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group"}
    given = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    return scheme("pack-quantized", given | strategy)


_W4 = {"num_bits": 4, "type": "int", "strategy": "group"}
_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
SCHEMES = {
    "w4a16-64": _packed(4, 64, True),
    "w4a16-32-zeros": _packed(4, 32, False),
    "w4a16-channel-zeros": _packed(4, None, False),
    "w8a16-64": _packed(8, 64, True),
    "nvfp4": scheme("nvfp4-pack-quantized", PRESET_SCHEMES["NVFP4A16"]["weights"].model_dump()),
    "mxfp4": scheme("mxfp4-pack-quantized", PRESET_SCHEMES["MXFP4A16"]["weights"].model_dump()),
    "mxfp8": scheme("mxfp8-quantized", PRESET_SCHEMES["MXFP8A16"]["weights"].model_dump()),
    "mxfp8-inputs": scheme(
        "mxfp8-quantized",
        *(args.model_dump() for args in PRESET_SCHEMES["MXFP8"].values()),
    ),
    "fp8-tensor": scheme(
        "float-quantized", *(args.model_dump() for args in PRESET_SCHEMES["FP8"].values())
    ),
    "fp8-weights": scheme("naive-quantized", PRESET_SCHEMES["FP8"]["weights"].model_dump()),
    "w4a8": scheme("int-quantized", _W4 | {"group_size": 64}, _INPUTS),
    "w4a8-packed": scheme("pack-quantized", _W4 | {"group_size": 32}, _INPUTS),
    "w4a8-zeros": scheme("int-quantized", _W4 | {"group_size": 32, "symmetric": False}, _INPUTS),
    "w8a8-64-zeros": scheme(
        "int-quantized",
        _W4 | {"num_bits": 8, "group_size": 64, "symmetric": False},
        _INPUTS | {"type": "float"},
    ),
    "w8a8-channel-zeros": scheme(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        _INPUTS,
    ),
    "int8-weights": scheme(
        "naive-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}
    ),
    "int8-static": scheme(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        _INPUTS | {"strategy": "tensor", "dynamic": False, "symmetric": False},
    ),
    "int8": scheme(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
}


def write(source: Path, directory: Path, name: str) -> dict[str, Tensor]:
    chosen = SCHEMES[name]
    compressor = BaseCompressor.get_value_from_registry(chosen.format)
    config = QuantizationConfig(
        config_groups={"group_0": chosen}, format=chosen.format, ignore=["lm_head", "re:.*visual.*"]
    ).model_dump(mode="json")

    def quantized(_: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"weight": weight} | scales(weight, chosen.weights)
        made = compressor.compress(given, chosen)
        if chosen.input_activations is not None and not chosen.input_activations.dynamic:
            made |= {"input_scale": torch.tensor([0.02]), "input_zero_point": ZERO.clone()}
        if name == "nvfp4":  # what it decompresses is rounded to bf16
            codes = unpack_fp4_from_uint8(made["weight_packed"], *weight.shape, torch.float32)
            whole = made["weight_global_scale"]
            return dequantize(
                codes, made["weight_scale"].float(), args=chosen.weights, global_scale=whole
            ), made
        return compressor.decompress(made, chosen)["weight"].float(), made

    return write_quantized(
        source, directory, {"quant_method": METHOD} | config, quantized, is_of_layers
    )


def scales(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """Scales and zero points, as the library computes them of the extremes."""
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    if args.strategy == "tensor":
        groups = weight.flatten()
    if args.type == "float":
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.min(), weight.max())
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, whole)
        return {"weight_scale": scale} | ({} if whole is None else {"weight_global_scale": whole})
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return {"weight_scale": scale, "weight_zero_point": zero.round().to(torch.int8)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(SHAPES["partial-blocks"], tmp_path_factory.mktemp("compressed"), write)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_librarys_weights(
    model: Quantized, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, meant = model.write(name)
    expected = model.expected(meant)
    if name in ("int8", "int8-static"):  # the weights alone: test_int8.py has quantized inputs
        weight_only(monkeypatch)
    assert error(model.ours(directory), expected) < TOLERANCE
    differs = error(model.expected(model.original), expected)
    assert differs > (0.02 if name.startswith(("w8", "int8")) else CLEARLY_WRONG)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("w4a8", "8-bit int, dynamic, per token); those of w4a16 weights are not quantized"),
        ("int8-static", "static, per tensor, asymmetric); those of int8 weights are int8 with a"),
        ("fp8-tensor", "8-bit float, static, per tensor); those of fp8_channel weights are e4m3"),
        ("int8", ""),
        ("w4a16-64", ""),
    ],
)
def test_activations_that_are_not_used_are_named_once(
    model: Quantized, name: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = model.write(name)
    model.ours(directory)
    found = [each.message for each in caplog.records if "declares activations" in each.message]
    assert len(found) == bool(warning) and all(warning in message for message in found)


@pytest.mark.parametrize(
    "ignored",
    [
        # A module's own parameters are not quantized, and projections in it are.
        ["model.layers.0.linear_attn", "model.layers.0.linear_attn.norm"],
        ["model.layers.0.linear_attn.out_proj", "lm_head"],
        ["re:.*linear_attn.*"],
        ["model.layers.0"],
    ],
)
def test_ignored_names_are_those_that_the_library_means(ignored: list[str]) -> None:
    chosen = SCHEMES["w4a16-64"]
    config = QuantizationConfig(
        config_groups={"group_0": chosen}, format=chosen.format, ignore=ignored
    ).model_dump(mode="json")
    spec = read_quantization({"quantization_config": {"quant_method": METHOD} | config})
    assert spec is not None
    for name in ("linear_attn.out_proj", "linear_attn.in_proj_qkv", "mlp.up_proj"):
        module = f"model.layers.0.{name}"
        meant = is_match(module, torch.nn.Linear(1, 1), ["Linear"], ignored)
        assert spec.applies_to(module) == meant
