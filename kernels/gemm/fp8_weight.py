"""FP8 (e4m3) matrices with a float32 scale per 128 x 128 block or per output channel.

A weight is `value * scale`. This module has the reference implementations of quantization and
multiplication; `fp8_kernels` and `fp8_w8a8` have the kernels. `services.common.nn.fp8` knows how
checkpoints store such weights.
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
    """A quantized matrix, or a stack of matrices with a leading axis.

    Attributes:
        values: `[N, K]` e4m3.
        scale: `[ceil(N / block_rows), ceil(K / block_columns)]` float32.
        block_rows: rows per scale. 128 for blocks, or a divisor of 128 if the parts of a merged
            layer are not multiples of 128 rows. 1 for channels.
        block_columns: columns per scale. 128 for blocks, K for channels.
    """

    values: Tensor
    scale: Tensor
    block_rows: int
    block_columns: int

    def __getitem__(self, index: int) -> "Fp8Weight":
        """Returns a matrix of a stack of matrices."""
        return Fp8Weight(self.values[index], self.scale[index], self.block_rows, self.block_columns)


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight to `[N, K]`, computed in float32 and rounded once."""
    rows, columns = weight.values.shape
    scale = weight.scale.repeat_interleave(weight.block_rows, 0)[:rows]
    if weight.block_columns < columns:
        scale = scale.repeat_interleave(weight.block_columns, 1)[:, :columns]
    return (weight.values.float() * scale).to(dtype)


def quantize_activations(x: Tensor, block_columns: int) -> tuple[Tensor, Tensor]:
    """Quantizes blocks of columns of each token with a scale of `amax / 448`.

    The scale is at least the smallest normal number, 1 if all values of the block are zero, and NaN
    if a value is NaN.

    Args:
        x: activations `[T, K]`.
        block_columns: columns per scale. The last block may have fewer.

    Returns:
        e4m3 values `[T, K]`, and scales `[T, ceil(K / block_columns)]` float32.
    """
    num_tokens, columns = x.shape
    padding = -columns % block_columns
    blocks = F.pad(x.float(), (0, padding)).view(num_tokens, -1, block_columns)
    amax = blocks.abs().amax(-1, keepdim=True)
    # The divisor is a tensor, because CUDA multiplies by the rounded reciprocal of a Python number.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=torch.finfo(amax.dtype).tiny)
    scale = torch.where(amax == 0, 1.0, scale)
    values = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values.view(num_tokens, -1)[:, :columns], scale[..., 0]


def weight_only_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` with the dequantized weight, in the dtype of `x`."""
    return F.linear(x, dequantize(weight, x.dtype))


def w8a8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` with quantized activations, summed in float32."""
    values, scale = quantize_activations(x, weight.block_columns)
    scales = scale.repeat_interleave(weight.block_columns, 1)[:, : x.shape[1]]
    return F.linear(values.float() * scales, dequantize(weight, torch.float32)).to(x.dtype)
