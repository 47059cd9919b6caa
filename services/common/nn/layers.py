"""Layers that encoder and decoder share. LayerNorm is torch's own.

Rounding points follow Hugging Face's modules, so that bf16 results can be compared with theirs.
"""

import torch
from torch import Tensor, nn

from kernels.plain import rms_norm


def embedding(num: int, size: int) -> nn.Embedding:
    """Without initial values. torch draws some otherwise, on the meta device by code for which it
    imports its compiler: a second of CPU and 150 MiB at the start of an engine.
    """
    return nn.Embedding.from_pretrained(torch.empty(num, size))


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis.

    Args:
        eps: added to the mean square.
        zero_centred: the checkpoint holds weights less 1. `weight` is 1 more, in float32.
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
        """Brings the loaded weight into the form that kernels multiply by."""
        if self._zero_centred:
            self.weight.data += 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return rms_norm(x, self.weight, self.eps)
