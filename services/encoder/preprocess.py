"""Encoded image → resized RGB pixels, as the reference image processor makes them.

The engine's pool of threads calls `preprocess`: the decoders and torch's resize release the
interpreter lock. Normalization and patches are made on the device, from these bytes. Whatever is
wrong with an image is an `InvalidImage`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.errors import InvalidImage
from services.common.image_geometry import ImageLimits, image_grid
from services.common.image_header import read_header
from services.encoder.decode import decode

_MAX_PINNED_BYTES = 16 << 20


def preprocess(
    data: bytes,
    grid: tuple[int, int, int],
    limits: ImageLimits,
    *,
    max_source_pixels: int,
    pinned: bool = False,
) -> Tensor:
    """Decodes and resizes one image.

    Args:
        data: the encoded file.
        grid: (1, h, w) in patches, as read from the header elsewhere.
        limits: of the model.
        max_source_pixels: larger images are refused before a pixel is decoded.
        pinned: the result is in pinned memory, unless it is large.

    Returns:
        `[h * patch_size, w * patch_size, 3]` uint8, contiguous.

    Raises:
        InvalidImage: not a readable image, too large, or not of that grid.
    """
    header = read_header(data, max_source_pixels=max_source_pixels)
    size = header.upright_size
    found = image_grid(*size, limits)
    if found != grid:
        raise InvalidImage(f"the image's grid is {found}, not {grid}")
    height, width = found[1] * limits.patch_size, found[2] * limits.patch_size
    pinned = pinned and height * width * 3 <= _MAX_PINNED_BYTES
    direct = pinned and size == (height, width)
    pixels = torch.empty((*size, 3), dtype=torch.uint8, pin_memory=direct)
    decode(data, header, pixels.numpy())
    resized = resize(pixels, height, width)
    return resized.pin_memory() if pinned and not resized.is_pinned() else resized


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Bicubic (a = -0.5), antialiased, two passes, each rounded to uint8: torch's own on the CPU.

    Args:
        pixels: `[H, W, 3]` uint8.
        height: of the result.
        width: of the result.

    Returns:
        `[height, width, 3]` uint8, contiguous.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = pixels.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()
