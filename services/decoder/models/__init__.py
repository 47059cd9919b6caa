"""Language models by their architecture in config.json.

Every dense text family so far is the shared transformer; what differs is in its `TextSpec`. A
family with other mathematics: one file here and one line below.
"""

import importlib

_TRANSFORMER = "services.decoder.models.transformer:Transformer"
MODELS = {
    "Qwen3VLForConditionalGeneration": _TRANSFORMER,
    "Qwen3ForCausalLM": _TRANSFORMER,
    "Qwen2ForCausalLM": _TRANSFORMER,
    "LlamaForCausalLM": _TRANSFORMER,
    "MistralForCausalLM": _TRANSFORMER,
}


def resolve(architecture: str) -> type:
    """The class that serves an architecture; its module is imported here.

    Raises:
        ValueError: the architecture is not supported; the message lists those that are.
    """
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture} is not supported; supported: {', '.join(sorted(MODELS))}"
        )
    module, _, name = MODELS[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
