"""Qwen2-VL and Qwen2.5-VL: published configurations, their two forms, and refusals."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from services.common.families import read_spec
from services.common.families.keys import unknown_keys
from services.common.families.qwen2_5_vl import WindowTower
from services.common.model_spec import ModelSpec, ModelSpecError, UnsupportedOption
from services.common.whole_clips import WholeClips

IDS = {
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656,
}  # fmt: skip
TEXT = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768, "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
SEVEN_B: dict[str, Any] = TEXT | IDS | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2: dict[str, Any] = SEVEN_B | {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
        "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip


def read(directory: Path, config: dict[str, Any], **changes: object) -> ModelSpec:
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_spec(directory)


def test_the_published_forms_are_read(tmp_path: Path) -> None:
    spec = read(tmp_path, SEVEN_B)
    text, vision = spec.text, spec.vision_part
    assert (text.num_heads, text.num_kv_heads, text.head_dim) == (28, 4, 128)
    assert (text.qkv_bias, text.o_bias, text.qk_norm, text.sliding_window) == (
        True,
        False,
        False,
        None,
    )
    assert text.rope.mrope_section == (16, 24, 24) and not text.rope.interleaved
    assert text.rope.theta == 1e6 and text.max_position_embeddings == 128_000
    tower = vision.tower
    assert isinstance(tower, WindowTower) and tower.window_tokens == 4
    assert (tower.head_dim, tower.num_features, tower.full_attention_blocks) == (
        80,
        1,
        (7, 15, 23, 31),
    )
    geometry, video = vision.geometry, vision.video
    assert (geometry.token_size, geometry.min_pixels, geometry.max_pixels) == (28, 3136, 12845056)
    assert isinstance(video, WholeClips) and video.tokens_per_second == 2
    assert (spec.checkpoint.text_prefix, spec.checkpoint.vision_prefix) == ("model.", "visual.")
    assert unknown_keys(tmp_path) == []
    second = read(tmp_path, QWEN2)
    assert second.text == text and second.vision_part.geometry == geometry
    assert second.vision_part.tower.intermediate_size == 5120
    assert isinstance(second.vision_part.video, WholeClips)
    assert second.vision_part.video.tokens_per_second is None
    assert unknown_keys(tmp_path) == []


@pytest.mark.parametrize("config", [SEVEN_B, QWEN2])
def test_a_nested_text_config_is_the_same_model(config: dict[str, Any], tmp_path: Path) -> None:
    flat = read(tmp_path, config)
    nested = {key: value for key, value in config.items() if key not in TEXT}
    assert read(tmp_path, nested, text_config=TEXT) == flat


@pytest.mark.parametrize("is_indexed", [False, True])
def test_names_of_either_form_are_found_in_the_files(is_indexed: bool, tmp_path: Path) -> None:
    names = [
        "lm_head.weight",
        "model.language_model.norm.weight",
        "model.visual.merger.ln_q.weight",
    ]
    if is_indexed:
        index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
        data = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    names_read = read(tmp_path, SEVEN_B).checkpoint
    assert names_read.text_prefix == "model.language_model."
    assert names_read.vision_prefix == "model.visual."
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4)  # refused where weights are read
    assert read(tmp_path, SEVEN_B).checkpoint.text_prefix == "model."


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (SEVEN_B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (SEVEN_B, {"in_chans": 1}, "in_chans 1"),
        (QWEN2, {"spatial_patch_size": 16}, "spatial_patch_size 16"),
        (SEVEN_B, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (SEVEN_B, {"patch_size": 16, "spatial_patch_size": 16}, "patch_size 14"),
    ],
)
def test_options_of_a_tower_that_are_not_served(
    config: dict[str, Any], changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedOption, match=named):
        read(tmp_path, config, vision_config=config["vision_config"] | changes)


def test_sliding_windows_and_windows_below_a_token_are_refused(tmp_path: Path) -> None:
    sliding = read(tmp_path, SEVEN_B, use_sliding_window=True, max_window_layers=20)
    assert sliding.text.sliding_window == 32768
    with pytest.raises(ModelSpecError, match="window_size 20"):
        read(tmp_path, SEVEN_B, vision_config=SEVEN_B["vision_config"] | {"window_size": 20})


def test_the_work_of_windows_is_less_than_that_of_whole_images(tmp_path: Path) -> None:
    tower = read(tmp_path, SEVEN_B).vision_part.tower
    assert tower.attended(64) == 64 and tower.attended(6400) == (4 * 6400 + 28 * 64) / 32
    assert tower.block_weights == 4 * 1280**2 + 3 * 1280 * 3420
