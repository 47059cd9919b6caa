"""Encoded image → upright RGB pixels.

The header says size and orientation; simplejpeg decodes JPEG, Pillow everything else, and both must
find what the header says. Conversions run in bands, so that only the decoder's own copy of the
image is large. Needs neither torch nor a device. Whatever is wrong with an image is an
`InvalidImage`.
"""

import io
import warnings
from collections.abc import Callable
from typing import cast

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin, WebPImagePlugin

from services.common.errors import InvalidImage
from services.common.images.image_header import ALLOWED_FORMATS, ImageHeader

# Pillow warns of damage beside the pixels, as in EXIF, and of sizes that we bound ourselves. Once
# for the process: `catch_warnings` is not for threads, and images are opened in several.
warnings.filterwarnings("ignore", module=r"PIL\.")
Image.MAX_IMAGE_PIXELS = None
# Pillow would load its plugins in the first call. It knows WebP once its module is imported.
Image.preinit()
assert WebPImagePlugin.SUPPORTED


def _passed_over(stream: PngImagePlugin.PngStream, position: int, length: int) -> bytes:
    """Reads a chunk for its checksum alone."""
    assert stream.fp is not None
    return stream.fp.read(length)


# Texts and colour profiles change no pixel here. Pillow would inflate a MiB of each, which takes
# 2.5 ms for one KiB of a file.
for _kind in ("tEXt", "zTXt", "iTXt", "iCCP"):
    setattr(PngImagePlugin.PngStream, f"chunk_{_kind}", _passed_over)

_read_key = PngImagePlugin.PngStream.chunk_tRNS


def _key_of_one_bit(self: PngImagePlugin.PngStream, pos: int, length: int) -> bytes:
    """Pillow takes any bit of the colour for white; PNG: upper bits do not count."""
    data = _read_key(self, pos, length)
    if self.im_mode == "1":
        self.im_info["transparency"] = 255 * (data[1] & 1)
    return data


PngImagePlugin.PngStream.chunk_tRNS = _key_of_one_bit

_PNG_DEPTH_AT = 24  # bits of a sample, in the header
_BAND_PIXELS = 1 << 18
_BASE_BYTES = 24 << 20  # of a band's conversions, tables
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
# From upright rows and columns to the file's, as EXIF numbers the orientations; views.
_AS_STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
    7: lambda pixels: pixels.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
}


def decode(data: bytes, header: ImageHeader, out: np.ndarray) -> None:
    """Decodes the first frame, transparency on white.

    Args:
        out: `[height, width, 3]` uint8, contiguous, upright; written.

    Raises:
        InvalidImage: the data is truncated or corrupt.
        MemoryError: the process may not allocate what the image takes.
    """
    stored = _AS_STORED[header.orientation](out)
    try:
        if not _decode_jpeg(data, header, stored):
            _decode_with_pillow(data, header, stored)
    except MemoryError:
        raise
    except Exception:
        # Pillow raises exceptions of many types on hostile bytes; their text is not passed on.
        raise InvalidImage("the image is truncated or corrupt") from None


def worst_case_bytes(header: ImageHeader, file_bytes: int) -> int:
    """Memory that `decode` may use for an image, its file and its pixels included.

    Bytes a pixel, as measured with Pillow 13: its images have one or four; WebP's decoder holds
    two canvases beside the frame that it returns and Pillow's copy; a JPEG in several scans has two
    for each coefficient. A JPEG that simplejpeg refuses is decoded by Pillow.
    """
    per_pixel = {"PNG": 3 + 8, "GIF": 3 + 8, "WEBP": 3 + 20, "JPEG": 3 + 4}[header.format]
    if header.format == "JPEG":
        per_pixel += 2 * header.channels * header.buffered
        per_pixel += 3 * (header.orientation != 1)
    # Three copies of a file: as sent, as received, in a decoder's buffers.
    return header.width * header.height * per_pixel + 3 * file_bytes + _BASE_BYTES


def _decode_jpeg(data: bytes, header: ImageHeader, stored: np.ndarray) -> bool:
    """A whole colour or grey JPEG, bit for bit as Pillow decodes it; False: Pillow must decode it.

    The same library without Pillow's copies: straight into RGB memory, without the interpreter
    lock.
    """
    if header.format != "JPEG" or header.channels not in (1, 3):
        return False
    direct = stored.flags.c_contiguous
    pixels = stored if direct else np.empty(stored.shape, np.uint8)
    try:
        # Strict: Pillow decides which damaged files are accepted.
        found = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, strict=True)
    except ValueError:
        return False
    if found.shape != pixels.shape:
        return False
    if not direct:
        stored[...] = pixels
    return True


def _decode_with_pillow(data: bytes, header: ImageHeader, stored: np.ndarray) -> None:
    with Image.open(io.BytesIO(data), formats=ALLOWED_FORMATS) as image:
        if image.size != (header.width, header.height):
            raise InvalidImage("the image's header and pixels differ in size")
        image.load()
        if header.format == "PNG":
            _scale_key(image, data[_PNG_DEPTH_AT])
        if image.size != (header.width, header.height):
            raise InvalidImage("the image's header and pixels differ in size")
        num_rows = max(1, _BAND_PIXELS // image.width)
        for top in range(0, image.height, num_rows):
            bottom = min(top + num_rows, image.height)
            band = image.crop((0, top, image.width, bottom))
            stored[top:bottom] = np.asarray(to_rgb(band))


def _scale_key(image: Image.Image, depth: int) -> None:
    """The transparent colour of a PNG as eight bits, which Pillow makes of its pixels and compares
    with the colour as the file says it. Of grey with 16 bits it keeps both.
    """
    key = image.info.get("transparency")
    if isinstance(key, tuple) and depth == 16:
        image.info["transparency"] = tuple(level >> 8 for level in cast("tuple[int, ...]", key))
    elif isinstance(key, int) and image.mode == "L" and depth < 8:
        most = (1 << depth) - 1
        image.info["transparency"] = (key & most) * 255 // most  # PNG: upper bits do not count


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: transparency is composited on white, 16 bits keep their upper 8."""
    if image.mode.startswith("I"):
        # Pillow's own conversions would clip at 255, which makes such an image white.
        values = np.asarray(image, dtype=np.int64)
        upper = (values >> 8).astype(np.uint8)
        upper[values == image.info.get("transparency", -1)] = 255
        return Image.fromarray(upper).convert("RGB")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")
