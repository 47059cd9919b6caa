"""Dense Qwen3: RMSNorm on each query and key head."""

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
    # `head_dim` and `num_kv_heads` are the defaults of transformers for fields that the file lacks.
    text = read_text(
        config,
        head_dim=128,
        num_kv_heads=32,
        qk_norm=True,
        sliding_window=qwen_sliding_window(config),
    )
    return read_model(directory, config, text, conversation=QWEN_CONVERSATION)
