"""Language models by their architecture in config.json. A model: one file and one line here."""

import importlib

MODELS = {
    "LlamaForCausalLM": "services.decoder.models.qwen3_vl:Qwen3VLLanguageModel",
    "MistralForCausalLM": "services.decoder.models.qwen3_vl:Qwen3VLLanguageModel",
    "Qwen2ForCausalLM": "services.decoder.models.qwen3_vl:Qwen3VLLanguageModel",
    "Qwen3ForCausalLM": "services.decoder.models.qwen3_vl:Qwen3VLLanguageModel",
    "Qwen3VLForConditionalGeneration": "services.decoder.models.qwen3_vl:Qwen3VLLanguageModel",
}


def resolve(architecture: str) -> type:
    """The class that serves an architecture; it is imported only now.

    Raises:
        ValueError: no such model; lists those that are.
    """
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture} is not supported; supported: {', '.join(sorted(MODELS))}"
        )
    module, _, name = MODELS[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
