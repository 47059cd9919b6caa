"""Dense Qwen2 and Qwen2.5: the q, k and v projections always have biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families.dense import (
    QWEN_CONVERSATION,
    qwen_sliding_window,
    read_model,
    read_text,
)
from services.common.model_spec import ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    text = read_text(
        config,
        num_kv_heads=32,
        qkv_bias=True,
        o_bias=False,
        sliding_window=qwen_sliding_window(config),
    )
    return read_model(directory, config, text, conversation=QWEN_CONVERSATION)
