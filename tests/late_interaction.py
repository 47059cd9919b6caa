"""A tiny ColQwen3, and what the code of its model card makes of inputs in transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.families import read_spec
from tests.parity.oracle import Oracle
from tests.search_checkpoints import late_config

DIMENSIONS = 24


class Late:
    """A checkpoint of ColQwen3 over a Qwen3-VL that was saved with its head or without it.

    Args:
        base: the Qwen3-VL, whose files are rewritten.
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
        """Vectors `[T, n]` of one prompt's tokens: `ColQwen3.forward` of the card."""
        hidden = self.oracle.model.model(**inputs).last_hidden_state
        found = torch.nn.functional.linear(hidden, self.weight, self.bias)
        lengths = found.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(found.dtype).eps)
        return (found / lengths)[0]


def rewrite(directory: Path, weight: Tensor, bias: Tensor) -> None:
    """Gives a Qwen3-VL's files the names of ColQwen3's, and adds the projection."""
    path = directory / "model.safetensors"
    tensors = {f"vlm.{name}": tensor for name, tensor in load_file(path).items()}
    tensors |= {"embedding_proj_layer.weight": weight, "embedding_proj_layer.bias": bias}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(late_config(config, DIMENSIONS)))


def max_sim(query: Tensor, document: Tensor) -> float:
    """`ColQwen3Processor.score_multi_vector` of the card, for one pair."""
    products = torch.einsum("bnd,csd->bcns", query[None], document[None])
    return float(products.max(dim=3)[0].sum(dim=2))
