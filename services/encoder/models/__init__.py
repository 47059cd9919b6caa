"""The vision models by architecture; `engine_main` imports the one that it serves."""

import importlib

from services.encoder.models.base import VisionModel

MODELS = {
    "Qwen3_5ForConditionalGeneration": "services.encoder.models.qwen3_vl:Qwen3VLVisionModel",
    "Qwen3_5MoeForConditionalGeneration": "services.encoder.models.qwen3_vl:Qwen3VLVisionModel",
    "Qwen3VLForConditionalGeneration": "services.encoder.models.qwen3_vl:Qwen3VLVisionModel",
    "Qwen3VLMoeForConditionalGeneration": "services.encoder.models.qwen3_vl:Qwen3VLVisionModel",
}


def model_class(architecture: str) -> type[VisionModel]:
    """The class that serves an architecture of config.json.

    Raises:
        ValueError: none does; the message lists those that are served.
    """
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture} has no vision model; supported: {', '.join(MODELS)}"
        )
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)
