"""Encoded image → resized RGB pixels, as the reference image processor makes them.

The engine's pool of threads calls `preprocess`: the decoders and torch's resize release the
interpreter lock. Normalization and patches are made on the device, from these bytes. Whatever is
wrong with an image is an `InvalidImage`.
"""

from collections.abc import Callable

import numpy as np
import simplejpeg
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

# As EXIF numbers them: the file's rows and columns → upright ones.
_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels[::-1].transpose(1, 0, 2),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels[:, ::-1].transpose(1, 0, 2),
}
_MAX_PINNED_BYTES = 16 << 20
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


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
    image = open_image(data, max_source_pixels=max_source_pixels)
    size = upright_size(image)
    found = image_grid(*size, limits)
    if found != grid:
        raise InvalidImage(f"the image's grid is {found}, not {grid}")
    height, width = found[1] * limits.patch_size, found[2] * limits.patch_size
    pinned = pinned and height * width * 3 <= _MAX_PINNED_BYTES
    pixels = decode(data, image, pinned=pinned and size == (height, width))
    resized = resize(pixels, height, width)
    return resized.pin_memory() if pinned and not resized.is_pinned() else resized


def decode(data: bytes, image: Image.Image, *, pinned: bool = False) -> Tensor:
    """Upright RGB pixels of an opened image's first frame, transparency on white.

    Args:
        data: the encoded file.
        image: `data`, opened.
        pinned: in pinned memory, where that costs no copy.

    Returns:
        `[height, width, 3]` uint8, contiguous.

    Raises:
        InvalidImage: the data is truncated or corrupt.
    """
    orientation = exif_orientation(image)
    try:
        pixels = _decode_jpeg(data, image, pinned)
        if pixels is None:
            image.load()
            pixels = torch.from_numpy(np.array(to_rgb(image)))
        if orientation in _UPRIGHT:
            pixels = torch.from_numpy(np.ascontiguousarray(_UPRIGHT[orientation](pixels.numpy())))
        return pixels
    except Exception:
        # Pillow raises exceptions of many types on hostile bytes; their text is not passed on.
        raise InvalidImage("the image is truncated or corrupt") from None


def _decode_jpeg(data: bytes, image: Image.Image, pinned: bool) -> Tensor | None:
    """A whole colour or grey JPEG, bit for bit as Pillow decodes it; None: Pillow must decode it.

    The same library without Pillow's copies: straight into RGB memory, without the interpreter
    lock.
    """
    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    pixels = torch.empty((image.height, image.width, 3), dtype=torch.uint8, pin_memory=pinned)
    try:
        # Strict: Pillow decides which damaged files are accepted.
        found = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels.numpy(), strict=True)
    except ValueError:
        return None
    return pixels if found.shape == pixels.shape else None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: transparency is composited on white, 16 bits keep their upper 8."""
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip at 255, which makes such an image white.
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
