"""Qwen2-VL: a Qwen2 language model with sectioned M-RoPE, and a tower of plain blocks.

The files come in two forms. Published checkpoints have the language model's options at the top of
config.json, and names that begin with `model.` and `visual.`; some programs write a `text_config`,
or `model.language_model.` and `model.visual.`. The options and the names are read in either form.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from services.common.families.clip_processor import with_clips
from services.common.families.dense import (
    QWEN_CONVERSATION,
    expect_given,
    has_tensors,
    qwen_sliding_window,
    read_model,
    read_text,
    text_checkpoint,
    with_tie,
)
from services.common.families.image_processor import read_vision_spec
from services.common.model_spec import (
    CheckpointSpec,
    ModelSpec,
    TowerSpec,
    expect,
)

# Defaults of transformers' configuration class where they differ from those of `read_text`.
_TEXT_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_window_layers": 80}


class PlainTower(TowerSpec):
    """The vision tower of Qwen2-VL: all blocks attend to the whole image."""

    kind: ClassVar[str] = "qwen2_vl"


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    vision = config["vision_config"]
    hidden_size = vision["embed_dim"]
    expect_given(vision, "hidden_act", "quick_gelu")
    tower = PlainTower(
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * vision.get("mlp_ratio", 4)),
        out_hidden_size=vision["hidden_size"],
        **tower_sizes(vision),
    )
    return read_vision_language(directory, config, tower)


def tower_sizes(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of `TowerSpec` that Qwen2-VL and Qwen2.5-VL name alike.

    Raises:
        UnsupportedOption: an option of the tower is not implemented.
    """
    sizes = {
        "depth": vision["depth"],
        "num_heads": vision["num_heads"],
        "in_channels": vision.get("in_channels", 3),
        "patch_size": vision.get("patch_size", 14),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "spatial_merge_size": vision.get("spatial_merge_size", 2),
    }
    # transformers ignores these two older names.
    expect_given(vision, "in_chans", sizes["in_channels"])
    expect_given(vision, "spatial_patch_size", sizes["patch_size"])
    rotary = vision.get("rope_parameters") or {}
    for name, served in (("rope_type", ("axial", "default")), ("rope_theta", (10_000.0,))):
        expect(f"vision rope_parameters.{name}", rotary.get(name, served[0]), *served)
    return sizes


def read_vision_language(
    directory: Path,
    config: Mapping[str, Any],
    tower: TowerSpec,
    tokens_per_second: float | None = None,
) -> ModelSpec:
    """Reads the language model and the processors.

    Args:
        directory: the checkpoint.
        config: parsed config.json.
        tower: the vision tower.
        tokens_per_second: attribute of `WholeClips`.
    """
    section = _TEXT_DEFAULTS | with_tie(config.get("text_config") or config, config)
    text = read_text(
        section,
        num_kv_heads=8,
        rope_theta=1e6,
        mrope_section=(16, 24, 24),
        qkv_bias=True,
        o_bias=False,
        sliding_window=qwen_sliding_window(section),
    )
    vision = read_vision_spec(directory, tower, config["image_token_id"])
    return read_model(
        directory,
        config,
        replace(text, rope=replace(text.rope, interleaved=False)),
        vision=with_clips(vision, directory, config, tokens_per_second),
        checkpoint=_names(directory),
        conversation=QWEN_CONVERSATION,
    )


def _names(directory: Path) -> CheckpointSpec:
    if has_tensors(directory, "model.language_model."):
        return text_checkpoint("model.language_model.", "model.visual.")
    return text_checkpoint("model.", "visual.")
