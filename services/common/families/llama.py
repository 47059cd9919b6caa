"""Llama 3.x, and other checkpoints of its architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.families.dense import read_model, read_text
from services.common.model_spec import ConversationSpec, ModelSpec


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    text = read_text(config, mlp_bias=bool(config.get("mlp_bias", False)))
    conversation = ConversationSpec(tool_parsers=("llama3_json",), thinks=True)
    return read_model(directory, config, text, conversation=conversation)
