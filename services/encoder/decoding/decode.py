"""Decodes an image file to upright RGB pixels.

The caller has read the file's header, which has the image's size and orientation. simplejpeg
decodes JPEG files and Pillow all others, and both must find the size of the header. Pixels are
converted in bands of rows, so that only the decoder's own copy of the image is large. Each defect
of an image is reported as an `InvalidImage`. The file needs neither torch nor a device.
"""

import io
import warnings
from typing import NamedTuple, cast

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin, WebPImagePlugin

from services.common.errors import InvalidImage
from services.common.images.image_header import ALLOWED_FORMATS, ImageHeader

# Pillow warns about damage outside the pixels, for example in EXIF data, and about large sizes,
# which are bounded elsewhere. The filter is set once for the whole process, because
# `catch_warnings` is not safe in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")
Image.MAX_IMAGE_PIXELS = None
# Pillow would otherwise load its plugins in the first call. Importing the module registers WebP.
Image.preinit()
assert WebPImagePlugin.SUPPORTED


def _skip_chunk(stream: PngImagePlugin.PngStream, position: int, length: int) -> bytes:
    """Reads a chunk without parsing its content. Its checksum is still verified."""
    assert stream.fp is not None
    return stream.fp.read(length)


# Texts and colour profiles change no pixel here. Pillow would inflate up to a MiB of each chunk,
# which takes 2.5 ms for each KiB of a file.
for _kind in ("tEXt", "zTXt", "iTXt", "iCCP"):
    setattr(PngImagePlugin.PngStream, f"chunk_{_kind}", _skip_chunk)

_read_transparency = PngImagePlugin.PngStream.chunk_tRNS


def _read_one_bit_transparency(self: PngImagePlugin.PngStream, pos: int, length: int) -> bytes:
    """Reads the transparent colour of a PNG. In an image of one bit per pixel, PNG uses the lowest
    bit of the colour alone, while Pillow reads every other value as white.
    """
    data = _read_transparency(self, pos, length)
    if self.im_mode == "1":
        self.im_info["transparency"] = 255 * (data[1] & 1)
    return data


PngImagePlugin.PngStream.chunk_tRNS = _read_one_bit_transparency

_PNG_DEPTH_AT = 24  # offset of the number of bits per sample in a PNG file
_BAND_PIXELS = 1 << 18
_BASE_BYTES = 24 << 20  # for tables, and for the conversion of a band
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


class _Orientation(NamedTuple):
    """The position of a file's rows and columns in the upright image.

    Attributes:
        is_transposed: True if rows of the file are columns of the upright image.
        row_step: -1 if the file's rows are in reverse order, else 1.
        column_step: -1 if the file's columns are in reverse order, else 1.
    """

    is_transposed: bool
    row_step: int
    column_step: int

    def stored(self, upright: np.ndarray) -> np.ndarray:
        """Returns a view of upright pixels `[height, width, 3]` in the order of the file."""
        pixels = upright.transpose(1, 0, 2) if self.is_transposed else upright
        return pixels[:: self.row_step, :: self.column_step]


_ORIENTATIONS = {  # by EXIF's number
    1: _Orientation(False, 1, 1),
    2: _Orientation(False, 1, -1),
    3: _Orientation(False, -1, -1),
    4: _Orientation(False, -1, 1),
    5: _Orientation(True, 1, 1),
    6: _Orientation(True, -1, 1),
    7: _Orientation(True, -1, -1),
    8: _Orientation(True, 1, -1),
}


def decode(data: bytes, header: ImageHeader, out: np.ndarray) -> None:
    """Decodes the first frame of an image. Transparent pixels are composited on white.

    Args:
        data: the encoded file.
        header: header of the file.
        out: contiguous uint8 array `[height, width, 3]`, into which the upright pixels are written.

    Raises:
        InvalidImage: the file is truncated or corrupt.
        MemoryError: decoding needs more memory than the process may allocate.
    """
    stored = _ORIENTATIONS[header.orientation].stored(out)
    try:
        if not _decode_jpeg(data, header, stored):
            _decode_with_pillow(data, header, stored)
    except MemoryError:
        raise
    except Exception:
        # Pillow raises exceptions of many types for hostile files. Clients do not see their text.
        raise InvalidImage("the image is truncated or corrupt") from None


def worst_case_bytes(header: ImageHeader, file_bytes: int) -> int:
    """Returns the most bytes that `decode` uses for an image, including the file and the pixels.

    The bytes per pixel were measured with Pillow 13. Pillow's images have one or four. WebP's
    decoder has two canvases in addition to the frame that it returns and Pillow's copy. A JPEG of
    several scans needs two bytes for each coefficient. Pillow also decodes JPEG files that
    simplejpeg refuses.

    Args:
        header: header of the image file.
        file_bytes: size of the image file.
    """
    per_pixel = {"PNG": 3 + 8, "GIF": 3 + 8, "WEBP": 3 + 20, "JPEG": 3 + 4}[header.format]
    if header.format == "JPEG":
        per_pixel += 2 * header.channels * header.buffered
        per_pixel += 3 * (header.orientation != 1)
    # A file has three copies: in the engine, in the decoder process, and in its decoder's buffers.
    return header.width * header.height * per_pixel + 3 * file_bytes + _BASE_BYTES


def _decode_jpeg(data: bytes, header: ImageHeader, stored: np.ndarray) -> bool:
    """Decodes an undamaged colour or grey JPEG, with the same pixels as Pillow.

    simplejpeg uses the same library as Pillow, but writes into `stored` without further copies and
    releases the interpreter lock.

    Returns:
        False if Pillow has to decode the file.
    """
    if header.format != "JPEG" or header.channels not in (1, 3):
        return False
    direct = stored.flags.c_contiguous
    pixels = stored if direct else np.empty(stored.shape, np.uint8)
    try:
        # In strict mode a damaged file is refused here, and Pillow decides whether to accept it.
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
            _scale_transparency(image, data[_PNG_DEPTH_AT])
        if image.size != (header.width, header.height):
            raise InvalidImage("the image's header and pixels differ in size")
        num_rows = max(1, _BAND_PIXELS // image.width)
        for top in range(0, image.height, num_rows):
            bottom = min(top + num_rows, image.height)
            band = image.crop((0, top, image.width, bottom))
            stored[top:bottom] = np.asarray(to_rgb(band))


def _scale_transparency(image: Image.Image, depth: int) -> None:
    """Scales the transparent colour of a PNG to eight bits. Pillow scales the pixels to eight bits,
    but compares them with the colour as the file stores it. It does not scale grey with 16 bits.
    """
    key = image.info.get("transparency")
    if isinstance(key, tuple) and depth == 16:
        image.info["transparency"] = tuple(level >> 8 for level in cast("tuple[int, ...]", key))
    elif isinstance(key, int) and image.mode == "L" and depth < 8:
        most = (1 << depth) - 1
        image.info["transparency"] = (key & most) * 255 // most  # PNG ignores the upper bits


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to RGB. Transparency is composited on white, and values of 16
    bits are reduced to their upper 8 bits.
    """
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip the values at 255, which makes such an image white.
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
