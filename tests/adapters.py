"""Adapters in PEFT's layout over tiny checkpoints, and what PEFT makes of them."""

import copy
import warnings
from pathlib import Path
from typing import Any, cast

import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of an import that PEFT has not renamed yet
    from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.parity.oracle import Oracle

# Every linear layer of the language model's attention and MLPs.
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The same with the tower's, by a regular expression.
EVERYWHERE = (
    r".*(\.(q|k|v|o|gate|up|down)_proj|attn\.qkv|attn\.proj|linear_fc[12]|in_proj_.*|out_proj)"
)


def make_adapter(
    model: PreTrainedModel, directory: Path, seed: int = 1, scale: float = 0.3, **config: Any
) -> PeftModel:
    """Makes an adapter whose every factor matters, saves it, and returns the adapted model."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied embeddings, which the tests are about
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**chosen)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
            elif "lora_" in name:
                width = parameter.shape[1] if "A" in name else parameter.shape[1] * 8
                parameter.normal_(0.0, scale * 4 / width**0.5, generator=generator)
            elif "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.2 * noise * parameter.std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(str(directory))
    return adapted


def adapted_oracle(oracle: Oracle, directory: Path, seed: int = 1, **config: Any) -> Oracle:
    """Returns an oracle of a checkpoint with an adapter, which is saved in a directory."""
    adapted = make_adapter(oracle.model, directory, seed, **config)
    return Oracle(oracle.directory, cast(PreTrainedModel, adapted.base_model.model), oracle.spec)


def merged(model: PeftModel) -> PreTrainedModel:
    """Folds a copy of the adapter into the weights, as PEFT does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(model).merge_and_unload()
