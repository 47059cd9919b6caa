"""Qwen3 with a mixture of experts in place of the MLP of most layers.

As in transformers, a sliding window applies to all layers, and `max_window_layers` is ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from services.common.families.dense import (
    QWEN_CONVERSATION,
    qwen_sliding_window,
    read_model,
    read_size,
    read_text,
)
from services.common.model_spec import ModelSpec, MoESpec, UnsupportedOption


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    text = read_text(
        config,
        num_kv_heads=4,
        qk_norm=True,
        sliding_window=qwen_sliding_window(config, by_layer=False),
        moe=read_moe(config, norm_topk_prob=bool(config.get("norm_topk_prob", False))),
    )
    return read_model(directory, config, text, conversation=QWEN_CONVERSATION)


def read_moe(
    config: Mapping[str, Any], *, norm_topk_prob: bool = True, has_shared_expert: bool = False
) -> MoESpec:
    """Reads the mixture of experts of a config.json, or of its `text_config`.

    Args:
        config: the JSON object that has the language model's fields.
        norm_topk_prob: True if the probabilities of a token's experts are scaled to a sum of 1.
        has_shared_expert: True if every token also goes to a shared expert.

    Raises:
        UnsupportedOption: an option is not implemented. The message names the option.
    """
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts, top_k = read_size(config, count), read_size(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedOption(
            f"num_experts_per_tok {top_k} is not supported: there are {num_experts} experts"
        )
    shared = read_size(config, "shared_expert_intermediate_size") if has_shared_expert else 0
    step = read_size(config, "decoder_sparse_step", 1)
    layers = range(read_size(config, "num_hidden_layers"))
    mlp_only = cast("list[int]", config.get("mlp_only_layers") or [])
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_size(config, "moe_intermediate_size"),
        norm_topk_prob=norm_topk_prob,
        shared_intermediate_size=shared,
        dense_layers=frozenset(i for i in layers if i in mlp_only or (i + 1) % step),
    )
