"""PaddleOCR-VL: an ERNIE-4.5 language model with sectioned M-RoPE, and a SigLIP tower for images of
any size. It reads pages and takes no videos.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from services.common.families.dense import (
    expect_given,
    has_tensors,
    read_model,
    read_text,
    text_checkpoint,
)
from services.common.families.image_processor import DEFAULTS as QWEN_DEFAULTS
from services.common.families.image_processor import read_vision_spec
from services.common.geometry import Geometry, Size, Unit
from services.common.model_spec import CheckpointSpec, ModelSpec, TowerSpec, expect

_PROCESSORS = ("PaddleOCRVLImageProcessor", "PaddleOCRVLImageProcessorFast")
_PROCESSOR_DEFAULTS = QWEN_DEFAULTS | {
    "image_processor_type": _PROCESSORS[0],
    "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
    "temporal_patch_size": 1,
}
# Options of the authors' own code, which transformers ignores, with the only values it computes.
_FIXED = {"use_3d_rope": True, "rope_is_neox_style": True, "compression_ratio": 1.0}
_UNUSED = r"(model\.)?visual\.vision_model\.(head\.|embeddings\.packing_position_embedding\.)"


@dataclass(frozen=True, slots=True)
class SiglipTower(TowerSpec):
    """The vision tower of PaddleOCR-VL.

    Attributes:
        num_position_embeddings: entries of the learned position table.
        layer_norm_eps: epsilon of the norms in the blocks and behind them.
        projector_prefix: prefix of the projector's tensors in the files.
    """

    kind: ClassVar[str] = "paddleocr_vl"
    num_position_embeddings: int
    layer_norm_eps: float = 1e-6
    projector_prefix: str = "mlp_AR."


@dataclass(frozen=True, slots=True)
class PageGeometry(Geometry):
    """A geometry that scales images with a side below a token's side up before it resizes them."""

    def resized(self, size: Size) -> Size:
        return Geometry.resized(self, self._enlarged(size))

    def is_of(self, unit: Unit, size: Size) -> bool:
        return Geometry.is_of(self, unit, self._enlarged(size))

    def _enlarged(self, size: Size) -> Size:
        (height, width), side = size, self.token_size
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return height, width


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    section: dict[str, Any] = {"rms_norm_eps": 1e-5, **(config.get("text_config") or config)}
    for name, value in _FIXED.items():
        expect_given(section, name, value)
    # transformers ties the embeddings if either of the two objects says so.
    tied = config.get("tie_word_embeddings", True) or section.get("tie_word_embeddings", False)
    has_bias = bool(section.get("use_bias", False))
    text = read_text(
        section | {"tie_word_embeddings": tied},
        head_dim=128,
        num_kv_heads=2,
        rope_theta=500_000.0,
        mrope_section=(16, 24, 24),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
    )
    names = _names(directory)
    tower = _read_tower(config["vision_config"], text.hidden_size, names.projector_prefix)
    vision = read_vision_spec(
        directory,
        tower,
        config["image_token_id"],
        types=_PROCESSORS,
        defaults=_PROCESSOR_DEFAULTS,
        geometry=PageGeometry,
    )
    return read_model(
        directory,
        config,
        replace(text, rope=replace(text.rope, interleaved=False)),
        vision=replace(vision, no_video="the architecture takes none"),
        checkpoint=names,
    )


def _read_tower(vision: Mapping[str, Any], out_hidden_size: int, projector: str) -> SiglipTower:
    activation = "gelu_pytorch_tanh"
    expect("vision hidden_act", vision.get("hidden_act", activation), activation)
    rotary = vision.get("rope_parameters") or {}
    for name, served in (("rope_type", ("axial", "default")), ("rope_theta", (10_000.0,))):
        expect(f"vision rope_parameters.{name}", rotary.get(name, served[0]), *served)
    patch_size = vision.get("patch_size", 14)
    return SiglipTower(
        depth=vision.get("num_hidden_layers", 27),
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 4304),
        num_heads=vision.get("num_attention_heads", 16),
        in_channels=vision.get("num_channels", 3),
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        out_hidden_size=out_hidden_size,
        num_position_embeddings=(vision.get("image_size", 384) // patch_size) ** 2,
        layer_norm_eps=vision.get("layer_norm_eps", 1e-6),
        projector_prefix=projector,
    )


def _names(directory: Path) -> CheckpointSpec:
    """Names of the tensors. Published checkpoints have the first form, see `qwen2_vl`."""
    if has_tensors(directory, "model.language_model."):
        names = text_checkpoint("model.language_model.", "model.visual.")
        projector = "model.projector."
    else:
        names, projector = text_checkpoint("model.", "visual."), "mlp_AR."
    return replace(names, projector_prefix=projector, ignored=(*names.ignored, _UNUSED))
