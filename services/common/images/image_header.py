"""Reads the header of an image file, before its pixels: format, size and orientation.

The gateway places an image in the prompt by the header, and the encoder decodes the image by the
same header, so that their sizes cannot differ.

The work is bounded: at most `MAX_SEGMENTS` before the first scan of a JPEG, `MAX_HEADER_BYTES`
before the first frame of a GIF, and `MAX_CHUNKS` of a PNG or WebP are read. Nothing is inflated,
and only Exif and XMP of bounded size are copied. Other segments and chunks are skipped by their
lengths, the pixels of a PNG included, because Exif may follow the pixels. A file that takes a
decoder long, such as a JPEG of many scans, is ended by the decoder's limit of CPU time.

Sizes and orientations are those of Pillow 13 for every file that Pillow decodes, except that the
orientation of a PNG is ignored in compressed text, in hexadecimal or behind `MAX_CHUNKS`. Where a
malformed file has two different sizes, the encoder refuses it.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.common.errors import InvalidImage

Format = Literal["PNG", "JPEG", "GIF", "WEBP"]
ALLOWED_FORMATS: tuple[Format, ...] = ("JPEG", "PNG", "WEBP", "GIF")

MAX_SOURCE_PIXELS = 256_000_000  # no encoder decodes a larger image, whatever its memory
MAX_HEADER_BYTES = 1 << 20
MAX_SEGMENTS = 256
_MAX_PADDING = MAX_HEADER_BYTES // MAX_SEGMENTS  # bytes before a segment
MAX_CHUNKS = 4096  # 32 MiB of pixels in chunks of 8 KiB, as libpng writes them
_MAX_GIF_BLOCKS = 16_384  # a block has at most 255 bytes

_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_PNG_XMP = b"XML:com.adobe.xmp\0\0"  # uncompressed text; a language may follow
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_ORIENTATION = 0x0112
_MAX_IFD_ENTRIES = 4096
_MARKER = re.compile(rb"\xff[\x01-\xfe]", re.DOTALL)  # skips stuffing and padding
# JPEG markers: supported frames, other frames and tables, and markers without a length.
_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
_PROGRESSIVE = frozenset((0xC2, 0xCA))
_OTHER_FRAMES = frozenset((0xC3, 0xC5, 0xC6, 0xC7, 0xC8, 0xCB, 0xCD, 0xCE, 0xCF, 0xDE))
_BARE = frozenset(range(0xD0, 0xD9))  # RST0 to RST7, SOI
_END, _SCAN, _APP1 = 0xD9, 0xDA, 0xE1


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The content of an image's header.

    Attributes:
        format: format of the file.
        width, height: size in pixels, before the orientation is applied.
        orientation: EXIF orientation, 1 to 8. 1 if the image is upright or has no orientation.
        channels: number of samples per pixel in the file.
        buffered: True for a JPEG in several scans, whose decoder keeps all coefficients in memory.
    """

    format: Format
    width: int
    height: int
    orientation: int = 1
    channels: int = 3
    buffered: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """Size (height, width) after the orientation is applied."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


class _Unreadable(Exception):
    """Raised if the bytes begin like a format and are not a valid header of it."""


def read_header(data: bytes, *, max_source_pixels: int) -> ImageHeader:
    """Reads the header of an encoded image.

    Raises:
        InvalidImage: the format is not allowed, the header is damaged or exceeds a bound of this
            module, or the image has more than `max_source_pixels`.
    """
    try:
        header = _read(data)
    except (_Unreadable, struct.error, IndexError):
        raise InvalidImage(
            f"not a readable image; allowed formats: {', '.join(ALLOWED_FORMATS)}"
        ) from None
    if header.width < 1 or header.height < 1:
        raise InvalidImage("the image has no pixels")
    if header.width * header.height > max_source_pixels:
        raise InvalidImage(
            f"the image has {header.width}x{header.height} pixels; "
            f"at most {max_source_pixels} are allowed"
        )
    return header


def _read(data: bytes) -> ImageHeader:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(data)
    if data.startswith(_PNG):
        return _read_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _read_gif(data)
    raise _Unreadable


def _read_png(data: bytes) -> ImageHeader:
    if data[8:16] != b"\0\0\0\x0dIHDR":
        raise _Unreadable
    width, height, _, color = struct.unpack_from(">IIBB", data, 16)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(color, 4)
    exif = xmp = b""
    has_pixels = False
    for number, (kind, start, length) in enumerate(_png_chunks(data, 8 + 12 + 13)):
        if not has_pixels and number >= MAX_CHUNKS:
            raise InvalidImage(f"the image has more than {MAX_CHUNKS} chunks before its pixels")
        if kind in (b"IDAT", b"fdAT"):
            has_pixels = True
        elif has_pixels and kind in (b"IEND", b"fcTL"):  # fcTL begins another frame
            break
        elif not has_pixels and kind in (b"IHDR", b"IEND"):
            raise _Unreadable
        elif length > MAX_HEADER_BYTES:
            continue
        elif kind == b"eXIf":
            exif = data[start : start + length]
        elif kind == b"iTXt" and data.startswith(_PNG_XMP, start):
            xmp = data[start + len(_PNG_XMP) : start + length]
    if not has_pixels:
        raise _Unreadable
    return ImageHeader("PNG", width, height, _orientation(exif, xmp), channels)


def _png_chunks(data: bytes, position: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start of the data and length of the first chunks, those of pixels included."""
    for _ in range(MAX_CHUNKS + 1):
        if position + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, position + 8, length
        position += 12 + length


def _read_jpeg(data: bytes) -> ImageHeader:
    frame: tuple[int, int, int, int] | None = None  # marker, height, width, components
    exif: list[bytes] = []
    xmp, position = b"", 2
    for _ in range(MAX_SEGMENTS + 1):
        at = _MARKER.search(data, position, position + _MAX_PADDING)
        if at is None:
            raise _Unreadable
        marker, position = data[at.end() - 1], at.end()
        if marker in _BARE:
            continue
        if marker == _END or marker in _OTHER_FRAMES or marker < 0xC0:
            raise _Unreadable
        (length,) = struct.unpack_from(">H", data, position)
        if length < 2 or position + length > len(data):
            raise _Unreadable
        if marker == _SCAN:
            if frame is None:
                raise _Unreadable
            sof, height, width, components = frame
            buffered = sof in _PROGRESSIVE or data[position + 2] < components
            orientation = _orientation(b"".join(exif), xmp)
            return ImageHeader("JPEG", width, height, orientation, components, buffered)
        if marker in _FRAMES:
            if frame is not None or length < 8:
                raise _Unreadable
            bits, height, width, components = struct.unpack_from(">BHHB", data, position + 2)
            if bits != 8 or components not in (1, 3, 4):
                raise _Unreadable
            frame = marker, height, width, components
        elif marker == _APP1 and position < MAX_HEADER_BYTES:
            if data.startswith(_EXIF, position + 2):
                first = len(_EXIF) if exif else 0
                exif.append(data[position + 2 + first : position + length])
            elif data.startswith(_XMP, position + 2):
                xmp = data[position + 2 + len(_XMP) : position + length]
        position += length
    raise InvalidImage(f"the image has more than {MAX_SEGMENTS} segments before its pixels")


def _read_gif(data: bytes) -> ImageHeader:
    """Returns the size of the screen, enlarged to fit the first frame, as Pillow does."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    end = position + MAX_HEADER_BYTES
    num_blocks = 0
    while num_blocks < _MAX_GIF_BLOCKS and position < end:
        num_blocks += 1
        kind = data[position]
        if kind == 0x2C:  # a frame
            left, top, w, h = struct.unpack_from("<HHHH", data, position + 1)
            return ImageHeader("GIF", max(width, left + w), max(height, top + h), channels=1)
        if kind == 0x3B:  # the end
            raise _Unreadable
        position += 1
        if kind != 0x21:
            continue
        position += 1  # the label of an extension, whose blocks end with an empty block
        while (size := data[position]) and num_blocks < _MAX_GIF_BLOCKS:
            position += 1 + size
            num_blocks += 1
        position += 1
    raise InvalidImage("the image's extensions are too large")


def _read_webp(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise _Unreadable
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise _Unreadable
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, channels=4)
    if kind != b"VP8X":
        raise _Unreadable
    flags, low_w, high_w, low_h, high_h = struct.unpack_from("<B3xHBHB", data, 20)
    exif, xmp = _webp_metadata(data, flags)
    return ImageHeader(
        "WEBP", (low_w | high_w << 16) + 1, (low_h | high_h << 16) + 1, _orientation(exif, xmp), 4
    )


def _webp_metadata(data: bytes, flags: int) -> tuple[bytes, bytes]:
    """Returns the first Exif chunk and the first XMP chunk, if the header's flags announce them."""
    found: dict[bytes, bytes] = {}
    wanted = {b"EXIF": flags & 8, b"XMP ": flags & 4}
    end = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    position = 12
    for _ in range(MAX_CHUNKS):
        if not any(wanted.values()) or position + 8 > end:
            break
        name, size = struct.unpack_from("<4sI", data, position)
        if wanted.get(name):
            wanted[name] = 0
            if size <= MAX_HEADER_BYTES:
                found[name] = data[position + 8 : position + 8 + size]
        position += 8 + size + (size & 1)
    return found.get(b"EXIF", b""), found.get(b"XMP ", b"")


def _orientation(exif: bytes, xmp: bytes) -> int:
    """Returns the orientation in Exif, or in XMP if Exif has none. 1 if Exif is damaged."""
    found = _exif_orientation(exif) if exif else None
    if found is None and xmp and (match := _XMP_ORIENTATION.search(xmp)):
        found = int(match[1])
    return found if found and found <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    """Returns the orientation tag in the first directory of a TIFF. None if the tag is missing, 1
    if the data is damaged.
    """
    for _ in range(2):
        exif = exif.removeprefix(_EXIF)
    if not exif:
        return None
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or 42 not in exif[2:4]:
        return 1
    found: int | None = None
    try:
        (first,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, first)
        for index in range(min(count, _MAX_IFD_ENTRIES)):
            place = first + 2 + 12 * index
            tag, kind, number = struct.unpack_from(f"{order}HHI", exif, place)
            if tag == _ORIENTATION and number == 1 and kind in (3, 4):
                (found,) = struct.unpack_from(order + "HI"[kind == 4], exif, place + 8)
    except struct.error:
        pass  # the tag counts if it was read before the damage
    return found if found is None or found in range(1, 9) else 1
