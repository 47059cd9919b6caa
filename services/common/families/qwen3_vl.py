"""Dense Qwen3-VL: a Qwen3 language model with interleaved M-RoPE, and a tower with DeepStack."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.image_geometry import ImageLimits
from services.common.model_spec import (
    CheckpointSpec,
    ModelSpec,
    ModelSpecError,
    RopeSpec,
    TextSpec,
    TowerSpec,
    VisionSpec,
    read_json,
)


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    """See `families.read_spec`."""
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    eos = generation.get("eos_token_id", config["text_config"].get("eos_token_id"))
    return ModelSpec(
        directory=directory,
        name=directory.name,
        architecture=config["architectures"][0],
        text=_text(config),
        vision=_vision(config, read_json(directory / "preprocessor_config.json")),
        checkpoint=CheckpointSpec(
            text_prefix="model.language_model.", vision_prefix="model.visual."
        ),
        eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or ()),
        generation=generation,
    )


def _text(config: Mapping[str, Any]) -> TextSpec:
    text = config["text_config"]
    if text.get("hidden_act", "silu") != "silu" or text.get("attention_bias", False):
        raise ModelSpecError("only silu MLPs and attention without bias are supported")
    # `rope_parameters` is transformers 5's spelling of `rope_scaling` + `rope_theta`.
    rope: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelSpecError(f"rope_type {rope['rope_type']} is not supported")
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    sections = rope.get("mrope_section", (24, 20, 20))
    return TextSpec(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope=RopeSpec(
            theta=float(rope.get("rope_theta", text.get("rope_theta", 500_000.0))),
            rotary_dim=head_dim,
            mrope_section=(sections[0], sections[1], sections[2]),
        ),
        max_position_embeddings=text["max_position_embeddings"],
        tie_word_embeddings=bool(
            config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        ),
        qk_norm=True,
    )


def _vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionSpec:
    vision = config["vision_config"]
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelSpecError(f"vision hidden_act {vision['hidden_act']} is not supported")
    return VisionSpec(
        tower=TowerSpec(
            depth=vision["depth"],
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_heads=vision["num_heads"],
            in_channels=vision.get("in_channels", 3),
            patch_size=vision["patch_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            spatial_merge_size=vision["spatial_merge_size"],
            num_position_embeddings=vision["num_position_embeddings"],
            out_hidden_size=vision["out_hidden_size"],
            deepstack_indexes=tuple(vision["deepstack_visual_indexes"]),
        ),
        image_token_id=config["image_token_id"],
        limits=ImageLimits(
            patch_size=vision["patch_size"],
            merge_size=vision["spatial_merge_size"],
            min_pixels=processor["size"]["shortest_edge"],
            max_pixels=processor["size"]["longest_edge"],
        ),
    )
