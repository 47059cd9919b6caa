"""A Qwen3-VL checkpoint directory's JSON files as typed values. No torch: the gateway has none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.common.image_geometry import ImageLimits

SUPPORTED_ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)


class ModelConfigError(ValueError):
    """The directory is not a model that can be served; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    max_position_embeddings: int
    tie_word_embeddings: bool


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    deepstack_indexes: tuple[int, ...]

    @property
    def levels(self) -> int:
        """Tensors per image: the merged output and one per DeepStack tap."""
        return 1 + len(self.deepstack_indexes)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole checkpoint directory.

    Attributes:
        directory: where it lies.
        name: the directory's last name; what `/v1/models` shows unless told otherwise.
        image_limits: from preprocessor_config.json.
        eos_token_ids: from generation_config.json, or config.json without one.
        generation: the rest of generation_config.json, as sampling defaults.
    """

    directory: Path
    name: str
    architecture: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    image_limits: ImageLimits
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, Any]

    @classmethod
    def from_directory(cls, directory: Path | str) -> "ModelConfig":
        """Reads config.json, preprocessor_config.json and generation_config.json.

        Raises:
            ModelConfigError: a file is missing or malformed, or the architecture is not served.
        """
        directory = Path(directory).resolve()
        config = _read_json(directory / "config.json")
        architecture = (config.get("architectures") or ["(none)"])[0]
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelConfigError(
                f"{directory}: architecture {architecture} is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        try:
            text = _text_config(config)
            vision = _vision_config(config["vision_config"])
            eos = generation.get("eos_token_id", config["text_config"].get("eos_token_id"))
            return cls(
                directory=directory,
                name=directory.name,
                architecture=architecture,
                text=text,
                vision=vision,
                image_token_id=config["image_token_id"],
                image_limits=_image_limits(
                    _read_json(directory / "preprocessor_config.json"), vision
                ),
                eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or ()),
                generation=generation,
            )
        except KeyError as error:
            raise ModelConfigError(f"{directory}: the config lacks {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", value)


def _text_config(config: Mapping[str, Any]) -> TextConfig:
    text = config["text_config"]
    if text.get("hidden_act", "silu") != "silu" or text.get("attention_bias", False):
        raise ModelConfigError("only silu MLPs and attention without bias are supported")
    # `rope_parameters` is transformers 5's spelling of `rope_scaling` + `rope_theta`.
    rope: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelConfigError(f"rope_type {rope['rope_type']} is not supported")
    heads = text["num_attention_heads"]
    sections = rope.get("mrope_section", (24, 20, 20))
    return TextConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads", heads),
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 500_000.0))),
        mrope_section=(sections[0], sections[1], sections[2]),
        max_position_embeddings=text["max_position_embeddings"],
        tie_word_embeddings=bool(
            config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        ),
    )


def _vision_config(vision: Mapping[str, Any]) -> VisionConfig:
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelConfigError(f"vision hidden_act {vision['hidden_act']} is not supported")
    return VisionConfig(
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
    )


def _image_limits(processor: Mapping[str, Any], vision: VisionConfig) -> ImageLimits:
    size = processor["size"]
    return ImageLimits(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
