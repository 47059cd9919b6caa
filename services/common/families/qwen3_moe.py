"""Qwen3 with a mixture of experts in place of the MLP of most layers.

As in transformers, a sliding window is that of all layers, whatever `max_window_layers` says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families.dense import (
    QWEN_CONVERSATION,
    qwen_sliding_window,
    read_model,
    read_moe,
    read_text,
)
from services.common.model_spec import ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    text = read_text(
        config,
        num_kv_heads=4,
        qk_norm=True,
        sliding_window=qwen_sliding_window(config, by_layer=False),
        moe=read_moe(config, norm_topk_prob=bool(config.get("norm_topk_prob", False))),
    )
    return read_model(directory, config, text, conversation=QWEN_CONVERSATION)
