"""Language models. Dense families share one transformer; their `TextSpec` holds what differs.

`LAYER_KINDS` lists the parts that some models have in place of a dense layer's parts. Each kind is
one file and one line here, and only the models that need it import it.
"""

import importlib
from typing import Any

LAYER_KINDS = {
    "experts": ("services.decoder.models.moe", "MoE"),
    "linear_attention": ("services.decoder.models.gated_delta_net", "GatedDeltaNet"),
}


def layer_kind(name: str) -> type[Any]:
    """Returns the class of a kind."""
    module, found = LAYER_KINDS[name]
    return getattr(importlib.import_module(module), found)
