"""The family of dense Qwen3 models, whose attention normalizes each query and key head."""

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
    """Reads the config.json of a dense Qwen3 model. `families.read_spec` calls it."""
    # If config.json lacks `head_dim` or `num_key_value_heads`, these defaults of transformers
    # apply.
    text = read_text(
        config,
        head_dim=128,
        num_kv_heads=32,
        qk_norm=True,
        sliding_window=qwen_sliding_window(config),
    )
    return read_model(directory, config, text, conversation=QWEN_CONVERSATION)
