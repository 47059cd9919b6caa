"""Int8 matrices with a float32 scale per output channel, and the reference W8A8 multiplication.

A weight is `value * scale`. Activations are also quantized, with a scale of `amax / 127` per token,
so that integer tensor cores can multiply. Sums of integers are exact in any order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

INT8_MAX = 127.0
_LEAST_TOKENS = 32  # torch's GEMM needs more than 16 tokens, in multiples of 8
_UNIT = 8  # sizes of the GEMM's operands are multiples of this
TILE_ROWS, TILE_COLUMNS = 64, 256  # tile of the weight in a stage of a CTA of the skinny GEMM


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantized matrix, or a stack of matrices with a leading axis.

    Attributes:
        values: `[N, K]` int8.
        scale: `[N, 1]` float32.
    """

    values: Tensor
    scale: Tensor

    def __getitem__(self, index: int | slice) -> "Int8Weight":
        """Returns a matrix, or a slice, of a stack of matrices."""
        return Int8Weight(self.values[index], self.scale[index])


def dequantize(weight: Int8Weight, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight to `[..., N, K]`, computed in float32 and rounded once."""
    return (weight.values.float() * weight.scale).to(dtype)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each token with a scale of `amax / 127`.

    The scale is at least the smallest normal number, 1 if all values of the token are zero, and NaN
    if a value is NaN.

    Args:
        x: activations `[T, K]`.

    Returns:
        int8 values `[T, K]`, and scales `[T, 1]` float32.
    """
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    # The divisor is a tensor, because CUDA multiplies by the rounded reciprocal of a Python number.
    scale = (amax / torch.full_like(amax, INT8_MAX)).clamp(min=torch.finfo(amax.dtype).tiny)
    scale = torch.where(amax == 0, 1.0, scale)
    return (wide / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def w8a8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """W8A8 linear layer `[T, K]` → `[T, N]` in the dtype of `x`.

    Sums of integers are exact. Scales are applied last, in float32.
    """
    values, scale = quantize_activations(x)
    sums = F.linear(values.double(), weight.values.double())
    return _scaled(sums, scale, weight, x.dtype)


def int_mm_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """Implements `w8a8_linear` by torch's integer GEMM. N and K have to be multiples of 8."""
    values, scale = quantize_activations(x)
    num_tokens = len(values)
    padding = max(_LEAST_TOKENS - num_tokens, -num_tokens % _UNIT)
    sums = torch._int_mm(F.pad(values, (0, 0, 0, padding)), weight.values.t())  # pyright: ignore[reportPrivateUsage]
    return _scaled(sums[:num_tokens], scale, weight, x.dtype)


def has_int_mm(weight: Int8Weight) -> bool:
    """Returns whether `int_mm_linear` supports the weight."""
    return not any(size % _UNIT for size in weight.values.shape)


def has_tiles(weight: Int8Weight) -> bool:
    """Returns whether `int8_kernels` support the weight."""
    rows, columns = weight.values.shape
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0


def _scaled(sums: Tensor, scale: Tensor, weight: Int8Weight, dtype: torch.dtype) -> Tensor:
    return (sums.float() * scale * weight.scale.view(1, -1)).to(dtype)
