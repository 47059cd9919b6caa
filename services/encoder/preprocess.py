"""Encoded image → resized RGB pixels, as the reference image processor makes them.

The engine's pool of threads calls `preprocess`: a decoder gives the pixels, torch resizes them
without the interpreter lock. Normalization and patches are made on the device, from these bytes.
Whatever is wrong with an image is an `InvalidImage`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.errors import InvalidImage
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import ImageHeader, read_header

MAX_PINNED_BYTES = 16 << 20
# From a file to upright pixels `[height, width, 3]` uint8, valid inside the `with`. InvalidImage:
# it is truncated or corrupt, or needs more than an image of its size may.
Decode = Callable[[bytes, ImageHeader], AbstractContextManager[np.ndarray]]


def preprocess(
    data: bytes,
    unit: Unit,
    geometry: Geometry,
    *,
    max_source_pixels: int,
    decode: Decode,
    pinned: bool = False,
) -> Tensor:
    """Decodes and resizes one unit.

    Args:
        unit: of the image, as made from the header elsewhere.
        max_source_pixels: larger images are refused before a pixel is decoded.
        pinned: the result is in pinned memory, unless it is large.

    Returns:
        `[height, width, 3]` uint8 of the unit's size, contiguous.

    Raises:
        InvalidImage: not a readable image, too large, or the unit is none of its.
    """
    header = read_header(data, max_source_pixels=max_source_pixels)
    size = header.upright_size
    height, width = geometry.size_of(unit)
    if not geometry.is_of(unit, size):
        raise InvalidImage(f"an image of {size[0]}x{size[1]} has no grid of {unit.grid}")
    pinned = pinned and height * width * 3 <= MAX_PINNED_BYTES
    out = torch.empty((height, width, 3), dtype=torch.uint8, pin_memory=pinned)
    with decode(data, header) as pixels:
        return out.copy_(resize(torch.from_numpy(pixels), height, width, geometry.resample))


def resize(pixels: Tensor, height: int, width: int, mode: str = "bicubic") -> Tensor:
    """From `[H, W, 3]` to `[height, width, 3]` uint8, contiguous; antialiased (bicubic: a = -0.5),
    in two passes, each rounded to uint8: torch's own on the CPU.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = pixels.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, (height, width), mode=mode, antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()
