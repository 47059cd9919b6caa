"""From an image's header to its grid, without decoding a pixel.

The gateway reads the header to place the image in the prompt; the encoder decodes the same bytes
and must arrive at the same grid. Both call this module, so they cannot differ.
"""

import io
import math
import warnings
from dataclasses import dataclass

from PIL import Image

from services.common.errors import InvalidImage

# Pillow warns of damage beside the pixels, as in EXIF, and of sizes that we bound ourselves. Once
# for the process: `catch_warnings` is not for threads, and images are opened in several.
warnings.filterwarnings("ignore", module=r"PIL\.")

ALLOWED_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_EXIF_ORIENTATION = 0x0112
_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """How an image's size is turned into patches, from the model's preprocessor_config.json.

    Attributes:
        patch_size: pixels per patch side.
        merge_size: patches per image-token side.
        min_pixels: smaller images are scaled up to at least this area.
        max_pixels: larger images are scaled down to at most this area.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int


def open_image(data: bytes, *, max_source_pixels: int) -> Image.Image:
    """Opens an encoded image lazily: format and size are read, no pixel is decoded.

    Raises:
        InvalidImage: not an allowed format, unreadable, or over `max_source_pixels`.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=ALLOWED_FORMATS)
    except Exception:
        # Pillow raises many kinds on hostile bytes, and its text names objects of this process
        # by address, so it stays here.
        raise InvalidImage(
            f"not a readable image; allowed formats: {', '.join(ALLOWED_FORMATS)}"
        ) from None
    if image.width < 1 or image.height < 1:
        raise InvalidImage("the image has no pixels")
    if image.width * image.height > max_source_pixels:
        raise InvalidImage(
            f"the image has {image.width}x{image.height} pixels; "
            f"at most {max_source_pixels} are allowed"
        )
    return image


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of an opened image; 1 where there is none or it is damaged.

    Decodes nothing: for a PNG, Pillow's `getexif` would load all pixels to look behind them.
    """
    try:
        if image.format == "PNG":
            exif = Image.Exif()
            exif.load(image.info.get("exif", b""))
        else:
            exif = image.getexif()
        return int(exif.get(_EXIF_ORIENTATION, 1))
    except Exception:  # Pillow raises many kinds on a damaged block
        return 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) once the EXIF orientation is applied."""
    orientation = exif_orientation(image)
    if orientation in (5, 6, 7, 8):
        return image.width, image.height
    return image.height, image.width


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
