"""What a checkpoint's configuration says of the quantization of its weights. No torch.

It stands in config.json or in a file of its own, as older producers write it; such a file comes
first, and what both say must be equal. Families call `read_quantization`;
`services.common.nn.weights` turns the result into methods of linear layers. A format that is not
implemented is an `UnsupportedOption` that names it.
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
# Activations that layers compute with, in the words of compressed-tensors. Layers of other formats
# leave activations as they are.
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
# Files of their own, in order of precedence → the producer's method, which older ones leave out.
_FILES = {
    "quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt",
}  # fmt: skip
_OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size", "exclude_modules": "ignore"}
_BLOCKS = QuantizationSpec(format="fp8_block")
_CHANNELS = QuantizationSpec(format="fp8_channel")
_WHOLE = QuantizationSpec(format="fp8_channel", one_scale=True)
_E2M1 = QuantizationSpec(format="nvfp4", packing="modelopt", group_size=16)
_E4M3 = QuantizationSpec(format="mxfp8", packing="modelopt", group_size=32)
_MODELOPT = {  # algorithm → what it is here
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
# Few weights, on which much depends: the head, routers, and gates of linear attention.
_LEFT_AT_LOAD = frozenset(("lm_head", "mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b"))
_PACKINGS = ("version", "checkpoint_format", "format")  # options that name one
# Decide how weights are read: what two files say of them must be equal.
_DECISIVE = (
    *_PACKINGS, "quant_method", "bits", "group_size", "desc_act", "sym", "zero_point", "dynamic",
    "lm_head", "modules_to_not_convert", "quant_algo", "kv_cache_quant_algo",
)  # fmt: skip


def read_quantization(
    config: Mapping[str, Any],
    directory: Path | None = None,
    names: CheckpointSpec | None = None,
) -> QuantizationSpec | None:
    """The quantization of a checkpoint; None: there is none.

    Args:
        directory: of the checkpoint, for files of their own.
        names: of its tensors: what is said of modules that are not read does not count.

    Raises:
        UnsupportedOption: a format or a variant that is not supported, by name; or two files that
            contradict each other.
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


def quantized_at_load(spec: ModelSpec, method: str) -> ModelSpec:
    """The spec of a model whose weights are quantized while they are read, as `method` says.

    Args:
        method: of `AT_LOAD`; "": none.

    Raises:
        UnsupportedOption: another method; or the files are quantized otherwise.
    """
    if not method:
        return spec
    expect("--quantization", method, *AT_LOAD)
    stored = spec.checkpoint.quantization
    if stored is None:
        stored = QuantizationSpec(format="fp8_channel", at_load=True, ignored=_LEFT_AT_LOAD)
    elif other := sorted({x.format for x in stored.groups if not x.format.startswith("fp8")}):
        raise UnsupportedOption(
            f"--quantization {method} and quantization_config contradict each other: the files "
            f"hold {', '.join(other)}; leave --quantization out"
        )
    return replace(spec, checkpoint=replace(spec.checkpoint, quantization=stored))


def _sources(
    config: Mapping[str, Any], directory: Path | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files that say something of quantization, the one that counts first."""
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
    """What ModelOpt writes below `quantization`, in a file of its own or in config.json."""
    inner: object = config.get("quantization")
    if not isinstance(inner, dict):
        return config
    inner = cast("dict[str, Any]", inner)
    ignored = {"ignore": inner["exclude_modules"]} if "exclude_modules" in inner else {}
    return {**config, **inner, **ignored}


def _normalised(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Names of packings in lower case, and those of algorithms in upper case."""
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
    """The first one that fits a module counts: those of all modules are behind those of some."""
    first, *others = sorted(groups, key=lambda group: not group.targets)
    return replace(first, others=tuple(others))


def _grouped(
    where: str, found: Iterable[tuple[QuantizationSpec, str]], ignored: frozenset[str]
) -> list[QuantizationSpec]:
    """What quantizes modules, each with their names or patterns; "" is all that are left."""
    targets: dict[QuantizationSpec, list[str]] = {}
    for spec, name in found:
        targets.setdefault(spec, []).append(name)
    return [
        replace(spec, ignored=ignored, targets=_names(where, [] if "" in names else names))
        for spec, names in targets.items()
    ]


def _modelopt(config: Mapping[str, Any], names: CheckpointSpec | None) -> QuantizationSpec:
    """FP8 and NVFP4 as NVIDIA's ModelOpt writes them, of which the weights are used."""
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
    """Four bits as AutoAWQ packs them for its `gemm` kernels."""
    _expect_packing(config, ("version", "format", "checkpoint_format"), "gemm")
    if config.get("backend") == "llm-awq":  # another packing, as transformers reads it
        raise UnsupportedOption("backend 'llm-awq' is not supported")
    expect("bits", config.get("bits"), 4)
    return QuantizationSpec(
        format="w4a16",
        packing="awq",
        group_size=_group_size(config.get("group_size")),
        symmetric=False,  # the files hold zero points in any case
        ignored=_names("modules_to_not_convert", config.get("modules_to_not_convert") or ()),
    )


def _gptq(config: Mapping[str, Any]) -> QuantizationSpec:
    """AutoGPTQ's and GPTQModel's files. `dynamic` has rules for modules by pattern, of which the
    first that fits counts: `-:` leaves them unquantized, any other changes options.
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
    """Intel's AutoRound: GPTQ's files without `g_idx`. `extra_config` has options of modules, by
    name or by pattern; those of 16 bits are not quantized.
    """
    expect("packing_format", config.get("packing_format") or _AUTO_GPTQ, _AUTO_GPTQ)
    expect("act_bits", config.get("act_bits") or 16, 16, 32)
    modules: dict[str, Mapping[str, Any]] = {**(config.get("extra_config") or {}), "": {}}
    left = [] if "lm_head" in modules else ["lm_head"]
    found: list[tuple[QuantizationSpec, str]] = []
    for name, changes in modules.items():  # the last are all others
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
    """How the files are packed; the first of `served` if they do not say.

    Args:
        names: of the option; the older ones come first, as in transformers.
    """
    name = next((name for name in names if config.get(name) is not None), "")
    packing = config.get(name, served[0])
    expect(name, packing, *served)
    return packing


def _group_size(value: object) -> int:
    """0 for -1, which means a scale per output channel."""
    if isinstance(value, int) and (value == -1 or (value > 0 and value % 8 == 0)):
        return max(value, 0)
    raise UnsupportedOption(
        f"group_size {value!r} is not supported; supported: -1, or a multiple of 8"
    )


def _fp8(config: Mapping[str, Any]) -> QuantizationSpec:
    """Block-wise FP8 as Qwen and DeepSeek publish it; without blocks, AutoFP8's: one scale for a
    matrix.
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
    """compressed-tensors: groups of modules, each with its format."""
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
    """Whether keys and values are to be cached in e4m3, by scales in the files."""
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
    """FP8 per output channel, per matrix, or per 128 x 128 block. Where only weights are meant to
    be of 8 bits, the files are the same.
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
    """Floats or integers, a value in each element of the weight."""
    return (_ct_int if group["weights"].get("type") == "int" else _ct_float)(where, group)


def _ct_int(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Integers of 4 or 8 bits in bytes. Those of 8 bits with a scale per output channel are
    multiplied with int8 activations, unless the files declare none; all others are packed when they
    are loaded.
    """
    spec, _ = _ct_packed(where, group)
    is_int8 = spec.format == "w8a16" and not spec.group_size and spec.symmetric
    if is_int8 and group.get("input_activations"):
        return QuantizationSpec(format="int8"), _INT8_TOKENS
    return replace(spec, packing="int-quantized"), {}


def _ct_float_groups(
    name: WeightFormat, where: str, group: _Group
) -> tuple[QuantizationSpec, _Computed]:
    """e2m1 or e4m3 in groups. Activations are left as they are: it is weights that take room."""
    weights = group["weights"]
    strategy, size = ("tensor_group", 16) if name == "nvfp4" else ("group", 32)
    _numbers(where, weights, "float", 8 if name == "mxfp8" else 4)
    expect(f"{where}.strategy", weights.get("strategy"), strategy)
    expect(f"{where}.group_size", weights.get("group_size"), size)
    if name == "mxfp8":
        expect(f"{where}.scale_dtype", weights.get("scale_dtype"), None, "torch.uint8")
    return QuantizationSpec(format=name, group_size=size), {}


def _ct_packed(where: str, group: _Group) -> tuple[QuantizationSpec, _Computed]:
    """Integers of 4 or 8 bits, packed into words; activations stay as they are."""
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
        computed: activations that the layers compute with. Empty if they leave them as they are.

    Returns:
        The description. Empty if the layers compute with these activations.

    Raises:
        UnsupportedOption: the group declares what no producer writes.
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
    """Checks what weights, or keys and values, are quantized to."""
    expect(f"{where}.num_bits", values.get("num_bits", False), *bits)
    expect(f"{where}.type", values.get("type", False), kind)
    expect(f"{where}.dynamic", values.get("dynamic", False), False)
    expect(f"{where}.symmetric", values.get("symmetric", True), True)


def _pair(value: object) -> object:
    """JSON has lists where we compare tuples; older files write "128x128"."""
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
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq,
    "auto-round": _auto_round,
}  # fmt: skip
_CT_FORMATS = {  # of compressed-tensors
    "float-quantized": _ct_float,
    "naive-quantized": _ct_naive,  # the same files
    "pack-quantized": _ct_packed,
    "int-quantized": _ct_int,
    "nvfp4-pack-quantized": partial(_ct_float_groups, "nvfp4"),
    "mxfp4-pack-quantized": partial(_ct_float_groups, "mxfp4"),
    "mxfp8-quantized": partial(_ct_float_groups, "mxfp8"),
}
