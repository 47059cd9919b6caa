"""A tiny checkpoint with a vision tower, and what the tower makes of an image in this process.

Imports torch, which takes seconds: tests import it where they use it, for each process of the test
run collects all files.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weights import load_weights
from services.encoder.decoding.preprocess import resize
from services.encoder.models.qwen3_vl import VisionTower
from tests.image_processor import write_image_processor, write_video_processor
from tests.in_process_decoder import preprocess
from tests.tower import cpu_ops, pack_patches

CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4,
    "text_config": {
        "vocab_size": 10, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
    },
    "vision_config": {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "in_channels": 3,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 64, "out_hidden_size": 48, "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip


def write_model(directory: Path) -> None:
    """A checkpoint with random weights."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_image_processor(directory, 1024, 262144)
    write_video_processor(directory, 4096, 1 << 20)
    tower = _build(read_spec(directory))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in tower.named_parameters():
        shape = tower.weight_map.shapes.get(name, tuple(parameter.shape))
        values = torch.randn(shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5
        tensors[tower.weight_map.checkpoint_name(name)] = values
    save_file(tensors, directory / "model.safetensors")


def _build(config: ModelSpec) -> VisionTower:
    tower = config.vision_part.tower
    with torch.device("meta"):
        return VisionTower(tower, cpu_ops(tower), config.checkpoint.vision_prefix)


def expected(config: ModelSpec, data: bytes) -> np.ndarray:
    """The same tower in this process, alone with the image."""
    tower = _loaded(config)
    with Image.open(io.BytesIO(data)) as image:
        (unit,) = config.vision_part.geometry.units((image.height, image.width))
    pixels = preprocess(data, unit, config.vision_part.geometry)
    patches = pack_patches(pixels.reshape(-1), [unit.grid], 16, 2, torch.float32)
    with torch.inference_mode():
        return tower(patches, tower.layout([unit.grid])).numpy()


def expected_pair(
    config: ModelSpec, frames: Sequence[np.ndarray], size: tuple[int, int]
) -> np.ndarray:
    """Likewise of two frames, resized to `size`."""
    tower, grid = _loaded(config), (1, size[0] // 16, size[1] // 16)
    pixels = torch.cat([resize(torch.from_numpy(frame), *size).reshape(-1) for frame in frames])
    patches = tower.ops.pack_pairs(pixels, [grid], 16, 2, torch.float32)
    with torch.inference_mode():
        return tower(patches, tower.layout([grid])).numpy()


def _loaded(config: ModelSpec) -> VisionTower:
    tower = _build(config)
    checkpoint = Checkpoint.open(config.directory)
    load_weights(tower, checkpoint, tower.weight_map, device="cpu", dtype=torch.float32)
    return tower
