"""A matrix of 4- or 8-bit codes with a scale, and perhaps a zero point, per group of columns.

A weight is `(code - zero) * scale` of integers, `value * scale * row_scale` of e2m1. Checkpoints
pack codes in several ways; layers repack them into this one layout after loading
(`services.common.nn.packed`), so that one kernel reads all.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized matrix `[N, K]`.

    Attributes:
        codes: uint8, of 4 bits `[N, ceil(K / 2)]` with the even column in the low half, of 8 bits
            `[N, K]`. There may be more columns, which mean nothing.
        scale: `[N, ceil(K / group)]` float32, or the half precision that holds it exactly.
        zero: `[N, ceil(K / group)]` uint8; None: 8 or 128, the middle.
        bits: 4 or 8.
        group: columns per scale.
        columns: K.
        is_float: codes are e2m1: a sign, two bits of exponent, one of mantissa.
        row_scale: `[N, 1]` float32; None: 1.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    columns: int
    is_float: bool = False
    row_scale: Tensor | None = None

    def __getitem__(self, index: int | slice) -> "PackedWeight":
        """One matrix of a stack, or some, whose tensors have a leading axis."""
        zero = None if self.zero is None else self.zero[index]
        row_scale = None if self.row_scale is None else self.row_scale[index]
        return replace(
            self, codes=self.codes[index], scale=self.scale[index], zero=zero, row_scale=row_scale
        )


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """`[..., N, K]`: in float32, rounded once."""
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    codes, scale = codes[..., : weight.columns], _per_column(weight.scale.float(), weight)
    if weight.is_float:
        found = _e2m1(codes) * scale
        return (found if weight.row_scale is None else found * weight.row_scale).to(dtype)
    middle = float(1 << (weight.bits - 1))
    zero = middle if weight.zero is None else _per_column(weight.zero.float(), weight)
    return ((codes.float() - zero) * scale).to(dtype)


def _e2m1(codes: Tensor) -> Tensor:
    """float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, mantissa + 2 << exponent).float()
    return torch.where(codes > 7, -quarters, quarters) * 0.25


def _per_column(values: Tensor, weight: PackedWeight) -> Tensor:
    """`[..., N, K]`, or `[..., N, 1]`, of values per group."""
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(weight.group, -1)[..., : weight.columns]


def has_kernels(weight: PackedWeight) -> bool:
    """Whether kernels take the weight: whole tiles of rows and columns, and groups that divide
    tiles of 128 columns or consist of them.
    """
    rows, columns = len(weight.codes), weight.columns
    group = weight.group
    return rows % 16 == 0 and columns % 128 == 0 and (group % 128 == 0 or 128 % group == 0)


def weight_only_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`[T, K]` → `[T, N]` in x's dtype: `F.linear` with the dequantized weight."""
    return F.linear(x, dequantize(weight, x.dtype))
