"""Language models. Dense families share one transformer; their `TextSpec` holds what differs.

`LAYER_KINDS` lists the parts that some models have in place of a dense layer's parts. Each kind has
its own file and a line here. The file is imported only for models that need the kind.
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
