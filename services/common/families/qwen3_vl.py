"""Qwen3-VL: a Qwen3 language model with interleaved M-RoPE, and a tower with DeepStack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.families.dense import (
    QWEN_CONVERSATION,
    read_model,
    read_text,
    text_checkpoint,
    with_tie,
)
from services.common.families.image_processor import read_vision_spec
from services.common.families.video_processor import with_video
from services.common.model_spec import ModelSpec, MoESpec, TowerSpec, VisionSpec, expect


@dataclass(frozen=True, slots=True)
class DeepStackTower(TowerSpec):
    """The vision tower of Qwen3-VL and Qwen3.5. That of Qwen3.5 has no DeepStack taps.

    Attributes:
        num_position_embeddings: entries of the learned position table.
        deepstack_indexes: blocks whose outputs are DeepStack features.
    """

    kind = "qwen3_vl"
    num_position_embeddings: int
    deepstack_indexes: tuple[int, ...]

    @property
    def num_features(self) -> int:
        """Tensors per unit: the merged output, and one tensor per DeepStack tap."""
        return 1 + len(self.deepstack_indexes)


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    return read_vision_language(directory, config, head_dim=128, num_kv_heads=32)


def read_vision_language(
    directory: Path,
    config: Mapping[str, Any],
    *,
    head_dim: int | None,
    num_kv_heads: int,
    moe: MoESpec | None = None,
) -> ModelSpec:
    """Reads the language model and the vision tower.

    Args:
        directory: the checkpoint.
        config: parsed config.json.
        head_dim, num_kv_heads, moe: arguments of `read_text` for the language model.
    """
    text = read_text(
        with_tie(config["text_config"], config),
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        rope_theta=500_000.0,
        mrope_section=(24, 20, 20),
        qk_norm=True,
        moe=moe,
    )
    taps = config["vision_config"]["deepstack_visual_indexes"]
    return read_model(
        directory,
        config,
        text,
        vision=read_vision(directory, config, taps),
        checkpoint=text_checkpoint("model.language_model.", "model.visual."),
        conversation=QWEN_CONVERSATION,
    )


def read_vision(
    directory: Path, config: Mapping[str, Any], deepstack_indexes: Sequence[int]
) -> VisionSpec:
    """Reads the vision tower of a config.json and the image and video processors' options."""
    vision = config["vision_config"]
    activation = "gelu_pytorch_tanh"
    expect("vision hidden_act", vision.get("hidden_act", activation), activation)
    rotary = vision.get("rope_parameters") or {}
    for name, served in (("rope_type", ("axial", "default")), ("rope_theta", (10_000.0,))):
        expect(f"vision rope_parameters.{name}", rotary.get(name, served[0]), *served)
    tower = DeepStackTower(
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
        deepstack_indexes=tuple(deepstack_indexes),
    )
    return with_video(
        read_vision_spec(directory, tower, config["image_token_id"]), directory, config
    )
