"""From an image's size to its grid.

The gateway places the image in the prompt by its grid, and the encoder resizes to it. Both call
this module, so they cannot differ.
"""

import math
from dataclasses import dataclass
from typing import Literal

from services.common.errors import InvalidImage

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """How an image's size is turned into patches, from the model's image processor.

    Attributes:
        patch_size: pixels per patch side.
        merge_size: patches per image-token side.
        min_pixels: smaller images are scaled up to at least this area.
        max_pixels: larger images are scaled down to at most this area.
        resample: filter of the resize.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: Literal["bilinear", "bicubic"] = "bicubic"


def smart_resize(height: int, width: int, limits: ImageLimits) -> tuple[int, int]:
    """The size an image is resized to: multiples of patch·merge within the pixel limits.

    The formula of HF's Qwen2-VL image processor: round half to even, in double precision.

    Raises:
        InvalidImage: one side is more than 200 times the other.
    """
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise InvalidImage(
            f"the image's aspect ratio is over {_MAX_ASPECT_RATIO}: {height}x{width}"
        )
    unit = limits.patch_size * limits.merge_size
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    if new_height * new_width > limits.max_pixels:
        shrink = math.sqrt(height * width / limits.max_pixels)
        new_height = max(unit, math.floor(height / shrink / unit) * unit)
        new_width = max(unit, math.floor(width / shrink / unit) * unit)
    elif new_height * new_width < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (height * width))
        new_height = math.ceil(height * grow / unit) * unit
        new_width = math.ceil(width * grow / unit) * unit
    return new_height, new_width


def image_grid(height: int, width: int, limits: ImageLimits) -> tuple[int, int, int]:
    """(1, h, w) in patches before merging, for an upright image of that size."""
    new_height, new_width = smart_resize(height, width, limits)
    return 1, new_height // limits.patch_size, new_width // limits.patch_size
