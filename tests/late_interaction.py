"""A tiny ColQwen3 or ColQwen3.5, and what its authors' code makes of inputs in transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.families import read_spec
from tests.parity.oracle import Oracle
from tests.search_checkpoints import hybrid_late_config, late_config

DIMENSIONS = 24


class Late:
    """A checkpoint of ColQwen3 over a Qwen3-VL that was saved with its head or without it, or of
    ColQwen3.5 over a Qwen3.5.

    Args:
        base: the Qwen3-VL or Qwen3.5, whose files are rewritten.
    """

    def __init__(self, base: Oracle) -> None:
        hidden = base.spec.text.hidden_size
        generator = torch.Generator().manual_seed(11)
        self.weight = torch.randn(DIMENSIONS, hidden, generator=generator) / hidden**0.5
        self.bias = torch.randn(DIMENSIONS, generator=generator) / 4
        rewrite(base.directory, self.weight, self.bias)
        self.oracle = Oracle(base.directory, base.model, read_spec(base.directory))

    @torch.no_grad()
    def vectors(self, **inputs: Any) -> Tensor:
        """Vectors `[T, n]` of one prompt's tokens: `ColQwen3.forward` of the card, or
        `ColQwen3_5.forward` of colpali-engine.
        """
        hidden = self.oracle.model.model(**inputs).last_hidden_state
        found = torch.nn.functional.linear(hidden, self.weight, self.bias)
        lengths = found.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(found.dtype).eps)
        return (found / lengths)[0]


def rewrite(directory: Path, weight: Tensor, bias: Tensor) -> None:
    """Gives a base model's files the names of the model for late interaction, and adds the
    projection.
    """
    path = directory / "model.safetensors"
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(path)
    if config["model_type"] == "qwen3_5":
        tensors.pop("lm_head.weight", None)
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        layer, config = "custom_text_proj", hybrid_late_config(config, DIMENSIONS)
    else:
        tensors = {f"vlm.{name}": tensor for name, tensor in tensors.items()}
        layer, config = "embedding_proj_layer", late_config(config, DIMENSIONS)
    tensors |= {f"{layer}.weight": weight, f"{layer}.bias": bias}
    save_file(tensors, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def max_sim(query: Tensor, document: Tensor) -> float:
    """`ColQwen3Processor.score_multi_vector` of the card, for one pair."""
    products = torch.einsum("bnd,csd->bcns", query[None], document[None])
    return float(products.max(dim=3)[0].sum(dim=2))
