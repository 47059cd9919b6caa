"""A matrix of int8 with a float32 scale per output channel, and its W8A8 multiplication.

A weight is `value * scale`. Activations are quantized, too, with scale `amax / 127` per token, so
that integer tensor cores multiply. Sums of integers are exact, whatever their order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

INT8_MAX = 127.0
_LEAST_TOKENS = 32  # of torch's GEMM, which wants more than 16, in eights
_UNIT = 8  # rows and columns of its operands
TILE_ROWS, TILE_COLUMNS = 64, 256  # of the weight, of a stage of a CTA of the skinny GEMM


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantized matrix: `values` `[N, K]` int8, `scale` `[N, 1]` float32."""

    values: Tensor
    scale: Tensor

    def __getitem__(self, index: int | slice) -> "Int8Weight":
        """One matrix of a stack, or some, whose tensors have a leading axis."""
        return Int8Weight(self.values[index], self.scale[index])


def dequantize(weight: Int8Weight, dtype: torch.dtype) -> Tensor:
    """`[..., N, K]`: value times scale in float32, rounded once."""
    return (weight.values.float() * weight.scale).to(dtype)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[T, K]` → int8 of the same shape, and each token's scale `[T, 1]` float32: amax / 127, a
    normal number at least, 1 where all are zero, none where one is no number.
    """
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    # Not by a Python number: CUDA would multiply by its rounded reciprocal.
    scale = (amax / torch.full_like(amax, INT8_MAX)).clamp(min=torch.finfo(amax.dtype).tiny)
    scale = torch.where(amax == 0, 1.0, scale)
    return (wide / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def w8a8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`[T, K]` → `[T, N]` in x's dtype: integers add up exactly; scales come last, in float32."""
    values, scale = quantize_activations(x)
    sums = F.linear(values.double(), weight.values.double())
    return _scaled(sums, scale, weight, x.dtype)


def int_mm_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`w8a8_linear` by torch's GEMM of integers; N and K are multiples of 8."""
    values, scale = quantize_activations(x)
    num_tokens = len(values)
    padding = max(_LEAST_TOKENS - num_tokens, -num_tokens % _UNIT)
    sums = torch._int_mm(F.pad(values, (0, 0, 0, padding)), weight.values.t())  # pyright: ignore[reportPrivateUsage]
    return _scaled(sums[:num_tokens], scale, weight, x.dtype)


def has_int_mm(weight: Int8Weight) -> bool:
    """Whether `int_mm_linear` takes the weight."""
    return not any(size % _UNIT for size in weight.values.shape)


def has_tiles(weight: Int8Weight) -> bool:
    """Whether `int8_kernels` take the weight."""
    rows, columns = weight.values.shape
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0


def _scaled(sums: Tensor, scale: Tensor, weight: Int8Weight, dtype: torch.dtype) -> Tensor:
    return (sums.float() * scale * weight.scale.view(1, -1)).to(dtype)
