"""A matrix of FP8 values (e4m3) with a float32 scale per 128 x 128 block or per output channel.

A weight is `value * scale`. Layers hold one and multiply with it (`fp8`, `fp8_kernels`); how a
checkpoint stores it is not known here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A quantized matrix.

    Attributes:
        values: `[N, K]` e4m3.
        scale: `[ceil(N / block_rows), ceil(K / block_columns)]` float32.
        block_rows: rows per scale. 128 per block, or a divisor where the parts of a merged layer
            are not multiples of 128 rows; 1 per channel.
        block_columns: columns per scale: 128 per block, K per channel.
    """

    values: Tensor
    scale: Tensor
    block_rows: int
    block_columns: int

    def __getitem__(self, index: int) -> "Fp8Weight":
        """One matrix of a stack, whose tensors have a leading axis."""
        return Fp8Weight(self.values[index], self.scale[index], self.block_rows, self.block_columns)


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """`[N, K]`: value times scale in float32, rounded once."""
    rows, columns = weight.values.shape
    scale = weight.scale.repeat_interleave(weight.block_rows, 0)[:rows]
    if weight.block_columns < columns:
        scale = scale.repeat_interleave(weight.block_columns, 1)[:, :columns]
    return (weight.values.float() * scale).to(dtype)


def quantize_activations(x: Tensor, block_columns: int) -> tuple[Tensor, Tensor]:
    """Quantizes each token's blocks of columns with scale `amax / 448`, a normal number at least, 1
    where all are zero, none where one is no number.

    Args:
        x: `[T, K]`.
        block_columns: columns per scale; the last block may have fewer.

    Returns:
        `[T, K]` e4m3, and the scales `[T, ceil(K / block_columns)]` float32.
    """
    num_tokens, columns = x.shape
    padding = -columns % block_columns
    blocks = F.pad(x.float(), (0, padding)).view(num_tokens, -1, block_columns)
    amax = blocks.abs().amax(-1, keepdim=True)
    # Not by a Python number: CUDA would multiply by its rounded reciprocal.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=torch.finfo(amax.dtype).tiny)
    scale = torch.where(amax == 0, 1.0, scale)
    values = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values.view(num_tokens, -1)[:, :columns], scale[..., 0]


def weight_only_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """`[T, K]` → `[T, N]` in x's dtype: `F.linear` with the dequantized weight."""
    return F.linear(x, dequantize(weight, x.dtype))


def w8a8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """`[T, K]` → `[T, N]` in x's dtype: exactly quantized activations, summed in float32."""
    values, scale = quantize_activations(x, weight.block_columns)
    scales = scale.repeat_interleave(weight.block_columns, 1)[:, : x.shape[1]]
    return F.linear(values.float() * scales, dequantize(weight, torch.float32)).to(x.dtype)
