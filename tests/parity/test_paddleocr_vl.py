"""PaddleOCR-VL: the sizes and pixels of pages are its image processor's; published and refused
options; names of its files.
"""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import (
    PaddleOCRVLImageProcessor,
)

from services.common.errors import InvalidImage
from services.common.families import read_spec
from services.common.families.keys import unknown_keys
from services.common.families.paddleocr_vl import PageGeometry, SiglipTower
from services.common.model_spec import ModelSpec, UnsupportedOption
from services.encoder.operations.ops import Ops
from tests.in_process_decoder import preprocess
from tests.parity.oracle import in_rows
from tests.tower import cpu_ops

VISION: dict[str, Any] = {
    "architectures": ["PaddleOCRVisionModel"], "attention_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384,
    "intermediate_size": 4304, "layer_norm_eps": 1e-06, "model_type": "paddleocr_vl",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27, "pad_token_id": 0,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl",
    "compression_ratio": 1.0, "head_dim": 128, "hidden_act": "silu", "hidden_dropout_prob": 0.0,
    "hidden_size": 1024, "ignored_index": -100, "image_token_id": 100295,
    "intermediate_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 16,
    "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False, "video_token_id": 101307,
    "vision_config": VISION, "vision_start_token_id": 101305, "vision_end_token_id": 101306,
    "vocab_size": 103424, "weight_share_add_bias": True, "use_3d_rope": True,
    "rope_is_neox_style": True,
}  # fmt: skip
PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "PaddleOCRVLImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_pixels": 1003520, "merge_size": 2, "min_pixels": 112896,
    "patch_size": 14, "processor_class": "PaddleOCRVLProcessor", "resample": 3,
    "rescale_factor": 1 / 255, "temporal_patch_size": 1,
}  # fmt: skip


def read(directory: Path, config: dict[str, Any] = CONFIG, **processor: Any) -> ModelSpec:
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | processor))
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(directory)


def test_the_published_form_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path)
    text, vision = spec.text, spec.vision_part
    assert (text.num_heads, text.num_kv_heads, text.head_dim, text.num_layers) == (16, 2, 128, 18)
    assert not (text.qkv_bias or text.o_bias or text.mlp_bias or text.tie_word_embeddings)
    assert text.rope.mrope_section == (16, 24, 24) and not text.rope.interleaved
    tower = vision.tower
    assert isinstance(tower, SiglipTower)
    assert (tower.num_position_embeddings, tower.head_dim, tower.out_hidden_size) == (729, 72, 1024)
    assert isinstance(vision.geometry, PageGeometry)
    assert (vision.geometry.min_pixels, vision.geometry.max_pixels) == (112896, 1003520)
    assert vision.video is None and "takes none" in vision.no_video
    assert spec.checkpoint.vision_prefixes == ("visual.", "mlp_AR.")
    assert spec.checkpoint.ignores("visual.vision_model.head.probe")
    assert unknown_keys(tmp_path) == []
    top = [name for name in CONFIG if name.endswith("_token_id") or name == "architectures"]
    section = {name: value for name, value in CONFIG.items() if name not in top}
    whole = {name: CONFIG[name] for name in (*top, "vision_config", "tie_word_embeddings")}
    whole |= {"text_config": section}
    assert read(tmp_path, whole).text == text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_3d_rope": False}, "use_3d_rope False"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style False"),
        ({"compression_ratio": 2.0}, "compression_ratio 2.0"),
        ({"vision_config": VISION | {"hidden_act": "silu"}}, "vision hidden_act 'silu'"),
    ],
)
def test_options_that_are_not_served(changes: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=named):
        read(tmp_path, CONFIG | changes)


def test_another_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="image_processor_type"):
        read(tmp_path, image_processor_type="Qwen2VLImageProcessor")


def test_sizes_are_the_processors(tmp_path: Path) -> None:
    geometry, rng = read(tmp_path).vision_part.geometry, random.Random(0)
    options = {k: v for k, v in PROCESSOR.items() if not k.endswith(("type", "class"))}
    processor = PaddleOCRVLImageProcessor(**options)  # type: ignore[arg-type]
    refused = 0
    for _ in range(500):
        size = rng.randint(1, rng.choice((40, 3000))), rng.randint(1, rng.choice((40, 3000)))
        limits = {"min_pixels": 112896, "max_pixels": 1003520}
        try:
            expected = processor.get_number_of_image_patches(*size, limits)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidImage):
                geometry.units(size)
            continue
        (unit,) = geometry.units(size)
        assert unit.num_patches == expected, size
        assert geometry.is_of(unit, size), size
    assert 3 < refused < 100


@pytest.mark.parametrize("size", [(20, 300), (300, 25), (420, 333), (9, 9)], ids=str)
def test_pixel_values_are_equal(size: tuple[int, int], tmp_path: Path) -> None:
    spec = read(tmp_path, min_pixels=9000, max_pixels=90_000).vision_part
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    options = {k: v for k, v in PROCESSOR.items() if not k.endswith(("type", "class"))}
    options |= {"min_pixels": 9000, "max_pixels": 90_000}
    processor: Any = PaddleOCRVLImageProcessor(**options)  # type: ignore[arg-type]
    theirs = processor(images=[image], return_tensors="pt")
    file = io.BytesIO()
    image.save(file, "PNG")
    (unit,) = spec.geometry.units(size)
    assert list(unit.grid) == theirs["image_grid_thw"][0].tolist()
    pixels = preprocess(file.getvalue(), unit, spec.geometry)
    ops: Ops = cpu_ops(spec.tower)
    ours = ops.pack_patches(pixels.reshape(-1), [unit.grid], 14, 2, torch.float32)
    assert torch.equal(in_rows(ours, [unit.grid[1:]], spec.tower), theirs["pixel_values"])
