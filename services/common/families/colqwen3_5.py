"""ColQwen3.5: Qwen3.5 with a projection that makes a vector of each token, for late interaction.

The format is that of colpali-engine, in which the VultronRetriever checkpoints are published:
`ColQwen3_5` in config.json, the tensors of a Qwen3.5 without the prefix `model.`, and
`custom_text_proj`. The prompts are those of ColQwen3.

The checkpoints were trained with causal or with bidirectional attention, and the architecture has
the same name in both cases: `retrieval_attention_contract` in config.json says which one. Only
causal attention is implemented. A config.json without the key is refused, because a guess would
give vectors that look right and rank wrongly.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.families import qwen3_5
from services.common.families.colqwen3 import check_prompts
from services.common.model_spec import ModelSpec, UnsupportedOption

_CONTRACT = "retrieval_attention_contract"


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    section = config["text_config"]  # the architecture has a tower, so config.json has sections
    stated = {value for each in (config, section) if (value := each.get(_CONTRACT)) is not None}
    if stated != {"causal"}:
        found = ", ".join(sorted(map(repr, stated))) or "(none)"
        raise UnsupportedOption(f"{_CONTRACT} {found} is not supported; supported: 'causal'")
    # One layer whose vectors may be cut to several lengths, or a layer for each length.
    if config.get("head_dims"):
        raise UnsupportedOption(f"head_dims {config['head_dims']!r} is not supported")
    check_prompts(directory)
    spec = qwen3_5.read(directory, config)
    names = replace(spec.checkpoint, text_prefix="language_model.", vision_prefix="visual.")
    return replace(spec, checkpoint=names)
