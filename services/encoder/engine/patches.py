"""Resized pixels → packed patches, on whatever device the pixels are."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from services.encoder.models.base import Grid


def pack_patches(
    pixels: Tensor,
    grids: Sequence[Grid],
    patch_size: int,
    merge_size: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Patches of still images, normalized to [-1, 1], without the time axis.

    Args:
        pixels: the images' `[h * patch, w * patch, channels]` uint8, flat, one after the other.
        grids: of the images, t = 1.
        patch_size: pixels per patch side.
        merge_size: patches per image-token side.
        dtype: of the result; the arithmetic is float32's, as the reference processor's.
        out: where the result goes; None: to memory of its own.

    Returns:
        `[N, channels * patch²]`, rows in merge-block order, channel-major.
    """
    num_patches = sum(height * width for _, height, width in grids)
    packed = pixels.new_empty(num_patches, pixels.numel() // num_patches)
    first_pixel, first_row = 0, 0
    for (_, height, width), equal in groupby(grids):
        count = len(list(equal))
        rows = count * height * width
        images = pixels[first_pixel : first_pixel + rows * packed.shape[1]]
        blocks = images.view(
            count, height // merge_size, merge_size, patch_size,
            width // merge_size, merge_size, patch_size, -1,
        ).permute(0, 1, 4, 2, 5, 7, 3, 6)  # fmt: skip
        packed[first_row : first_row + rows].view(blocks.shape).copy_(blocks)
        first_pixel += images.numel()
        first_row += rows
    return normalize(packed, dtype, out)


def normalize(values: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """(x / 255 - 0.5) / 0.5 as the reference processor fuses it: in float32, rounded once."""
    if out is None:
        out = torch.empty(values.shape, dtype=dtype, device=values.device)
    return torch.div(values - 127.5, 127.5, out=out)
