"""Matrices of 4- or 8-bit codes with a scale, and possibly a zero point, per group of columns.

A weight is `(code - zero) * scale` for integers, and `value * scale * row_scale` for e2m1 and e4m3.
Checkpoints pack codes in several ways. Layers convert codes to the same layout after loading
(`services.common.nn.packed`), for which there are kernels.

4-bit integers can also be in tiles, in the order in which tensor cores have a matrix in registers.
A tile of 64 rows and 128 columns is 4 KiB of contiguous memory, of which each thread reads 16 bytes
twice (`tiled`). A 16-bit word of a tile has four codes, the lowest bits first, which belong to one
row and to columns that are 32 apart. The index of a word within the tile consists of these bits of
row and column, from the highest to the lowest: column 16; rows 32 and 16; rows 4, 2 and 1; columns
4 and 2; column 8; row 8; column 1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized matrix `[N, K]`, or a stack of matrices with a leading axis.

    Attributes:
        codes: codes of the weights. For 4 bits, uint8 `[N, ceil(K / 2)]` with the even column in
            the low half. For 8 bits, `[N, K]` uint8, or e4m3 if `is_float`. There may be more
            columns, which are not used. In tiles, int16 `[N / 64, K / 128, 2048]`.
        scale: `[N, ceil(K / group)]` float32, or a half precision that represents the scales
            exactly. In tiles, `[K / group, N]` float32, because asynchronous copies need 4 bytes.
        zero: zero points `[N, ceil(K / group)]` uint8, or int32 `[K / group, N]` in tiles. None if
            the zero point is the middle of the range, 8 or 128.
        bits: number of bits of a code, 4 or 8.
        group: number of columns per scale.
        columns: number of columns, K.
        is_float: True if codes are e2m1 (sign, two exponent bits, one mantissa bit) or, with 8
            bits, e4m3.
        row_scale: factors of the rows, `[N, 1]` float32. None if there are no such factors.
        is_tiled: True if codes are in tiles.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    columns: int
    is_float: bool = False
    row_scale: Tensor | None = None
    is_tiled: bool = False

    @property
    def rows(self) -> int:
        return self.scale.shape[-1] if self.is_tiled else self.codes.shape[-2]

    def __getitem__(self, index: int | slice) -> "PackedWeight":
        """Returns a matrix, or a slice, of a stack of matrices."""
        zero = None if self.zero is None else self.zero[index]
        row_scale = None if self.row_scale is None else self.row_scale[index]
        return replace(
            self, codes=self.codes[index], scale=self.scale[index], zero=zero, row_scale=row_scale
        )


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight to `[..., N, K]`, computed in float32 and rounded once."""
    codes = weight.codes
    if weight.is_tiled:
        weight = replace(
            weight, scale=weight.scale.mT, zero=None if weight.zero is None else weight.zero.mT
        )
        codes = _of_tiles(codes)
    elif weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    codes, scale = codes[..., : weight.columns], _per_column(weight.scale.float(), weight)
    if weight.is_float:
        found = (_e2m1(codes) if weight.bits == 4 else codes.float()) * scale
        return (found if weight.row_scale is None else found * weight.row_scale).to(dtype)
    middle = float(1 << (weight.bits - 1))
    zero = middle if weight.zero is None else _per_column(weight.zero.float(), weight)
    return ((codes.float() - zero) * scale).to(dtype)


def _e2m1(codes: Tensor) -> Tensor:
    """Converts e2m1 codes to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, mantissa + 2 << exponent).float()
    return torch.where(codes > 7, -quarters, quarters) * 0.25


def _per_column(values: Tensor, weight: PackedWeight) -> Tensor:
    """Repeats values per group for each column: `[..., N, K]`, or `[..., N, 1]` for one group."""
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(weight.group, -1)[..., : weight.columns]


def quantize_in_4_bits(values: Tensor, group: int) -> PackedWeight:
    """Rounds a matrix `[N, K]` to 4-bit integers from -7 to 7, with the scales `amax / 7`.

    Args:
        values: the matrix. K is a multiple of `group`.
        group: number of columns per scale.
    """
    groups = values.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    whole = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    codes = (whole.clamp(-7, 7) + 8).to(torch.uint8).flatten(-2)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return PackedWeight(packed, scale.squeeze(-1), None, 4, group, values.shape[1])


TILE_ROWS, TILE_COLUMNS = 64, 128
_WORDS = TILE_ROWS * TILE_COLUMNS // 4
# Sizes of the axes of a tile's words, in the order that the module's docstring describes.
_ORDER = (2, 4, 8, 4, 2, 2, 2)


def has_tiles(weight: PackedWeight) -> bool:
    """Returns whether the weight can be converted to tiles.

    It has to consist of 4-bit integers in whole tiles, with groups of 32, 64 or a multiple of 128
    columns.
    """
    is_integer = weight.bits == 4 and not weight.is_float and weight.row_scale is None
    whole = weight.rows % TILE_ROWS == 0 and weight.columns % TILE_COLUMNS == 0
    group = weight.group
    fits = group in (32, 64) or group % TILE_COLUMNS == 0
    return is_integer and whole and fits and weight.columns % group == 0


def tiled(weight: PackedWeight) -> PackedWeight:
    """Converts a weight, for which `has_tiles` is True, to tiles.

    The matrices of a stack are converted one at a time, which bounds the memory.
    """
    if weight.codes.dim() == 3:
        made = weight.codes.new_empty(
            len(weight.codes),
            weight.rows // TILE_ROWS,
            weight.columns // TILE_COLUMNS,
            _WORDS,
            dtype=torch.int16,
        )
        for index, codes in enumerate(weight.codes):
            made[index] = _in_tiles(codes)
    else:
        made = _in_tiles(weight.codes)
    zero = None if weight.zero is None else weight.zero.mT.int().contiguous()
    scale = weight.scale.mT.float().contiguous()
    return replace(weight, codes=made, scale=scale, zero=zero, is_tiled=True)


def _in_tiles(codes: Tensor) -> Tensor:
    """Converts bytes `[N, K / 2]` to words of tiles `[N / 64, K / 128, 2048]` int16."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    rows, columns = nibbles.shape
    # Axes: tile, then rows by 16, 8 and 1; tile, then the code in a word, then columns by 16, 8, 2
    # and 1.
    parts = nibbles.view(rows // TILE_ROWS, 4, 2, 8, columns // TILE_COLUMNS, 4, 2, 2, 4, 2)
    found = parts.permute(0, 4, 6, 1, 3, 8, 7, 2, 9, 5)
    low, high = found[..., 0] | found[..., 1] << 4, found[..., 2] | found[..., 3] << 4
    packed = torch.stack((low, high), -1).contiguous()
    return packed.view(torch.int16).reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, _WORDS)


def _of_tiles(words: Tensor) -> Tensor:
    """Converts words of tiles `[..., N / 64, K / 128, 2048]` to codes uint8 `[..., N, K]`."""
    high, wide = words.shape[-3:-1]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    codes = (words.int().unsqueeze(-1) >> shifts & 15).to(torch.uint8)
    parts = codes.view(-1, high, wide, *_ORDER, 4).permute(0, 1, 4, 8, 5, 2, 10, 3, 7, 6, 9)
    return parts.reshape(*words.shape[:-3], high * TILE_ROWS, wide * TILE_COLUMNS)


def has_kernels(weight: PackedWeight) -> bool:
    """Returns whether the kernels of codes in bytes support the weight.

    The rows have to be a multiple of 16, the columns a multiple of 128, and the columns of a group
    a divisor or a multiple of 128.
    """
    rows, columns = weight.rows, weight.columns
    group = weight.group
    return rows % 16 == 0 and columns % 128 == 0 and (group % 128 == 0 or 128 % group == 0)


def weight_only_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` with the dequantized weight, in the dtype of `x`."""
    return F.linear(x, dequantize(weight, x.dtype))
