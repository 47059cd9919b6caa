"""Language models. Dense families share one transformer; their `TextSpec` holds what differs.

`LAYER_KINDS` are what some models have in place of a layer's parts: one file and one line each,
imported by the models that need it.
"""

import importlib
from collections.abc import Callable
from typing import Any

LAYER_KINDS = {
    "experts": ("services.decoder.models.moe", "MoE"),
    "linear_attention": ("services.decoder.models.gated_delta_net", "GatedDeltaNet"),
}


def layer_kind(name: str) -> Callable[..., Any]:
    """The class of a kind."""
    module, found = LAYER_KINDS[name]
    return getattr(importlib.import_module(module), found)
