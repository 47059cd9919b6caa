"""Mistral without sliding window: 7B from v0.2 on, Nemo, Small."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families.dense import read_model, read_text
from services.common.model_spec import ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    # 4096 is transformers' default of an absent field. Published models without a window have null.
    window = config.get("sliding_window", 4096)
    text = read_text(config, num_kv_heads=8, qkv_bias=False, o_bias=False, sliding_window=window)
    return read_model(directory, config, text)
