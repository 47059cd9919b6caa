"""Resized pixels → packed patches, on whatever device the pixels are."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
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
    if out is None:
        size = num_patches, pixels.numel() // num_patches
        out = torch.empty(size, dtype=dtype, device=pixels.device)
    pack = _fused() if pixels.is_cuda else None
    first_pixel, first_row = 0, 0
    for (_, height, width), equal in groupby(grids):
        count = len(list(equal))
        rows = out[first_row : first_row + count * height * width]
        images = pixels[first_pixel : first_pixel + rows.numel()].view(
            count, height * patch_size, width * patch_size, -1
        )
        (pack or pack_plain)(images, height, width, merge_size, rows)
        first_pixel += rows.numel()
        first_row += len(rows)
    return out


def pack_plain(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """See `kernels.pack_patches.pack_patches`."""
    patch_size = images.shape[1] // height
    blocks = images.view(
        len(images), height // merge_size, merge_size, patch_size,
        width // merge_size, merge_size, patch_size, -1,
    ).permute(0, 1, 4, 2, 5, 7, 3, 6)  # fmt: skip
    normalize(blocks.reshape(out.shape), out)


def normalize(values: Tensor, out: Tensor) -> None:
    """(x / 255 - 0.5) / 0.5 as the reference processor fuses it: in float32, rounded once."""
    torch.div(values - 127.5, 127.5, out=out)


@functools.cache
def _fused() -> Callable[[Tensor, int, int, int, Tensor], None] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from services.encoder.kernels.pack_patches import pack_patches

    return pack_patches
