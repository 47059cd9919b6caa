"""Layers that encoder and decoder share. LayerNorm is torch's own.

Rounding points follow Hugging Face's modules, so that bf16 results can be compared with theirs.
Functions are the plain twins of fused kernels; their boundaries are the fusions'.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def embedding(num: int, size: int) -> nn.Embedding:
    """Without initial values. torch draws some otherwise, on the meta device by code for which it
    imports its compiler: a second of CPU and 150 MiB at the start of an engine.
    """
    return nn.Embedding.from_pretrained(torch.empty(num, size))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last axis in fp32, casts to the weight's dtype, multiplies by the weight, and
    casts to x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual addition and the norm after it: `(rms_norm(x + residual), x + residual)`."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`[..., 2 * n]`, gate then up → `silu(gate) * up`, `[..., n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def reduce_split_k(output: Tensor, dtype: torch.dtype) -> Tensor:
    """A GEMM's output `[T, N]`: as it is, or summed from its split-K partials `[S, T, N]` float32
    and rounded to `dtype`.
    """
    return output if output.dim() == 2 else output.sum(0).to(dtype)


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis.

    Args:
        size: of the last axis.
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
