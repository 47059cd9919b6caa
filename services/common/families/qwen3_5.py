"""Dense Qwen3.5, which Qwen3.6 and 3.8 share: gated delta net layers, every fourth one full
attention with an output gate. The tower is Qwen3-VL's without DeepStack.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from services.common.families.dense import (
    QWEN_CONVERSATION,
    expect_given,
    read_model,
    read_text,
    text_checkpoint,
    with_tie,
)
from services.common.families.qwen3_vl import read_vision
from services.common.model_spec import (
    CheckpointSpec,
    LayerKind,
    LinearAttentionSpec,
    ModelSpec,
    MoESpec,
    TextSpec,
    UnsupportedOption,
    VisionSpec,
)

_MTP = "mtp."  # layers that predict several tokens: a draft model, not served
_KINDS = ("full_attention", "linear_attention")


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    text = read_hybrid_text(config)
    vision, checkpoint = read_parts(directory, config)
    return read_model(
        directory, config, text, vision=vision, checkpoint=checkpoint,
        conversation=QWEN_CONVERSATION,
    )  # fmt: skip


def read_parts(
    directory: Path, config: Mapping[str, Any]
) -> tuple[VisionSpec | None, CheckpointSpec]:
    """The tower, if the architecture has one, and the names of tensors."""
    if "text_config" not in config:
        names = text_checkpoint()
        return None, replace(names, ignored=(*names.ignored, _MTP, "model.visual."))
    expect_given(config, "language_model_only", False)
    if config["vision_config"].get("deepstack_visual_indexes"):
        raise UnsupportedOption("deepstack_visual_indexes is not supported; supported: none")
    names = text_checkpoint("model.language_model.", "model.visual.")
    return read_vision(directory, config, ()), replace(names, ignored=(*names.ignored, _MTP))


def read_hybrid_text(
    config: Mapping[str, Any], *, num_kv_heads: int = 4, moe: MoESpec | None = None
) -> TextSpec:
    """The language model of a config.json with layers of both kinds; for the arguments see
    `read_text`.
    """
    section = with_tie(config.get("text_config") or config, config)
    _refuse_unsupported(section)
    kinds = _layer_kinds(section)
    shared = {key: value for key, value in section.items() if key != "layer_types"}
    text = read_text(
        shared, head_dim=256, num_kv_heads=num_kv_heads, mrope_section=(11, 11, 10),
        partial_rotary_factor=0.25, qk_norm=True, moe=moe,
    )  # fmt: skip
    return replace(
        text,
        output_gate=True,
        zero_centred_norms=True,
        linear_attention=_linear_attention(section),
        layer_kinds=kinds,
    )


def _layer_kinds(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    count = config["num_hidden_layers"]
    interval = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [_KINDS[bool((i + 1) % interval)] for i in range(count)]
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise UnsupportedOption(
            f"layer_types {', '.join(unknown)} is not supported; supported: {', '.join(_KINDS)}"
        )
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    if "full_attention" not in kinds:
        raise UnsupportedOption("layer_types without full_attention is not supported")
    return cast("tuple[LayerKind, ...]", tuple(kinds))


def _linear_attention(config: Mapping[str, Any]) -> LinearAttentionSpec:
    spec = LinearAttentionSpec(
        num_key_heads=config.get("linear_num_key_heads", 16),
        num_value_heads=config.get("linear_num_value_heads", 32),
        key_head_dim=config.get("linear_key_head_dim", 128),
        value_head_dim=config.get("linear_value_head_dim", 128),
        conv_width=config.get("linear_conv_kernel_dim", 4),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise UnsupportedOption(
            f"linear_num_value_heads {spec.num_value_heads} is not supported: "
            f"it is not a multiple of linear_num_key_heads {spec.num_key_heads}"
        )
    return spec


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Options that would change answers, in these models or in others of their line."""
    for name, supported in (
        ("attn_output_gate", (True,)),
        ("output_gate_type", ("silu", "swish")),  # of the gated norm
        ("mamba_ssm_dtype", ("float32",)),
        ("layer_scale", (False,)),
        ("mlp_only_layers", ([],)),
    ):
        expect_given(config, name, *supported)
