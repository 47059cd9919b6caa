"""Encoded image → resized RGB pixels, as the reference image processor makes them.

The engine's pool of threads calls a `Preprocessor`: a decoder gives the pixels, torch resizes them
without the interpreter lock. Normalization and patches are made on the device, from these bytes.
Whatever is wrong with an image is an `InvalidImage`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.errors import InvalidImage
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader, read_header
from services.encoder.engine.messages import Source

_MAX_PINNED_BYTES = 16 << 20
# From a file to upright pixels `[height, width, 3]` uint8, valid inside the `with`. InvalidImage:
# it is truncated or corrupt, or needs more than an image of its size may.
Decode = Callable[[bytes, ImageHeader], AbstractContextManager[np.ndarray]]


@dataclass(frozen=True)
class Preprocessor:
    """Decodes and resizes one unit. Threads share it.

    Attributes:
        pinned: the result is in pinned memory, unless it is large.
    """

    geometry: Geometry
    decode: Decode
    pinned: bool

    def __call__(self, source: Source, unit: Unit, decoded: Callable[[], None]) -> Tensor:
        """Pixels of a unit.

        Args:
            unit: of it, as made from its header elsewhere.
            decoded: called if a video's decoder is free again before its frames are resized.

        Returns:
            `[height, width, 3]` uint8 of the unit's size, contiguous; of frames `[2, ...]`.

        Raises:
            InvalidImage: not a readable image, too large, or the unit is none of its.
        """
        header = read_header(source.image, max_source_pixels=MAX_SOURCE_PIXELS)
        size = header.upright_size
        height, width = self.geometry.size_of(unit)
        if not self.geometry.is_of(unit, size):
            raise InvalidImage(f"an image of {size[0]}x{size[1]} has no grid of {unit.grid}")
        out = self.empty(height, width, 3)
        with self.decode(source.image, header) as pixels:
            resized = resize(torch.from_numpy(pixels), height, width, self.geometry.resample)
            return out.copy_(resized)

    def empty(self, *shape: int) -> Tensor:
        """Memory for pixels."""
        pinned = self.pinned and math.prod(shape) <= _MAX_PINNED_BYTES
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)


def resize(pixels: Tensor, height: int, width: int, mode: str = "bicubic") -> Tensor:
    """From `[H, W, 3]` to `[height, width, 3]` uint8, strided; antialiased (bicubic: a = -0.5), in
    two passes, each rounded to uint8: torch's own on the CPU.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = pixels.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, (height, width), mode=mode, antialias=True)
    return resized[0].permute(1, 2, 0)
