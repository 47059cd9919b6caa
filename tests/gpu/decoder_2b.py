"""The decoder of the 2B shape on a GPU, and how its rows are compared."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

GPU = torch.device("cuda", 0)
BLOCK_SIZE = 16
TEXT_2B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False,
    "eos_token_id": 151645, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
    "num_position_embeddings": 2304, "out_hidden_size": 2048,
    "deepstack_visual_indexes": [0, 1, 2],
}  # fmt: skip
IDS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "tie_word_embeddings": True,
}  # fmt: skip


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 of the worst row."""
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())


def options(**changes: object) -> dict[str, object]:
    return {
        "device": "cuda:0", "dtype": "bfloat16", "block_size": 16,
        "max_num_sequences": 64, "max_batched_tokens": 4096, "max_model_len": 4096,
        "kv_cache_bytes": 8 << 30,
    } | changes  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 150000, int(n)).tolist() for n in rng.integers(20, 300, count)]
