"""A matrix of FP8 values (e4m3) with a float32 scale per 128 x 128 block or per output channel.

A weight is `value * scale`. Layers hold one and multiply with it (`fp8`, `fp8_kernels`); how a
checkpoint stores it is not known here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


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
