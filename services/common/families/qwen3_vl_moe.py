"""Qwen3-VL with a mixture of experts in its language model.

As in transformers, the probabilities of a token's experts are always scaled to a sum of 1, and
`norm_topk_prob` is ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families import qwen3_vl
from services.common.families.qwen3_moe import read_moe
from services.common.model_spec import ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    return qwen3_vl.read_vision_language(
        directory, config, moe=read_moe(config["text_config"]), head_dim=None, num_kv_heads=16
    )
