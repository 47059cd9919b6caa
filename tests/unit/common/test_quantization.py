"""`quantization_config` is understood, or refused by name."""

import json
import timeit
from copy import deepcopy
from pathlib import Path

import pytest

from services.common.model_spec import CheckpointSpec, ModelSpecError, UnsupportedOption
from services.common.quantization import read_quantization
from tests import fp4_checkpoints, mxfp8_checkpoints
from tests.fp4_checkpoints import MODELOPT
from tests.fp8_checkpoints import AUTO_FP8, FP8_BLOCK, compressed, weights_alone
from tests.int8_checkpoints import INT8
from tests.packed_checkpoints import LAYOUTS, auto_round, awq, gptq
from tests.packed_checkpoints import compressed as packed

KV_SCHEME = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True
}  # fmt: skip


def test_no_configuration_is_no_quantization() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}) is None


@pytest.mark.parametrize("ignored", ["modules_to_not_convert", "ignored_layers"])
def test_block_wise_fp8_is_read(ignored: str) -> None:
    config = {key: value for key, value in FP8_BLOCK.items() if key != "modules_to_not_convert"}
    spec = read_quantization({"text_config": {"quantization_config": config | {ignored: ["a.b"]}}})
    assert spec is not None and spec.format == "fp8_block"
    assert spec.ignored == {"a.b"} and not spec.targets


@pytest.mark.parametrize("strategy", ["channel", "block", "tensor"])
def test_compressed_tensors_fp8_is_read(strategy: str) -> None:
    spec = read_quantization({"quantization_config": compressed(strategy)})
    assert spec is not None
    assert spec.format == ("fp8_block" if strategy == "block" else "fp8_channel")
    assert spec.one_scale == (strategy == "tensor")
    assert spec.ignored == {"lm_head", r"re:.*visual\..*"}


def test_sparse_weights_may_be_stored_as_they_are() -> None:
    """Of older producers, which measured each model."""
    given = {
        "format": "dense", "global_sparsity": 19.1, "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
    }  # fmt: skip
    found = read_quantization({"compression_config": compressed(sparsity_config=given)})
    assert found == read_quantization({"compression_config": compressed()})


@pytest.mark.parametrize("strategy", ["channel", "block", "tensor"])
@pytest.mark.parametrize("file_format", ["float-quantized", "naive-quantized"])
def test_weights_alone_are_in_the_same_files(strategy: str, file_format: str) -> None:
    spec = read_quantization({"quantization_config": weights_alone(strategy) | {
        "format": file_format}})  # fmt: skip
    both = read_quantization({"quantization_config": compressed(strategy)})
    assert spec is not None and spec == both


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_fp8_without_blocks_has_one_scale_for_a_matrix(scheme: str) -> None:
    spec = read_quantization({"quantization_config": AUTO_FP8 | {"activation_scheme": scheme}})
    assert spec is not None and spec.format == "fp8_channel" and spec.one_scale
    assert spec.ignored == {"lm_head", "model.visual"}


def test_what_modelopt_nests_in_config_json_is_read() -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    nested = {"quant_method": "modelopt", "producer": {}, "quantization": inner}
    flat = MODELOPT | {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]}
    spec = read_quantization({"quantization_config": nested})
    assert spec is not None and spec.fp8_cache
    assert spec == read_quantization({"quantization_config": flat})


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
    # The library names linear attention for its own parameters, beside what it quantizes in it.
    spec = read_quantization({"quantization_config": compressed(ignore=["layers.0.linear_attn"])})
    assert spec is not None
    assert spec.applies_to("layers.0.linear_attn.in_proj_qkv")
    assert not spec.applies_to("layers.0.linear_attn")


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
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .* supported: .*'gptq'"),
        ({"bits": 4}, "None"),
        (FP8_BLOCK | {"weight_block_size": [64, 128]}, r"weight_block_size \(64, 128\)"),
        (AUTO_FP8 | {"activation_scheme": "token"}, "activation_scheme 'token'"),
        (AUTO_FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8_BLOCK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8_BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        (FP8_BLOCK | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (compressed(format="pack-quantized"), r"weights\.type 'float'"),
        (compressed(format="marlin-24"), "format 'marlin-24'"),
        (compressed(config_groups={}), "config_groups is empty"),
        (compressed(kv_cache_scheme=KV_SCHEME | {"num_bits": 4}), "kv_cache_scheme.num_bits 4"),
        (compressed(kv_cache_scheme=KV_SCHEME | {"type": "int"}), "kv_cache_scheme.type 'int'"),
        (compressed(kv_cache_scheme=KV_SCHEME | {"dynamic": True}), "kv_cache_scheme.dynamic True"),
        (compressed(kv_cache_scheme=KV_SCHEME | {"strategy": "channel"}), "strategy 'channel'"),
        (compressed(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        (compressed(ignore=["re:("]), r"ignore 're:\('"),
        (_changed("weights.num_bits", 4), r"weights\.num_bits 4"),
        (_changed("weights.type", "int"), r"weights\.type 'int'"),
        (_changed("weights.strategy", "group"), "strategy 'group'"),
        (_changed("input_activations.strategy", "row"), r"input_activations\.strategy 'row'"),
        (MODELOPT | {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ'"),
        (MODELOPT | {"quant_algo": "FP8_PB_WO", "group_size": 64}, "group_size 64"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is empty"),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION",
                        "quantized_layers": {"a.b": {"quant_algo": "W4A8_AWQ"}}},
            r"quantized_layers\.a\.b\.quant_algo 'W4A8_AWQ'",
        ),
        (_changed("weights.symmetric", False), "symmetric False"),
        (_changed("weights.block_structure", [64, 64], "block"), "block_structure"),
        (_changed("input_activations", {"num_bits": 2}), r"input_activations\.num_bits 2"),
        (_changed("input_activations.type", "complex"), r"input_activations\.type 'complex'"),
        (_changed("input_activations.dynamic", "seldom"), r"input_activations\.dynamic 'seldom'"),
        (_changed("output_activations", {"num_bits": 16}), r"output_activations\.num_bits 16"),
        (_changed("weights", None), "no group with weights"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize("name", fp4_checkpoints.LAYOUTS)
def test_e2m1_is_read(name: str) -> None:
    spec = read_quantization({"quantization_config": fp4_checkpoints.LAYOUTS[name]})
    assert spec is not None and spec.bits == 4
    assert spec.format == ("mxfp4" if name == "mxfp4" else "nvfp4")
    assert spec.group_size == (32 if name == "mxfp4" else 16)
    assert not spec.applies_to("lm_head") and spec.applies_to("model.layers.0.mlp.up_proj")
    assert not spec.applies_to("model.visual.blocks.0.attn.qkv")


@pytest.mark.parametrize(
    "config",
    [
        compressed(kv_cache_scheme=KV_SCHEME),
        compressed(kv_cache_scheme=KV_SCHEME | {"strategy": "attn_head"}),
        MODELOPT | {"kv_cache_quant_algo": "FP8"},
        MODELOPT | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    ],
)
def test_a_cache_in_e4m3_is_read(config: dict) -> None:
    spec = read_quantization({"quantization_config": config})
    assert spec is not None and spec.fp8_cache
    spec = read_quantization({"quantization_config": compressed()})
    assert spec is not None and not spec.fp8_cache


def e2m1_weights(kind: str, **changes: object) -> dict:
    config = fp4_checkpoints.compressed(kind)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MODELOPT | {"group_size": 32}, "group_size 32"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4'"),
        (MODELOPT | {"ignore": "lm_head"}, "ignore is not a list"),
        (e2m1_weights("nvfp4", group_size=32), r"weights\.group_size 32"),
        (e2m1_weights("mxfp4", strategy="tensor_group"), r"weights\.strategy 'tensor_group'"),
        (e2m1_weights("mxfp4", type="int"), r"weights\.type 'int'"),
    ],
)
def test_other_e2m1_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize("name", mxfp8_checkpoints.LAYOUTS)
def test_mxfp8_is_read(name: str) -> None:
    spec = read_quantization({"quantization_config": mxfp8_checkpoints.LAYOUTS[name]})
    assert spec is not None and (spec.format, spec.bits, spec.group_size) == ("mxfp8", 8, 32)
    assert not spec.applies_to("lm_head") and spec.applies_to("model.layers.0.mlp.up_proj")


def mxfp8_part(part: str, **changes: object) -> dict:
    config = mxfp8_checkpoints.compressed(inputs=True)
    config["config_groups"]["group_0"][part] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (mxfp8_part("weights", num_bits=6), r"weights\.num_bits 6"),
        (mxfp8_part("weights", type="int"), r"weights\.type 'int'"),
        (mxfp8_part("weights", symmetric=False), r"weights\.symmetric False"),
        (mxfp8_part("weights", dynamic=True), r"weights\.dynamic True"),
        (mxfp8_part("weights", strategy="channel"), r"weights\.strategy 'channel'"),
        (mxfp8_part("weights", group_size=64), r"weights\.group_size 64"),
        (mxfp8_part("weights", scale_dtype="torch.float32"), r"scale_dtype 'torch\.float32'"),
        (mxfp8_part("input_activations", num_bits=2), r"input_activations\.num_bits 2"),
        (mxfp8_checkpoints.compressed(format="mxfp6-quantized"), "format 'mxfp6-quantized'"),
        (mxfp8_checkpoints.MODELOPT | {"group_size": 64}, "group_size 64"),
    ],
)
def test_other_mxfp8_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


def test_modelopts_own_file_must_agree(tmp_path: Path) -> None:
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*gate"]}
    write(tmp_path, hf_quant_config={"producer": {}, "quantization": inner})
    spec = read_quantization({}, tmp_path)
    assert spec is not None and spec.packing == "modelopt"
    assert not spec.applies_to("a.mlp.gate") and spec.applies_to("a.gate_proj")
    with pytest.raises(UnsupportedOption, match="quant_algo is 'NVFP4' and 'FP8'"):
        read_quantization({"quantization_config": MODELOPT | {"quant_algo": "FP8"}}, tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "found"),
    [
        ("FP8_PB_WO", "fp8_block"),
        ("fp8_pb_wo", "fp8_block"),
        ("FP8_BLOCK_SCALES", "fp8_block"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel"),
        ("MXFP8", "mxfp8"),
    ],
)
def test_modelopts_other_algorithms_are_read(algorithm: str, found: str, tmp_path: Path) -> None:
    """Files may name a size of groups or null; one in lower case says the same."""
    config = MODELOPT | {"quant_algo": algorithm, "group_size": None}
    write(tmp_path, hf_quant_config={"quantization": {"quant_algo": algorithm.upper()}})
    spec = read_quantization({"quantization_config": config}, tmp_path)
    assert spec is not None and spec.format == found


def test_layers_that_are_not_read_may_be_of_any_format() -> None:
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "mtp.layers.0.mlp.experts": {"quant_algo": "W4A8_AWQ"},
    }
    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    names = CheckpointSpec(text_prefix="model.", ignored=(r"mtp\.",))
    spec = read_quantization({"quantization_config": config}, names=names)
    assert spec is not None and spec.format == "nvfp4" and not spec.others
    with pytest.raises(UnsupportedOption, match=r"mtp\.layers\.0.* 'W4A8_AWQ'"):
        read_quantization({"quantization_config": config})


def test_layers_that_are_named_one_by_one_are_looked_up() -> None:
    """As ModelOpt names the 30,000 modules of a large mixture's experts."""

    def seconds(num_experts: int) -> float:
        names = [f"model.layers.0.mlp.experts.{index}.up_proj" for index in range(num_experts)]
        layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
        config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        spec = read_quantization({"quantization_config": config})
        assert spec is not None and spec.of(names[0]) == spec
        return min(timeit.repeat(lambda: {spec.of(names[0])}, number=10, repeat=5))

    assert seconds(30_000) < 3 * seconds(10)


def packed_weights(**changes: object) -> dict:
    config = packed(32)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def test_int8_is_read() -> None:
    spec = read_quantization({"quantization_config": INT8})
    assert spec is not None and spec.format == "int8" and spec.bits == 8


def int8_part(part: str, **changes: object) -> dict:
    config = deepcopy(INT8)
    config["config_groups"]["group_0"][part] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (int8_part("weights", strategy="tensor"), r"weights\.strategy 'tensor'"),
        (int8_part("weights", num_bits=6), r"weights\.num_bits 6"),
        (int8_part("weights", type="float"), r"weights\.type 'float'"),
        (int8_part("weights", actorder="group"), r"weights\.actorder 'group'"),
        (int8_part("input_activations", num_bits=2), r"input_activations\.num_bits 2"),
    ],
)
def test_other_int8_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = TOKENS | {"strategy": "tensor", "dynamic": False}
FP8_STATIC = STATIC | {"type": "float"}
W4 = {"strategy": "group", "group_size": 32, "num_bits": 4}


def with_inputs(config: dict, **parts: object) -> dict:
    """A configuration of compressed-tensors with other parts in its group."""
    config = deepcopy(config)
    config["config_groups"]["group_0"] |= parts
    return config


@pytest.mark.parametrize(
    ("config", "weight_format", "activations"),
    [  # those that layers compute with
        (compressed("channel"), "fp8_channel", ""),
        (compressed("block"), "fp8_block", ""),
        (weights_alone("tensor"), "fp8_channel", ""),
        (AUTO_FP8 | {"activation_scheme": "dynamic"}, "fp8_channel", ""),
        (INT8, "int8", ""),
        (packed(32), "w4a16", ""),
        (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "nvfp4", ""),
        # W8A8, static or asymmetric.
        (with_inputs(INT8, input_activations=STATIC), "int8", "8-bit int, static, per tensor"),
        (
            with_inputs(INT8, input_activations=STATIC | {"symmetric": False}),
            "int8", "8-bit int, static, per tensor, asymmetric",
        ),
        (
            with_inputs(INT8, input_activations=TOKENS | {"symmetric": False}),
            "int8", "8-bit int, dynamic, per token, asymmetric",
        ),
        (with_inputs(INT8, input_activations=None), "w8a16", ""),
        # W4A8.
        (with_inputs(packed(32), input_activations=TOKENS), "w4a16", "int, dynamic, per token"),
        (with_inputs(packed(32), input_activations=FP8_STATIC), "w4a16", "float, static"),
        (with_inputs(packed(0, 8), input_activations=TOKENS), "w8a16", "8-bit int, dynamic"),
        (int8_part("weights", **W4), "w4a16", "8-bit int, dynamic, per token"),
        (int8_part("weights", **W4 | {"num_bits": 8}), "w8a16", "8-bit int, dynamic"),
        (int8_part("weights", symmetric=False), "w8a16", "8-bit int, dynamic"),
        (INT8 | {"format": "naive-quantized"}, "int8", ""),
        # FP8.
        (compressed("tensor"), "fp8_channel", "8-bit float, static, per tensor"),
        (
            with_inputs(compressed("channel"), input_activations=FP8_STATIC),
            "fp8_channel", "8-bit float, static, per tensor",
        ),
        (
            with_inputs(compressed("block"), input_activations=FP8_STATIC),
            "fp8_block", "8-bit float, static, per tensor",
        ),
        (
            with_inputs(compressed("channel"), output_activations=FP8_STATIC),
            "fp8_channel", "output_activations: 8-bit float, static",
        ),
        (AUTO_FP8 | {"activation_scheme": "static"}, "fp8_channel", "8-bit float, static"),
        (FP8_BLOCK | {"activation_scheme": "static"}, "fp8_block", "8-bit float, static"),
        (MODELOPT | {"quant_algo": "FP8"}, "fp8_channel", "8-bit float, static"),
        # Floats in groups.
        (MODELOPT, "nvfp4", "4-bit float, dynamic"),
        (with_inputs(fp4_checkpoints.compressed("nvfp4"), input_activations=FP8_STATIC), "nvfp4",
         "8-bit float, static"),
        (mxfp8_part("input_activations", dynamic=False), "mxfp8", "8-bit float, static"),
        (mxfp8_checkpoints.compressed(inputs=True), "mxfp8", "8-bit float, dynamic, per group"),
    ],
)  # fmt: skip
def test_activations_that_are_not_used_are_described(
    config: dict, weight_format: str, activations: str
) -> None:
    spec = read_quantization({"quantization_config": config})
    assert spec is not None and spec.format == weight_format
    assert activations in spec.activations and bool(activations) == bool(spec.activations)


def test_groups_of_attention_quantize_no_weights() -> None:
    config = compressed()
    group = {"targets": ["Qwen3Attention"], "input_activations": FP8_STATIC, "weights": None}
    spec = read_quantization(
        {"quantization_config": config | {"config_groups": {"a": group} | config["config_groups"]}}
    )
    assert spec is not None and spec == read_quantization({"quantization_config": config})
    assert spec.attention == "input_activations: 8-bit float, static, per tensor"


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_integers_are_read(name: str) -> None:
    layout = LAYOUTS[name]
    spec = read_quantization({"quantization_config": layout.config})
    assert spec is not None and spec.format == f"w{layout.bits}a16" and not spec.others
    assert spec.group_size == layout.group and spec.bits == layout.bits
    assert spec.packing == {"ct": "compressed-tensors"}.get(layout.kind, layout.kind)
    assert spec.symmetric == layout.symmetric
    assert not spec.applies_to("lm_head") and spec.applies_to("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (awq(128, version="gemv"), "version 'gemv'"),
        (awq(128, bits=8), "bits 8"),
        (awq(100), "group_size 100"),
        (gptq(128, bits=3), "bits 3"),
        (gptq(128, desc_act=True), "desc_act True"),
        (gptq(128, sym=False), "sym False"),
        (gptq(128, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (gptq(128, checkpoint_format=None, format="marlin"), "format 'marlin'"),
        (awq(128, version=None, format="gemv_fast"), "format 'gemv_fast'"),
        (awq(128, version=None, checkpoint_format="gemv"), "checkpoint_format 'gemv'"),
        (awq(128, backend="llm-awq"), "backend 'llm-awq'"),
        (gptq(128, pack_dtype="int16"), "pack_dtype 'int16'"),
        (gptq(128, dynamic={"+:.*up_proj": {"desc_act": True}}), "desc_act True"),
        (gptq(128, dynamic={"-:(": {}}), r"dynamic '-:\('"),
        (auto_round(128, sym=False), "sym False"),
        (
            auto_round(128, packing_format="auto_round:auto_awq"),
            "packing_format 'auto_round:auto_awq'",
        ),
        (auto_round(128, act_bits=8), "act_bits 8"),
        (auto_round(128, data_type="mx_fp"), "data_type 'mx_fp'"),
        (auto_round(128, extra_config={"a.b": {"bits": 3}}), "bits 3"),
        (auto_round(128, extra_config={"(a": {"bits": 16}}), "extra_config"),
        (packed(96 * 8 + 1), "group_size 769"),
        (packed(32, bits=2), r"weights\.num_bits 2"),
        (packed_weights(actorder="group"), r"weights\.actorder 'group'"),
        (packed_weights(strategy="tensor"), r"weights\.strategy 'tensor'"),
        (packed_weights(type="float"), r"weights\.type 'float'"),
    ],
)
def test_other_packed_integers_are_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("names", "packing"),
    [
        ({"format": "gptq_v2"}, "gptq_v2"),
        ({"format": "GPTQ_V2"}, "gptq_v2"),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"format": "gptq"}, "gptq"),
        ({}, "gptq"),
    ],
)
def test_either_name_of_a_packing_is_read(names: dict, packing: str) -> None:
    """GPTQModel writes the newer name; transformers writes both and reads the older one first."""
    config = gptq(128, checkpoint_format=None) | names
    spec = read_quantization({"quantization_config": config})
    assert spec is not None and spec.packing == packing


def test_gptq_rules_are_read_in_order() -> None:
    rules = {"-:.*a": {}, "+:.*ab": {"bits": 8}, "-:.*b": {}, ".*c": {"group_size": -1}}
    spec = read_quantization({"quantization_config": gptq(64, dynamic=rules)})
    assert spec is not None
    found = {name: spec.of(name) for name in ("xa", "xab", "xb", "x.c", "d", "lm_head")}
    assert [name for name, group in found.items() if group is None] == [
        "xa",
        "xab",
        "xb",
        "lm_head",
    ]
    assert found["x.c"] is not None and found["x.c"].group_size == 0
    assert found["d"] is not None and (found["d"].format, found["d"].group_size) == ("w4a16", 64)
    rules = {"+:.*ab": {"bits": 8}, "-:.*a": {}}
    spec = read_quantization({"quantization_config": gptq(64, dynamic=rules)})
    assert spec is not None and spec.bits == 8
    assert (group := spec.of("xab")) is not None and group.format == "w8a16"
    assert spec.of("xa") is None


def test_auto_rounds_options_of_modules_are_read() -> None:
    extra = {
        "x.norm": {"bits": 16, "data_type": "float"}, r"layers\.\d+\.gate": {"bits": 16},
        "x.up": {"bits": 8, "group_size": None}, "x.same": {"bits": 4},
    }  # fmt: skip
    spec = read_quantization({"quantization_config": auto_round(64, extra_config=extra)})
    assert spec is not None and spec.bits == 8
    left = [name for name in ("x.norm", "layers.3.gate", "lm_head") if spec.of(name) is None]
    assert len(left) == 3
    found = {name: spec.of(name) for name in ("x.up", "x.same", "x.norm.a", "x.other")}
    formats = {name: group and (group.format, group.group_size) for name, group in found.items()}
    assert formats.pop("x.up") == ("w8a16", 64) and set(formats.values()) == {("w4a16", 64)}
    extra = {"lm_head": {"bits": 8}}
    spec = read_quantization({"quantization_config": auto_round(64, extra_config=extra)})
    assert spec is not None and (head := spec.of("lm_head")) and head.format == "w8a16"


# Files of their own.


def write(directory: Path, **files: dict) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    older = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True, "damp_percent": 0.01}
    spec = read_quantization({}, write(tmp_path, quantize_config=older))
    assert spec is not None and (spec.packing, spec.group_size) == ("gptq", 64)
    older = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quantize_config.json").unlink()
    spec = read_quantization({}, write(tmp_path, quant_config=older))
    assert spec is not None and (spec.packing, spec.group_size) == ("awq", 128)


def test_files_that_agree_complete_each_other(tmp_path: Path) -> None:
    """What one leaves out, or says with null, the other may say."""
    config = {"quantization_config": awq(128)}
    older = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    spec = read_quantization(config, write(tmp_path, quant_config=older))
    assert spec == read_quantization(config)
    own = gptq(64, dynamic={"-:.*gate$": {}})
    write(tmp_path, quantize_config=own)
    (tmp_path / "quant_config.json").unlink()
    spec = read_quantization({"quantization_config": gptq(64, dynamic=None)}, tmp_path)
    assert spec is not None and spec.of("a.gate") is None and spec.of("a.b") is not None


@pytest.mark.parametrize(
    ("own", "config", "named"),
    [
        (gptq(64), gptq(128), "group_size is 64 and 128"),
        (gptq(64), awq(64), "quant_method is 'gptq' and 'awq'"),
        (gptq(64, v2=True), gptq(64), "checkpoint_format is 'gptq_v2' and 'gptq'"),
        (gptq(64, sym=False), gptq(64), "sym is False and True"),
    ],
)
def test_contradictions_are_errors_that_name_both(
    own: dict, config: dict, named: str, tmp_path: Path
) -> None:
    write(tmp_path, quantize_config=own)
    message = f"quantize_config.json and config.json contradict each other: {named}"
    with pytest.raises(UnsupportedOption, match=message) as raised:
        read_quantization({"quantization_config": config}, tmp_path)
    assert raised.value.file == "quantize_config.json"


def test_a_refusal_names_the_file_that_counts(tmp_path: Path) -> None:
    write(tmp_path, quantize_config=gptq(64, bits=3))
    with pytest.raises(UnsupportedOption, match="bits 3") as raised:
        read_quantization({}, tmp_path)
    assert raised.value.file == "quantize_config.json"


def test_groups_of_different_schemes_are_refused() -> None:
    config = compressed()
    config["config_groups"] = {**config["config_groups"], **{
        "group_1": compressed("block")["config_groups"]["group_0"]
    }}  # fmt: skip
    with pytest.raises(ModelSpecError, match="different schemes"):
        read_quantization({"quantization_config": config})
