"""Resized pixels → packed patches, on whatever device the pixels are."""

import functools
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from services.encoder.kernels.ops import Ops, create_ops
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
    if out is None:
        size = num_patches, pixels.numel() // num_patches
        out = torch.empty(size, dtype=dtype, device=pixels.device)
    pack = _ops(pixels.device).pack_patches
    first_pixel, first_row = 0, 0
    for (_, height, width), equal in groupby(grids):
        count = len(list(equal))
        rows = out[first_row : first_row + count * height * width]
        images = pixels[first_pixel : first_pixel + rows.numel()].view(
            count, height * patch_size, width * patch_size, -1
        )
        pack(images, height, width, merge_size, rows)
        first_pixel += rows.numel()
        first_row += len(rows)
    return out


@functools.cache
def _ops(device: torch.device) -> Ops:
    return create_ops(device)
