"""Reads the quantization of a checkpoint's weights from its configuration.

The configuration is in config.json, or in a file of its own, as older producers write it. Such a
file has precedence, and options that both files have must be equal. Families call
`read_quantization`, and `services.common.nn.weights` turns the result into methods of linear
layers. A format that is not implemented raises an `UnsupportedOption` with its name. This file
imports no torch.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from services.common.model_spec import (
    CheckpointSpec,
    ModelSpec,
    Packing,
    QuantizationSpec,
    UnsupportedOption,
    WeightFormat,
    expect,
    read_json,
)

_BLOCK = (128, 128)
# Activations that layers compute with, as options of compressed-tensors. Layers of other formats do
# not quantize activations.
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_FP8_TOKENS = _TOKENS | {"type": "float"}
_FP8_GROUPS = _FP8_TOKENS | {"strategy": "group", "group_size": _BLOCK[1]}
_INT8_TOKENS = _TOKENS | {"type": "int"}
_DEFAULTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
_STRATEGIES = ("tensor", "channel", "token", "group", "tensor_group", "block", "attn_head")
_STATIC_FP8 = "8-bit float, static, per tensor"
# Separate files, in order of precedence → the producer's method, which older files leave out.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size", "exclude_modules": "ignore"}
_BLOCKS = QuantizationSpec(format="fp8_block")
_CHANNELS = QuantizationSpec(format="fp8_channel")
_WHOLE = QuantizationSpec(format="fp8_channel", one_scale=True)
_E2M1 = QuantizationSpec(format="nvfp4", packing="modelopt", group_size=16)
_E4M3 = QuantizationSpec(format="mxfp8", packing="modelopt", group_size=32)
_MODELOPT = {  # algorithm → spec
    "FP8": replace(_WHOLE, activations=_STATIC_FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": _CHANNELS,
    "FP8_PB_WO": _BLOCKS,
    "FP8_BLOCK_SCALES": _BLOCKS,  # TensorRT-LLM's name
    "MXFP8": replace(_E4M3, activations="8-bit float, dynamic, per group"),
    "NVFP4": replace(_E2M1, activations="4-bit float, dynamic, per group"),
    "W4A16_NVFP4": _E2M1,
}
_AUTO_GPTQ = "auto_round:auto_gptq"
AT_LOAD = ("fp8",)
# Modules with few but important weights: the head, routers, and gates of linear attention.
_LEFT_AT_LOAD = frozenset(("lm_head", "mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b"))
_PACKINGS = ("version", "checkpoint_format", "format")  # options that name a packing
# Options by which weights are read. Their values in two files must be equal.
_DECISIVE = (
    *_PACKINGS,
    *("quant_method", "bits", "group_size", "desc_act", "sym", "zero_point", "dynamic", "lm_head"),
    *("modules_to_not_convert", "quant_algo", "kv_cache_quant_algo"),
)


def read_quantization(
    config: Mapping[str, Any],
    directory: Path | None = None,
    names: CheckpointSpec | None = None,
) -> QuantizationSpec | None:
    """Returns the quantization of a checkpoint, or None if its weights are not quantized.

    Args:
        config: content of config.json.
        directory: directory of the checkpoint, which may have a separate file. None to read config
            alone.
        names: names of the tensors. Options of modules that are not read are ignored.

    Raises:
        UnsupportedOption: a format or a variant is not supported, or two files contradict each
            other.
    """
    found = dict(_sources(config, directory))
    if not found:
        return None
    first, *others = found
    for other in others:
        for key in _DECISIVE:
            mine, its = (found[name].get(key) for name in (first, other))
            if mine is not None and its is not None and mine != its:
                raise UnsupportedOption(
                    f"{first} and {other} contradict each other: {key} is {mine!r} and {its!r}; "
                    "remove the one that is wrong",
                    first,
                )
    stated: dict[str, Any] = {}
    for source in reversed(found.values()):
        stated |= {key: value for key, value in source.items() if value is not None}
    try:
        return replace(_read(stated, names), fp8_cache=_has_fp8_cache(stated))
    except UnsupportedOption as error:
        raise UnsupportedOption(f"quantization_config: {error}", first) from None


def fp8_at_load() -> QuantizationSpec:
    """Returns the quantization into e4m3 with a scale per output channel, while files are read."""
    return QuantizationSpec(format="fp8_channel", at_load=True, ignored=_LEFT_AT_LOAD)


def quantized_at_load(spec: ModelSpec, method: str) -> ModelSpec:
    """Returns the spec of a model whose weights are quantized while they are read.

    Args:
        method: a method of `AT_LOAD`, or an empty string, which returns the spec unchanged.

    Raises:
        UnsupportedOption: the method is unknown, or the files are quantized in another format.
    """
    if not method:
        return spec
    expect("--quantization", method, *AT_LOAD)
    stored = spec.checkpoint.quantization
    if stored is None:
        stored = fp8_at_load()
    elif other := sorted({x.format for x in stored.groups if not x.format.startswith("fp8")}):
        raise UnsupportedOption(
            f"--quantization {method} and quantization_config contradict each other: the files "
            f"hold {', '.join(other)}; leave --quantization out"
        )
    return replace(spec, checkpoint=replace(spec.checkpoint, quantization=stored))


def _sources(
    config: Mapping[str, Any], directory: Path | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields name and options of each file with quantization options, in order of precedence."""
    for name, method in _FILES.items():
        if directory is not None and (directory / name).is_file():
            raw = _unfolded(read_json(directory / name))
            renamed = {_OTHER_NAMES.get(key, key): value for key, value in raw.items()}
            yield name, _normalised({"quant_method": method} | renamed)
    text: Mapping[str, Any] = config.get("text_config") or {}
    for place in (config, text):
        found = place.get("quantization_config") or place.get("compression_config")
        if found:
            yield "config.json", _normalised(_unfolded(found))
            return


def _unfolded(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves the options that ModelOpt writes below `quantization` to the top level."""
    inner: object = config.get("quantization")
    if not isinstance(inner, dict):
        return config
    inner = cast("dict[str, Any]", inner)
    ignored = {"ignore": inner["exclude_modules"]} if "exclude_modules" in inner else {}
    return {**config, **inner, **ignored}


def _normalised(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts names of packings to lower case and names of algorithms to upper case."""
    named = {key: config[key] for key in _PACKINGS if isinstance(config.get(key), str)}
    made = {key: name.lower() for key, name in named.items()}
    if isinstance(algorithm := config.get("quant_algo"), str):
        made["quant_algo"] = algorithm.upper()
    return {**config, **made}


def _read(config: Mapping[str, Any], names: CheckpointSpec | None) -> QuantizationSpec:
    method = config.get("quant_method")
    expect("quant_method", method, *_METHODS, "modelopt")
    if method == "modelopt":
        return _modelopt(config, names)
    return _METHODS[cast("str", method)](config)


def _in_groups(groups: Iterable[QuantizationSpec]) -> QuantizationSpec:
    """Joins the specs of groups. Specs of all modules come last, because the first spec that
    applies to a module is used.
    """
    first, *others = sorted(groups, key=lambda group: not group.targets)
    return replace(first, others=tuple(others))


def _grouped(
    where: str, found: Iterable[tuple[QuantizationSpec, str]], ignored: frozenset[str]
) -> list[QuantizationSpec]:
    """Groups the modules with equal specs.

    Args:
        where: name of the option with the modules' names, for messages.
        found: specs with the name or pattern of their modules. An empty name stands for all modules
            that are left.
        ignored: modules that are not quantized.
    """
    targets: dict[QuantizationSpec, list[str]] = {}
    for spec, name in found:
        targets.setdefault(spec, []).append(name)
    return [
        replace(spec, ignored=ignored, targets=_names(where, [] if "" in names else names))
        for spec, names in targets.items()
    ]


def _modelopt(config: Mapping[str, Any], names: CheckpointSpec | None) -> QuantizationSpec:
    """Reads the FP8 and NVFP4 configurations of NVIDIA's ModelOpt."""
    ignored = _names("ignore", config.get("ignore") or ())
    ignored = frozenset("re:" + fnmatch.translate(x) if "*" in x else x for x in ignored)
    if config.get("quant_algo") != "MIXED_PRECISION":
        return replace(_modelopt_scheme("", config), ignored=ignored)
    layers = cast("Mapping[str, Mapping[str, Any]]", config.get("quantized_layers") or {})
    found = [
        (_modelopt_scheme(f"quantized_layers.{name}.", options), name)
        for name, options in layers.items()
        if names is None or not names.ignores(f"{name}.weight")
    ]
    if not found:
        raise UnsupportedOption("quantized_layers is empty")
    return _in_groups(_grouped("quantized_layers", found, ignored))


def _modelopt_scheme(where: str, options: Mapping[str, Any]) -> QuantizationSpec:
    algorithm = str(_normalised(options).get("quant_algo"))
    expect(f"{where}quant_algo", algorithm, *_MODELOPT)
    spec = _MODELOPT[algorithm]
    if size := spec.group_size or (spec == _BLOCKS and _BLOCK[1]):
        expect(f"{where}group_size", options.get("group_size") or size, size)
    return spec


def _awq(config: Mapping[str, Any]) -> QuantizationSpec:
    """Reads the configuration of AutoAWQ, whose weights of 4 bits are packed for `gemm` kernels."""
    _expect_packing(config, ("version", "format", "checkpoint_format"), "gemm")
    if config.get("backend") == "llm-awq":  # transformers reads another packing then
        raise UnsupportedOption("backend 'llm-awq' is not supported")
    expect("bits", config.get("bits"), 4)
    return QuantizationSpec(
        format="w4a16",
        packing="awq",
        group_size=_group_size(config.get("group_size")),
        symmetric=False,  # the files always have zero points
        ignored=_names("modules_to_not_convert", config.get("modules_to_not_convert") or ()),
    )


def _gptq(config: Mapping[str, Any]) -> QuantizationSpec:
    """Reads the configuration of AutoGPTQ and GPTQModel. `dynamic` has rules for modules by
    pattern, the first of which applies: a rule with `-:` leaves the modules unquantized, and other
    rules change options.
    """
    left: frozenset[str] = frozenset(() if config.get("lm_head") else ("lm_head",))
    groups: list[QuantizationSpec] = []
    rules = cast("Mapping[str, Mapping[str, Any]]", config.get("dynamic") or {})
    for rule, changes in rules.items():
        pattern = "re:" + rule.removeprefix("-:").removeprefix("+:")
        targets = _names(f"dynamic {rule!r}", [pattern])
        if rule.startswith("-:"):
            left |= targets
        else:
            options = {**config, **changes}
            groups.append(replace(_gptq_options(options), targets=targets, ignored=left))
    return _in_groups([*groups, replace(_gptq_options(config), ignored=left)])


def _auto_round(config: Mapping[str, Any]) -> QuantizationSpec:
    """Reads the configuration of Intel's AutoRound, whose files are those of GPTQ without `g_idx`.
    `extra_config` has options of modules, by name or pattern. Modules of 16 bits are not quantized.
    """
    expect("packing_format", config.get("packing_format") or _AUTO_GPTQ, _AUTO_GPTQ)
    expect("act_bits", config.get("act_bits") or 16, 16, 32)
    modules: dict[str, Mapping[str, Any]] = {**(config.get("extra_config") or {}), "": {}}
    left = [] if "lm_head" in modules else ["lm_head"]
    found: list[tuple[QuantizationSpec, str]] = []
    for name, changes in modules.items():  # the last entry stands for all other modules
        options = {**config, **{key: x for key, x in changes.items() if x is not None}}
        pattern = name if re.fullmatch(r"[\w.]*", name) else f"re:.*(?:{name})"
        if options.get("bits") in (16, 32):
            left.append(pattern)
            continue
        expect(f"{name} data_type".lstrip(), options.get("data_type", "int"), "int")
        scheme = replace(_gptq_options(options), packing="auto-round", has_whole_names=True)
        found.append((scheme, pattern))
    return _in_groups(_grouped("extra_config", found, _names("extra_config", left)))


def _gptq_options(config: Mapping[str, Any]) -> QuantizationSpec:
    packing = _expect_packing(config, ("checkpoint_format", "format"), "gptq", "gptq_v2")
    expect("bits", config.get("bits"), 4, 8)
    expect("desc_act", config.get("desc_act", False), False)
    expect("sym", config.get("sym", True), True)
    expect("pack_dtype", config.get("pack_dtype", "int32"), "int32")
    expect("is_marlin_format", config.get("is_marlin_format", False), False)
    return QuantizationSpec(
        format="w4a16" if config.get("bits") == 4 else "w8a16",
        packing=cast("Packing", packing),
        group_size=_group_size(config.get("group_size")),
    )


def _expect_packing(config: Mapping[str, Any], names: tuple[str, ...], *served: str) -> str:
    """Returns the packing of the files, which is the first of `served` if no option has it.

    Args:
        names: names of the option. The older names come first, as in transformers.
        served: packings that are supported.
    """
    name = next((name for name in names if config.get(name) is not None), "")
    packing = config.get(name, served[0])
    expect(name, packing, *served)
    return packing


def _group_size(value: object) -> int:
    """Returns the group size, or 0 for -1, which means a scale per output channel."""
    if isinstance(value, int) and (value == -1 or (value > 0 and value % 8 == 0)):
        return max(value, 0)
    raise UnsupportedOption(
        f"group_size {value!r} is not supported; supported: -1, or a multiple of 8"
    )


def _fp8(config: Mapping[str, Any]) -> QuantizationSpec:
    """Reads the configuration of block-wise FP8, as Qwen and DeepSeek publish it. Without blocks it
    is AutoFP8's, with one scale per matrix.
    """
    scheme, blocks = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    expect("activation_scheme", scheme, "dynamic", "static")
    expect("weight_block_size", _pair(blocks), _BLOCK, None)
    expect("fmt", config.get("fmt", "e4m3"), "e4m3")
    expect("scale_fmt", config.get("scale_fmt") or "float", "float")
    ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    names = _names("modules_to_not_convert", ignored)
    declared = _STATIC_FP8 if scheme == "static" else ""
    return replace(_BLOCKS if blocks else _WHOLE, ignored=names, activations=declared)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationSpec:
    """Reads the configuration of compressed-tensors: groups of modules, each with its format."""
    groups = cast("Mapping[str, Mapping[str, Any]]", config.get("config_groups") or {})
    if not groups:
        raise UnsupportedOption("config_groups is empty")
    sparsity: Mapping[str, Any] = config.get("sparsity_config") or {}
    expect("sparsity_config.format", sparsity.get("format", "dense"), "dense")
    if config.get("transform_config"):
        raise UnsupportedOption("transform_config is not supported")
    schemes: list[tuple[QuantizationSpec, str]] = []
    attention = ""
    for name, group in groups.items():
        if not group.get("weights"):  # a group of attention layers, whose queries are quantized
            attention = attention or _declared_by(f"config_groups.{name}", group)
            continue
        given = _names(f"config_groups.{name}.targets", group.get("targets") or ("Linear",))
        scheme = replace(_scheme(name, group, config.get("format")), has_whole_names=True)
        schemes += [(scheme, "" if target == "Linear" else target) for target in given]
    if not schemes:
        raise UnsupportedOption("config_groups has no group with weights")
    found = _grouped("targets", schemes, _names("ignore", config.get("ignore") or ()))
    if sum(not group.targets for group in found) > 1:
        raise UnsupportedOption(
            "groups of different schemes for all linear layers are not supported"
        )
    return replace(_in_groups(found), attention=attention)


def _has_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Returns whether the files ask for keys and values in e4m3."""
    scheme, algorithm = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    if scheme:
        _numbers("kv_cache_scheme", scheme, "float", 8)
        strategy = scheme.get("strategy", "tensor")
        expect("kv_cache_scheme.strategy", strategy, "tensor", "attn_head")
    if algorithm:
        expect("kv_cache_quant_algo", algorithm, "FP8")
    return bool(scheme or algorithm)


def _scheme(name: str, group: Mapping[str, Any], outer_format: object) -> QuantizationSpec:
    where = f"config_groups.{name}"
    found = group.get("format") or outer_format
    expect(f"{where}.format", found, *_CT_FORMATS)
    spec, computed = _CT_FORMATS[cast("str", found)](f"{where}.weights", group)
    return replace(spec, activations=_declared_by(where, group, computed))


# Formats of compressed-tensors. Each function reads the weights of a group, and returns their spec
# and the activations that its layers compute with.
_Group = Mapping[str, Any]
_Computed = Mapping[str, object]


def _ct_float(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Reads FP8 per output channel, per matrix, or per 128 x 128 block. The files are the same if
    only weights have 8 bits.
    """
    weights = group["weights"]
    _numbers(where, weights, "float", 8)
    strategy = weights.get("strategy")
    expect(f"{where}.strategy", strategy, "channel", "tensor", "block")
    if strategy != "block":
        return (_WHOLE if strategy == "tensor" else _CHANNELS), _FP8_TOKENS
    expect(f"{where}.block_structure", _pair(weights.get("block_structure")), _BLOCK)
    return _BLOCKS, _FP8_GROUPS


def _ct_naive(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Reads floats or integers that are not packed: each element of the weight is a value."""
    return (_ct_int if group["weights"].get("type") == "int" else _ct_float)(where, group)


def _ct_int(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Reads integers of 4 or 8 bits in bytes. Weights of 8 bits with a scale per output channel are
    multiplied with int8 activations, if the files declare activations. All other weights are packed
    when they are loaded.
    """
    spec, _ = _ct_packed(where, group)
    is_int8 = spec.format == "w8a16" and not spec.group_size and spec.symmetric
    if is_int8 and group.get("input_activations"):
        return QuantizationSpec(format="int8"), _INT8_TOKENS
    return replace(spec, packing="int-quantized"), {}


def _ct_float_groups(
    name: WeightFormat, where: str, group: _Group
) -> tuple[QuantizationSpec, _Computed]:
    """Reads e2m1 or e4m3 values in groups. Activations are not quantized, because the weights need
    most of the memory.
    """
    weights = group["weights"]
    strategy, size = ("tensor_group", 16) if name == "nvfp4" else ("group", 32)
    _numbers(where, weights, "float", 8 if name == "mxfp8" else 4)
    expect(f"{where}.strategy", weights.get("strategy"), strategy)
    expect(f"{where}.group_size", weights.get("group_size"), size)
    if name == "mxfp8":
        expect(f"{where}.scale_dtype", weights.get("scale_dtype"), None, "torch.uint8")
    return QuantizationSpec(format=name, group_size=size), {}


def _ct_packed(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Reads integers of 4 or 8 bits, packed into words. Activations are not quantized."""
    weights = group["weights"]
    symmetric = bool(weights.get("symmetric", True))
    _numbers(where, {**weights, "symmetric": True}, "int", 4, 8)
    expect(f"{where}.actorder", weights.get("actorder"), None, "weight", "static")
    strategy = weights.get("strategy")
    expect(f"{where}.strategy", strategy, "channel", "group")
    spec = QuantizationSpec(
        format="w4a16" if weights["num_bits"] == 4 else "w8a16",
        group_size=0 if strategy == "channel" else _group_size(weights.get("group_size")),
        symmetric=symmetric,
    )
    return spec, {}


def _declared_by(where: str, group: Mapping[str, Any], computed: Mapping[str, object] = {}) -> str:
    """Describes the activations that a group of compressed-tensors declares.

    Args:
        computed: activations that the layers compute with. Empty if these are not quantized.

    Returns:
        The description. Empty if the layers compute with these activations.

    Raises:
        UnsupportedOption: the group declares values that no producer writes.
    """
    found: list[str] = []
    for name in ("input_activations", "output_activations"):
        given = cast("Mapping[str, Any]", group.get(name) or {})
        values = _DEFAULTS | {key: value for key, value in given.items() if value is not None}
        is_ours = computed and all(values.get(key) == computed[key] for key in computed)
        if not given or (is_ours and name == "input_activations"):
            continue
        place = f"{where}.{name}"
        expect(f"{place}.num_bits", values["num_bits"], 4, 8)
        expect(f"{place}.type", values["type"], "int", "float")
        expect(f"{place}.strategy", values["strategy"], *_STRATEGIES)
        expect(f"{place}.dynamic", values["dynamic"], False, True, "local")
        found.append(
            f"{name}: {values['num_bits']}-bit {values['type']}, "
            f"{'dynamic' if values['dynamic'] else 'static'}, per {values['strategy']}"
            + ("" if values["symmetric"] else ", asymmetric")
        )
    return "; ".join(found)


def _numbers(where: str, values: Mapping[str, Any], kind: str, *bits: int) -> None:
    """Checks the number type to which weights, or keys and values, are quantized."""
    expect(f"{where}.num_bits", values.get("num_bits", False), *bits)
    expect(f"{where}.type", values.get("type", False), kind)
    expect(f"{where}.dynamic", values.get("dynamic", False), False)
    expect(f"{where}.symmetric", values.get("symmetric", True), True)


def _pair(value: object) -> object:
    """Returns a pair as a tuple. JSON has lists, and older files have strings such as "128x128"."""
    if isinstance(value, str):
        return tuple(int(part) for part in value.split("x") if part.isdigit())
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _names(name: str, value: object) -> frozenset[str]:
    values = cast("list[object]", value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise UnsupportedOption(f"{name} is not a list of names")
    names = frozenset(cast("list[str]", value))
    for one in names:
        try:
            re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
        except re.error as error:
            raise UnsupportedOption(f"{name} {one!r}: {error}") from None
    return names


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
}
_CT_FORMATS = {  # formats of compressed-tensors
    "float-quantized": _ct_float,
    "naive-quantized": _ct_naive,  # the same files
    "pack-quantized": _ct_packed,
    "int-quantized": _ct_int,
    "nvfp4-pack-quantized": partial(_ct_float_groups, "nvfp4"),
    "mxfp4-pack-quantized": partial(_ct_float_groups, "mxfp4"),
    "mxfp8-quantized": partial(_ct_float_groups, "mxfp8"),
}
