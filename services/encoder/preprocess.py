"""Encoded image → resized RGB pixels, as the reference processor makes them.

Runs in threads: Pillow's decoders and torch's resize release the interpreter lock. Normalization
and patches are made on the device, from these bytes.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from services.common.errors import InvalidImage
from services.common.image_geometry import (
    ImageLimits,
    exif_orientation,
    image_grid,
    open_image,
    upright_size,
)

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


def preprocess(
    data: bytes,
    grid: tuple[int, int, int],
    limits: ImageLimits,
    *,
    max_source_pixels: int,
) -> Tensor:
    """Decodes and resizes one image.

    Args:
        data: the encoded file.
        grid: (1, h, w) in patches, as read from the header elsewhere.
        limits: of the model.
        max_source_pixels: larger images are refused before a pixel is decoded.

    Returns:
        `[h * patch_size, w * patch_size, 3]` uint8, contiguous.

    Raises:
        InvalidImage: not a readable image, too large, or not of that grid.
    """
    image = open_image(data, max_source_pixels=max_source_pixels)
    found = image_grid(*upright_size(image), limits)
    if found != grid:
        raise InvalidImage(f"the image's grid is {found}, not {grid}")
    height, width = found[1] * limits.patch_size, found[2] * limits.patch_size
    return resize(decode(image), height, width)


def decode(image: Image.Image) -> Tensor:
    """Upright RGB pixels of an opened image's first frame, transparency on white.

    Returns:
        `[height, width, 3]` uint8.

    Raises:
        InvalidImage: the data is truncated or corrupt.
    """
    orientation = exif_orientation(image)
    try:
        image.load()
        image = to_rgb(image)
        if orientation in _TRANSPOSITIONS:
            image = image.transpose(_TRANSPOSITIONS[orientation])
        return torch.from_numpy(np.array(image))
    except Exception:
        # Pillow raises many kinds on hostile bytes; its text stays in this process.
        raise InvalidImage("the image is truncated or corrupt") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: transparency is composited on white, 16 bits keep their upper 8."""
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip at 255, which leaves such an image white.
        image = Image.fromarray((np.asarray(image, dtype=np.int64) >> 8).astype(np.uint8))
    return image.convert("RGB")


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
