"""What `quantization_config` of a config.json says of the weights. No torch.

Families call `read_quantization`; `services.common.nn.weights` turns the result into methods of
linear layers. A format that is not implemented is an `UnsupportedOption` that names it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from services.common.model_spec import QuantizationSpec, UnsupportedOption

_BLOCK = (128, 128)
_Format = Literal["fp8_block", "fp8_channel"]


def read_quantization(config: Mapping[str, Any]) -> QuantizationSpec | None:
    """The quantization of a checkpoint; None: there is none.

    Args:
        config: config.json.

    Raises:
        UnsupportedOption: a format or a variant that is not supported, by name.
    """
    text: Mapping[str, Any] = config.get("text_config") or {}
    found: dict[str, Any] = {}
    for place in (config, text):
        found = place.get("quantization_config") or place.get("compression_config") or {}
        if found:
            break
    if not found:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    raise UnsupportedOption(
        f"quantization_config: quant_method {method!r} is not supported; "
        "supported: 'fp8', 'compressed-tensors'"
    )


def _fp8(config: Mapping[str, Any]) -> QuantizationSpec:
    """Block-wise FP8 as Qwen and DeepSeek publish it."""
    _expect("activation_scheme", config.get("activation_scheme", "dynamic"), "dynamic")
    _expect("weight_block_size", _pair(config.get("weight_block_size")), _BLOCK)
    _expect("fmt", config.get("fmt", "e4m3"), "e4m3")
    _expect("scale_fmt", config.get("scale_fmt") or "float", "float")
    ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return QuantizationSpec(
        format="fp8_block",
        block_size=_BLOCK,
        scale_name="weight_scale_inv",
        ignored=_names("modules_to_not_convert", ignored),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationSpec:
    """compressed-tensors' `float-quantized`: FP8 per output channel, or per 128 x 128 block."""
    groups = cast("Mapping[str, Mapping[str, Any]]", config.get("config_groups") or {})
    if not groups:
        raise UnsupportedOption("quantization_config: config_groups is empty")
    for absent in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(absent):
            raise UnsupportedOption(f"quantization_config: {absent} is not supported")
    targets: dict[_Format, list[str]] = {}
    for name, group in groups.items():
        given = _names(f"config_groups.{name}.targets", group.get("targets") or ("Linear",))
        targets.setdefault(_scheme(name, group, config.get("format")), []).extend(given)
    ignored = _names("ignore", config.get("ignore") or ())
    found = [
        QuantizationSpec(
            format=scheme,
            block_size=_BLOCK,
            scale_name="weight_scale",
            ignored=ignored,
            targets=() if "Linear" in names else tuple(names),
        )
        for scheme, names in targets.items()
    ]
    if sum(not group.targets for group in found) > 1:
        raise UnsupportedOption(
            "quantization_config: groups of different schemes for all linear layers are not "
            "supported"
        )
    first, *others = sorted(found, key=lambda group: not group.targets)  # names before "Linear"
    return replace(first, others=tuple(others))


def _scheme(name: str, group: Mapping[str, Any], outer_format: object) -> _Format:
    where = f"config_groups.{name}"
    _expect(f"{where}.format", group.get("format") or outer_format, "float-quantized")
    weights: Mapping[str, Any] = group.get("weights") or {}
    inputs: Mapping[str, Any] = group.get("input_activations") or {}
    if group.get("output_activations"):
        raise UnsupportedOption(f"quantization_config: {where}.output_activations is not supported")
    for part, values, is_dynamic in (
        ("weights", weights, False),
        ("input_activations", inputs, True),
    ):
        for key, wanted in (("num_bits", 8), ("type", "float"), ("dynamic", is_dynamic)):
            _expect(f"{where}.{part}.{key}", values.get(key, False), wanted)
        _expect(f"{where}.{part}.symmetric", values.get("symmetric", True), True)
    strategy = weights.get("strategy")
    if strategy == "channel":
        _expect(f"{where}.input_activations.strategy", inputs.get("strategy"), "token")
        return "fp8_channel"
    if strategy == "block":
        _expect(f"{where}.weights.block_structure", _pair(weights.get("block_structure")), _BLOCK)
        _expect(f"{where}.input_activations.strategy", inputs.get("strategy"), "group")
        _expect(f"{where}.input_activations.group_size", inputs.get("group_size"), _BLOCK[1])
        return "fp8_block"
    raise UnsupportedOption(
        f"quantization_config: {where}.weights.strategy {strategy!r} is not supported; "
        "supported: 'channel', 'block'"
    )


def _expect(name: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise UnsupportedOption(
            f"quantization_config: {name} {value!r} is not supported; supported: {wanted!r}"
        )


def _pair(value: object) -> object:
    """JSON has lists where we compare tuples; older files write "128x128"."""
    if isinstance(value, str):
        return tuple(int(part) for part in value.split("x") if part.isdigit())
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _names(name: str, value: object) -> tuple[str, ...]:
    values = cast("list[object]", value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise UnsupportedOption(f"quantization_config: {name} is not a list of names")
    names = tuple(cast("list[str]", value))
    for one in names:
        try:
            re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
        except re.error as error:
            raise UnsupportedOption(f"quantization_config: {name} {one!r}: {error}") from None
    return names
