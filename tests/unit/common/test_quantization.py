"""`quantization_config` is understood, or refused by name."""

from copy import deepcopy

import pytest

from services.common.model_spec import ModelSpecError
from services.common.quantization import read_quantization
from tests.fp8_checkpoints import FP8_BLOCK, compressed


def test_no_configuration_is_no_quantization() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}) is None


@pytest.mark.parametrize("ignored", ["modules_to_not_convert", "ignored_layers"])
def test_block_wise_fp8_is_read(ignored: str) -> None:
    config = {key: value for key, value in FP8_BLOCK.items() if key != "modules_to_not_convert"}
    spec = read_quantization({"text_config": {"quantization_config": config | {ignored: ["a.b"]}}})
    assert spec is not None and spec.format == "fp8_block"
    assert spec.scale_name == "weight_scale_inv" and spec.block_size == (128, 128)
    assert spec.ignored == ("a.b",) and spec.targets == ()


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_compressed_tensors_fp8_is_read(strategy: str) -> None:
    spec = read_quantization({"quantization_config": compressed(strategy)})
    assert spec is not None and spec.format == f"fp8_{strategy}"
    assert spec.scale_name == "weight_scale" and spec.ignored == ("lm_head", r"re:.*visual\..*")


def test_a_groups_own_format_counts() -> None:
    config = compressed(format="mixed-precision")
    with pytest.raises(ModelSpecError, match=r"group_0\.format 'mixed-precision'"):
        read_quantization({"quantization_config": config})
    config["config_groups"] = deepcopy(config["config_groups"])
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    assert read_quantization({"quantization_config": config}) is not None


def test_names_and_patterns_say_what_is_quantized() -> None:
    config = FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "model.visual", "mlp.gate"]}
    spec = read_quantization({"quantization_config": config})
    assert spec is not None
    assert not spec.applies_to("lm_head")
    assert not spec.applies_to("model.visual.blocks.0.attn.qkv")
    assert not spec.applies_to("model.layers.3.mlp.gate")
    assert spec.applies_to("model.layers.3.mlp.gate_proj")
    assert spec.applies_to("model.visual_projection")
    spec = read_quantization({"quantization_config": compressed(ignore=["re:.*q_proj", "a.b"])})
    assert spec is not None
    assert not spec.applies_to("x.q_proj") and spec.applies_to("x.k_proj")
    assert not spec.applies_to("a.b") and spec.applies_to("a.bc")


def test_targets_other_than_linear_are_patterns() -> None:
    config = compressed()
    config["config_groups"] = deepcopy(config["config_groups"])
    config["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\..*", "model.layers.0.o_proj"]
    spec = read_quantization({"quantization_config": config})
    assert spec is not None
    assert spec.applies_to("model.layers.1.mlp.up_proj")
    assert spec.applies_to("model.layers.0.o_proj")
    assert not spec.applies_to("model.layers.1.o_proj")


def _changed(path: str, value: object, strategy: str = "channel") -> dict:
    config: dict = deepcopy(compressed(strategy))
    place, *parents = path.split(".")[::-1]
    inner = config["config_groups"]["group_0"]
    for parent in reversed(parents):
        inner = inner[parent]
    inner[place] = value
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"bits": 4}, "None"),
        (FP8_BLOCK | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8_BLOCK | {"weight_block_size": [64, 128]}, r"weight_block_size \(64, 128\)"),
        (FP8_BLOCK | {"weight_block_size": None}, "weight_block_size None"),
        (FP8_BLOCK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8_BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        (FP8_BLOCK | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (compressed(format="pack-quantized"), "'pack-quantized'"),
        (compressed(format="int-quantized"), "'int-quantized'"),
        (compressed(config_groups={}), "config_groups is empty"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        (compressed(ignore=["re:("]), r"ignore 're:\('"),
        (_changed("weights.num_bits", 4), r"weights\.num_bits 4"),
        (_changed("weights.type", "int"), r"weights\.type 'int'"),
        (_changed("weights.strategy", "tensor"), "strategy 'tensor'"),
        (_changed("weights.symmetric", False), "symmetric False"),
        (_changed("weights.block_structure", [64, 64], "block"), "block_structure"),
        (_changed("input_activations", None), r"input_activations\.num_bits"),
        (_changed("input_activations.dynamic", False), r"input_activations\.dynamic False"),
        (_changed("input_activations.strategy", "tensor"), r"input_activations\.strategy 'tensor'"),
        (_changed("output_activations", {"num_bits": 8}), "output_activations"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


def test_groups_of_different_schemes_are_refused() -> None:
    config = compressed()
    config["config_groups"] = {**config["config_groups"], **{
        "group_1": compressed("block")["config_groups"]["group_0"]
    }}  # fmt: skip
    with pytest.raises(ModelSpecError, match="different schemes"):
        read_quantization({"quantization_config": config})
