"""Qwen2.5-VL: the language model of Qwen2-VL, and a tower that attends within windows.

The time axis of a video's positions is in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from services.common.families.dense import expect_given
from services.common.families.qwen2_vl import read_vision_language, tower_sizes
from services.common.model_spec import ModelSpec, TowerSpec


@dataclass(frozen=True, slots=True)
class WindowTower(TowerSpec):
    """The vision tower of Qwen2.5-VL.

    Attributes:
        window_size: side of a window in pixels.
        full_attention_blocks: blocks that attend to the whole image. The others attend to windows.
    """

    kind: ClassVar[str] = "qwen2_5_vl"
    window_size: int
    full_attention_blocks: tuple[int, ...]

    @property
    def window_tokens(self) -> int:
        """Side of a window in tokens."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def block_weights(self) -> int:
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size

    def attended(self, num_patches: int) -> float:
        window = min(num_patches, (self.window_tokens * self.spatial_merge_size) ** 2)
        num_full = len(set(self.full_attention_blocks) & set(range(self.depth)))
        return (num_full * num_patches + (self.depth - num_full) * window) / self.depth


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    vision = config["vision_config"]
    expect_given(vision, "hidden_act", "silu")
    sizes = tower_sizes(vision)
    window_size = vision.get("window_size", 112)
    if window_size < sizes["patch_size"] * sizes["spatial_merge_size"]:
        raise ValueError(f"window_size {window_size} is smaller than a token")
    tower = WindowTower(
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        out_hidden_size=vision["out_hidden_size"],
        window_size=window_size,
        full_attention_blocks=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        **sizes,
    )
    per_second = vision.get("tokens_per_second", 4)
    return read_vision_language(directory, config, tower, tokens_per_second=per_second)
