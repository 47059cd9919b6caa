"""Qwen3.5 with a mixture of experts and a shared expert in place of each MLP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families.dense import QWEN_CONVERSATION, read_model
from services.common.families.qwen3_5 import read_hybrid_text, read_parts
from services.common.families.qwen3_moe import read_moe
from services.common.model_spec import ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    moe = read_moe(config.get("text_config") or config, has_shared_expert=True)
    text = read_hybrid_text(config, num_kv_heads=2, moe=moe)
    vision, checkpoint = read_parts(directory, config)
    return read_model(
        directory, config, text, vision=vision, checkpoint=checkpoint,
        conversation=QWEN_CONVERSATION,
    )  # fmt: skip
