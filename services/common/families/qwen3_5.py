"""Qwen3.5, and Qwen3.6 and Qwen3.8 of the same architecture.

Three of four layers are gated delta nets; every fourth layer is full attention with an output gate.
Each layer has an MLP or, in the MoE models, routed experts and a shared expert. The vision tower is
that of Qwen3-VL without DeepStack.
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
from services.common.families.qwen3_moe import read_moe
from services.common.families.qwen3_vl import read_vision
from services.common.model_spec import (
    CheckpointSpec,
    LayerKind,
    LinearAttentionSpec,
    ModelSpec,
    TextSpec,
    UnsupportedOption,
    VisionSpec,
)

_MTP = r"mtp\."  # layers for multi-token prediction, read only if they draft tokens
_KINDS = ("full_attention", "linear_attention")


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    vision, checkpoint = _read_parts(directory, config)
    return read_model(
        directory,
        config,
        _read_text(config),
        vision=vision,
        checkpoint=checkpoint,
        conversation=QWEN_CONVERSATION,
    )


def _read_parts(
    directory: Path, config: Mapping[str, Any]
) -> tuple[VisionSpec | None, CheckpointSpec]:
    """Reads the vision part, or None for a text architecture, and the names of the tensors."""
    if "text_config" not in config:
        names = text_checkpoint()
        return None, replace(names, ignored=(*names.ignored, _MTP, r"model\.visual\."))
    expect_given(config, "language_model_only", False)
    if config["vision_config"].get("deepstack_visual_indexes"):
        raise UnsupportedOption("deepstack_visual_indexes is not supported; supported: none")
    names = text_checkpoint("model.language_model.", "model.visual.")
    return read_vision(directory, config, ()), replace(names, ignored=(*names.ignored, _MTP))


def _read_text(config: Mapping[str, Any]) -> TextSpec:
    """Reads the language model, with layers of full and of linear attention."""
    section = with_tie(config.get("text_config") or config, config)
    _refuse_unsupported(section)
    kinds = _layer_kinds(section)
    has_experts = "Moe" in config["architectures"][0]
    shared = {key: value for key, value in section.items() if key != "layer_types"}
    text = read_text(
        shared,
        head_dim=256,
        num_kv_heads=2 if has_experts else 4,
        mrope_section=(11, 11, 10),
        partial_rotary_factor=0.25,
        qk_norm=True,
        moe=read_moe(section, has_shared_expert=True) if has_experts else None,
    )
    return replace(
        text,
        output_gate=True,
        zero_centred_norms=True,
        linear_attention=_linear_attention(section),
        layer_kinds=kinds,
        num_mtp_layers=_num_mtp_layers(section),
    )


def _num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of layers for multi-token prediction. 0 if these have embeddings of their
    own, which is not supported.
    """
    if config.get("mtp_use_dedicated_embeddings"):
        return 0
    return config.get("mtp_num_hidden_layers") or 0


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
    if missing := sorted(set(_KINDS) - set(kinds)):
        raise UnsupportedOption(f"layer_types without {missing[0]} is not supported")
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
    """Refuses options of this model line that would change answers and are not implemented."""
    for name, supported in (
        ("attn_output_gate", (True,)),
        ("output_gate_type", ("silu", "swish")),  # activation of the gated norm
        ("mamba_ssm_dtype", ("float32",)),
        ("layer_scale", (False,)),
        ("mlp_only_layers", ([],)),
    ):
        expect_given(config, name, *supported)
