"""Layers that encoder and decoder share. For LayerNorm, torch's own module is used.

Intermediate results are rounded where the modules of transformers round them, so that bf16 results
can be compared.
"""

import torch
from torch import Tensor, nn

from kernels.plain import rms_norm


def embedding(num: int, size: int) -> nn.Embedding:
    """Makes an embedding table without initial values.

    `nn.Embedding(num, size)` would draw random values. On the meta device, torch imports its
    compiler for that, which costs a second of CPU time and 150 MiB when an engine starts.
    """
    return nn.Embedding.from_pretrained(torch.empty(num, size))


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis.

    Args:
        size: elements of the last axis.
        eps: constant that is added to the mean square.
        zero_centred: True if the checkpoint holds the weights minus 1. `weight` is then the sum of
            1 and the loaded value, in float32.
    """

    def __init__(self, size: int, eps: float, *, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self._zero_centred = zero_centred

    @property
    def float32_parameters(self) -> frozenset[str]:
        """Parameters that stay float32 in a model of another dtype."""
        return frozenset({"weight"} if self._zero_centred else ())

    def process_weights_after_loading(self) -> None:
        """Adds 1 to a zero-centred weight, so that kernels can multiply by it."""
        if self._zero_centred:
            self.weight.data += 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `x`. The result has the shape and dtype of `x`."""
        return rms_norm(x, self.weight, self.eps)
