"""ColQwen3: Qwen3-VL with a projection that makes a vector of each token, for late interaction.

The format is that of TomoroAI's checkpoints: `ColQwen3` in config.json, with the options of
Qwen3-VL beside `embed_dim`. Checkpoints of other names (OpsColQwen3Model, adapters of
colpali-engine) differ in their prompts, their attention or their tensors, and are not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.families import qwen3_vl
from services.common.model_spec import ModelSpec, UnsupportedOption, read_json

_PROCESSOR = "processor_config.json"
# Parts of the prompts that a processor may change; see `services.gateway.prompts.search_prompts`.
_PROMPTS = {
    "query_prefix": "",
    "visual_prompt_prefix": (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
    ),
    "visual_prompt_suffix": "<|im_end|><|endoftext|>",
}


def read(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    check_prompts(directory)
    spec = qwen3_vl.read(directory, config)
    names = replace(
        spec.checkpoint,
        text_prefix="vlm.model.language_model.",
        vision_prefix="vlm.model.visual.",
        ignored=(*spec.checkpoint.ignored, r"vlm\.lm_head\."),
    )
    return replace(spec, checkpoint=names)


def check_prompts(directory: Path) -> None:
    """Raises UnsupportedOption if the processor's file changes the prompts of the model's code."""
    path = directory / _PROCESSOR
    processor = read_json(path) if path.exists() else {}
    for name, served in _PROMPTS.items():
        if processor.get(name) not in (None, served):
            raise UnsupportedOption(
                f"{name} {processor[name]!r} is not supported; supported: {served!r}", _PROCESSOR
            )
