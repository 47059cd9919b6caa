"""A matrix of 4- or 8-bit codes with a scale, and perhaps a zero point, per group of columns.

A weight is `(code - zero) * scale` of integers, `value * scale * row_scale` of e2m1 and e4m3.
Checkpoints pack codes in several ways; layers repack them into this one layout after loading
(`services.common.nn.packed`), so that one kernel reads all.

Integers of 4 bits in whole tiles are laid out further, as tensor cores hold a matrix in registers:
a tile of 64 rows and 128 columns is 4 KiB in one piece, of which each thread reads 16 bytes twice
(`tiled`). A 16-bit word of a tile holds four codes, the lowest bits first, of one row and of
columns 32 apart; offsets of words within a tile count, the slowest first, column 16, rows 32 and
16, rows 4, 2 and 1, columns 4 and 2, column 8, row 8, column 1.
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
            `[N, K]`, e4m3 if floats. There may be more columns, which mean nothing. Of tiles, int16
            `[N / 64, K / 128, 2048]`.
        scale: `[N, ceil(K / group)]` float32, or the half precision that holds it exactly. Of
            tiles, `[K / group, N]` of 4 bytes each, as the next: asynchronous copies take no less.
        zero: `[N, ceil(K / group)]` uint8; None: 8 or 128, the middle.
        bits: 4 or 8.
        group: columns per scale.
        columns: K.
        is_float: codes are e2m1 (a sign, two bits of exponent, one of mantissa), of 8 bits e4m3.
        row_scale: `[N, 1]` float32; None: 1.
        is_tiled: codes are in tiles.
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
        """One matrix of a stack, or some, whose tensors have a leading axis."""
        zero = None if self.zero is None else self.zero[index]
        row_scale = None if self.row_scale is None else self.row_scale[index]
        return replace(
            self, codes=self.codes[index], scale=self.scale[index], zero=zero, row_scale=row_scale
        )


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """`[..., N, K]`: in float32, rounded once."""
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
    """float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, mantissa + 2 << exponent).float()
    return torch.where(codes > 7, -quarters, quarters) * 0.25


def _per_column(values: Tensor, weight: PackedWeight) -> Tensor:
    """`[..., N, K]`, or `[..., N, 1]`, of values per group."""
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(weight.group, -1)[..., : weight.columns]


TILE_ROWS, TILE_COLUMNS = 64, 128
_WORDS = TILE_ROWS * TILE_COLUMNS // 4
# Of a tile's words: column 16, rows 16, row 1, columns 2, column 8, row 8, column 1.
_ORDER = (2, 4, 8, 4, 2, 2, 2)


def has_tiles(weight: PackedWeight) -> bool:
    """Whether the weight may be in tiles: integers of 4 bits in whole ones, and groups of 32
    columns or a multiple of it.
    """
    is_integer = weight.bits == 4 and not weight.is_float and weight.row_scale is None
    whole = weight.rows % TILE_ROWS == 0 and weight.columns % TILE_COLUMNS == 0
    group = weight.group
    fits = group in (32, 64) or group % TILE_COLUMNS == 0
    return is_integer and whole and fits and weight.columns % group == 0


def tiled(weight: PackedWeight) -> PackedWeight:
    """The same in tiles, see `has_tiles`; of a stack, one matrix at a time, to bound the memory."""
    if weight.codes.dim() == 3:
        made = weight.codes.new_empty(
            len(weight.codes), weight.rows // TILE_ROWS, weight.columns // TILE_COLUMNS, _WORDS,
            dtype=torch.int16,
        )  # fmt: skip
        for index, codes in enumerate(weight.codes):
            made[index] = _in_tiles(codes)
    else:
        made = _in_tiles(weight.codes)
    zero = None if weight.zero is None else weight.zero.mT.int().contiguous()
    scale = weight.scale.mT.float().contiguous()
    return replace(weight, codes=made, scale=scale, zero=zero, is_tiled=True)


def _in_tiles(codes: Tensor) -> Tensor:
    """Bytes `[N, K / 2]` → words `[N / 64, K / 128, 2048]` int16."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    rows, columns = nibbles.shape
    # Rows 16, row 8, row 1; the code of a word, column 16, column 8, columns 2, column 1.
    parts = nibbles.view(rows // TILE_ROWS, 4, 2, 8, columns // TILE_COLUMNS, 4, 2, 2, 4, 2)
    found = parts.permute(0, 4, 6, 1, 3, 8, 7, 2, 9, 5)
    low, high = found[..., 0] | found[..., 1] << 4, found[..., 2] | found[..., 3] << 4
    packed = torch.stack((low, high), -1).contiguous()
    return packed.view(torch.int16).reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, _WORDS)


def _of_tiles(words: Tensor) -> Tensor:
    """Words `[..., N / 64, K / 128, 2048]` → codes uint8 `[..., N, K]`."""
    high, wide = words.shape[-3:-1]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    codes = (words.int().unsqueeze(-1) >> shifts & 15).to(torch.uint8)
    parts = codes.view(-1, high, wide, *_ORDER, 4).permute(0, 1, 4, 8, 5, 2, 10, 3, 7, 6, 9)
    return parts.reshape(*words.shape[:-3], high * TILE_ROWS, wide * TILE_COLUMNS)


def has_kernels(weight: PackedWeight) -> bool:
    """Whether kernels take the weight: whole tiles of rows and columns, and groups that divide
    tiles of 128 columns or consist of them.
    """
    rows, columns = weight.rows, weight.columns
    group = weight.group
    return rows % 16 == 0 and columns % 128 == 0 and (group % 128 == 0 or 128 % group == 0)


def weight_only_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`[T, K]` → `[T, N]` in x's dtype: `F.linear` with the dequantized weight."""
    return F.linear(x, dequantize(weight, x.dtype))
