"""Readers of the config.json fields that all dense families share.

An absent field has the default of transformers' configuration class. An option that would change
the model's answers and is not implemented raises `UnsupportedOption` with the option's name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from services.common.families.generation import eos_token_ids, read_generation
from services.common.model_spec import (
    INDEX,
    WHOLE,
    CheckpointSpec,
    ConversationSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    TextSpec,
    UnsupportedOption,
    VisionSpec,
    expect,
    read_json,
)
from services.common.quantization import read_quantization

_ROPE_KINDS = ("default", "llama3", "yarn")
_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
}
_MROPE_FIELDS = {"mrope_section", "mrope_interleaved"}
# Both parsers are listed because newer checkpoints of the same architecture may write their tool
# calls in the format of Qwen3-Coder instead of that of Hermes.
QWEN_CONVERSATION = ConversationSpec(tool_parsers=("qwen3_coder", "hermes"), thinks=True)
_MAX_HEADER_BYTES = 100 << 20  # as in the safetensors package
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_model(
    directory: Path,
    config: Mapping[str, Any],
    text: TextSpec,
    *,
    vision: VisionSpec | None = None,
    checkpoint: CheckpointSpec | None = None,
    conversation: ConversationSpec | None = None,
) -> ModelSpec:
    """Builds the spec of a checkpoint directory from the parts that the family has read.

    Args:
        directory: absolute path of the checkpoint.
        config: parsed config.json.
        text: spec of the language model.
        vision: spec of the vision tower. None if the model is a text model.
        checkpoint: names of the tensors. Defaults to names that begin with `model.`.
        conversation: formats of tool calls and reasoning. Defaults to neither.
    """
    generation = read_generation(directory)
    names = checkpoint or text_checkpoint()
    section: Mapping[str, Any] = config.get("text_config") or config
    return ModelSpec(
        directory=directory,
        name=directory.name,
        architecture=config["architectures"][0],
        text=text,
        vision=vision,
        checkpoint=replace(names, quantization=read_quantization(config, directory, names)),
        eos_token_ids=eos_token_ids(directory, text.vocab_size, generation, config, section),
        generation=generation,
        conversation=conversation or ConversationSpec(),
    )


def text_checkpoint(prefix: str = "model.", vision_prefix: str = "") -> CheckpointSpec:
    """Tensor names of a language model. `inv_freq` buffers of older checkpoints are ignored."""
    return CheckpointSpec(
        text_prefix=prefix,
        vision_prefix=vision_prefix,
        ignored=(r".*\.rotary_emb\.inv_freq$",),
    )


def has_tensors(directory: Path, prefix: str) -> bool:
    """Returns whether the weight files have names with the prefix. False if there are no files.

    Some programs rename tensors, so that checkpoints of one architecture have different names. Only
    the index, or the header of a single file, is read.
    """
    try:
        if (directory / WHOLE).is_file():
            with (directory / WHOLE).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                names = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        else:
            names = read_json(directory / INDEX)["weight_map"]
    except (OSError, ValueError, KeyError):
        return False  # the services that read weights refuse such files with the reason
    return any(name.startswith(prefix) for name in names)


def with_tie(section: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Copies `tie_word_embeddings` from config.json into its `text_config`.

    Args:
        section: `text_config` of the config.json.
        config: the whole config.json. Its value takes precedence over the section's.

    Raises:
        UnsupportedOption: the rope options beside `text_config` differ from the rope options in
            `text_config`, which are the only ones that are read.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name) not in (None, section.get(name)):
            raise UnsupportedOption(f"{name} is not supported here; write it into text_config")
    tied = config.get("tie_word_embeddings", section.get("tie_word_embeddings", False))
    return {**section, "tie_word_embeddings": tied}


def read_text(
    config: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    rope_theta: float = 10_000.0,
    mrope_section: tuple[int, int, int] | None = None,
    partial_rotary_factor: float | None = None,
    qk_norm: bool = False,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    mlp_bias: bool = False,
    sliding_window: int | None = None,
    moe: MoESpec | None = None,
) -> TextSpec:
    """Reads the language model of a config.json, or of its `text_config`.

    Args:
        head_dim: default of an absent field. None if it is hidden_size / num_attention_heads.
        num_kv_heads: default of an absent field. None if it is num_attention_heads.
        rope_theta, mrope_section: defaults of absent fields. No section if positions are 1-D.
        partial_rotary_factor: default of an absent field. None if a factor below 1 is refused.
        qk_norm, mlp_bias, sliding_window, moe: fields of `TextSpec`.
        qkv_bias, o_bias: fields of `TextSpec`. None if `attention_bias` of `config` decides.

    Raises:
        UnsupportedOption: an option is not implemented. The message names the option.
    """
    _refuse_unsupported(config, has_experts=moe is not None)
    num_heads = read_size(config, "num_attention_heads")
    kv_heads = read_size(config, "num_key_value_heads", num_kv_heads or num_heads, num_heads)
    if num_heads % kv_heads:
        raise UnsupportedOption(
            f"num_key_value_heads {kv_heads} is not supported: "
            f"num_attention_heads {num_heads} is not a multiple of it"
        )
    hidden_size = read_size(config, "hidden_size")
    per_head = hidden_size // num_heads
    size = read_size(config, "head_dim", head_dim or per_head, per_head)
    if size % 2:
        raise UnsupportedOption(f"head_dim {size} is not supported: it must be even")
    rope = read_rope(config, size, rope_theta, mrope_section, partial_rotary_factor)
    positions = read_size(config, "max_position_embeddings")
    if rope.kind == "yarn":
        positions = max(positions, int(rope.factor * rope.original_max_position_embeddings))
    bias = bool(config.get("attention_bias", False))
    qkv_bias = bias if qkv_bias is None else qkv_bias
    # transformers ignores these two fields; a value that differs from the architecture is refused.
    expect_given(config, "use_qk_norm", qk_norm)
    expect_given(config, "qkv_bias", qkv_bias)
    no_mlp = None if moe is None else moe.shared_intermediate_size or moe.intermediate_size
    return TextSpec(
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_size(config, "intermediate_size", no_mlp),
        num_layers=read_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=bias if o_bias is None else o_bias,
        mlp_bias=mlp_bias,
        sliding_window=sliding_window,
        moe=moe,
    )


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    default_theta: float = 10_000.0,
    mrope_section: tuple[int, int, int] | None = None,
    default_partial: float | None = None,
) -> RopeSpec:
    """Reads `rope_parameters`, or the older `rope_scaling` with a top-level `rope_theta`.

    As in transformers, `rope_scaling` takes precedence if a config.json has both.

    Args:
        config: the JSON object that has the language model's fields.
        head_dim: elements of a head.
        default_theta: base of the frequencies if `rope_theta` is absent.
        mrope_section: the family's default section. None if the family has 1-D positions.
        default_partial: the family's default of `partial_rotary_factor`. None if the family rotates
            whole heads.

    Raises:
        UnsupportedOption: the rope type or one of its fields is not implemented.
    """
    given: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    known = _ROPE_FIELDS if mrope_section is None else _ROPE_FIELDS | _MROPE_FIELDS
    if unknown := sorted(key for key in given if key not in known and given[key] is not None):
        raise UnsupportedOption(
            f"rope option {', '.join(unknown)} is not supported; "
            f"supported: {', '.join(sorted(known))}"
        )
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "mrope" and mrope_section is not None:  # the older name of M-RoPE without scaling
        kind = "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedOption(
            f"rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}. "
            "Remove the scaling from config.json to serve the model's original context"
        )
    partial = float(
        given.get("partial_rotary_factor")
        or config.get("partial_rotary_factor")
        or default_partial
        or 1.0
    )
    if partial != 1.0 and default_partial is None:
        raise UnsupportedOption(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedOption(
            f"partial_rotary_factor {partial} is not supported: it rotates {rotary_dim} of "
            f"{head_dim} elements of a head"
        )
    section = given.get("mrope_section") or mrope_section
    theta = given.get("rope_theta") or config.get("rope_theta") or default_theta
    unscaled = RopeSpec(
        theta=float(theta),
        rotary_dim=rotary_dim,
        mrope_section=(section[0], section[1], section[2]) if section else None,
    )
    return unscaled if kind == "default" else _scaled(unscaled, kind, given, config)


def qwen_sliding_window(config: Mapping[str, Any], *, by_layer: bool = True) -> int | None:
    """Sliding window of a Qwen model. None if no layer uses a sliding window.

    Args:
        config: the JSON object that has the language model's fields.
        by_layer: True if `layer_types` or `max_window_layers` select the layers that have the
            window. False if all layers have it.
    """
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None or not by_layer:
        return window
    layers = config.get("layer_types")
    if layers is None:
        has_window = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    else:
        has_window = "sliding_attention" in layers
    return window if has_window else None


def _scaled(
    rope: RopeSpec, kind: str, given: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeSpec:
    """Adds the scaling parameters of `llama3` or `yarn`, with transformers' defaults."""
    context = (
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    rope = replace(rope, original_max_position_embeddings=context)
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        if low >= high:
            raise UnsupportedOption(
                f"high_freq_factor {high} is not supported: it is not above low_freq_factor {low}"
            )
        factor = float(given["factor"])
        return replace(
            rope, kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high
        )
    factor = float(given.get("factor") or config["max_position_embeddings"] / context)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    explicit = given.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _refuse_unsupported(config: Mapping[str, Any], *, has_experts: bool) -> None:
    expect("hidden_act", config.get("hidden_act", "silu"), "silu", "swish")
    expect_given(config, "use_mrope", False)
    for name in _EXPERT_FIELDS:
        if config.get(name) and not has_experts:
            raise UnsupportedOption(
                f"{name} {config[name]} is not supported: this architecture is served without "
                "experts"
            )
    kinds = set(cast("list[str]", config.get("layer_types") or ()))
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise UnsupportedOption(
            f"layer_types {', '.join(unknown)} is not supported; supported: full_attention"
        )


def expect_given(config: Mapping[str, Any], name: str, *served: object) -> None:
    """Calls `expect` for an option unless the option is absent or null."""
    if config.get(name) is not None:
        expect(name, config[name], *served)


def read_size(
    config: Mapping[str, Any], name: str, absent: int | None = None, null: int | None = None
) -> int:
    """Reads a field that is a positive integer.

    Args:
        config: the JSON object that has the field.
        name: name of the field.
        absent: value of a missing field. None if the field is required.
        null: value of a field that is null. None if null is refused.

    Raises:
        KeyError: the field is missing, and `absent` is None.
        TypeError: the field is not a positive integer.
    """
    value = config[name] if absent is None else config.get(name, absent)
    value = null if value is None else value
    if not isinstance(value, int) or value < 1:
        raise TypeError(f"{name} is {value!r}, not a positive integer")
    return value
