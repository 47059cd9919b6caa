"""Images that cost more than they weigh. `number` makes each file different from the others."""

import io
import struct
import zlib
from functools import cache

from PIL import Image

SIDE = 6300  # 39.7 million pixels: as PNG, 460 MB of a budget of 604
WEBP_SIDE = 5000  # 25 million: 575 MB of a budget of 604
OVER_SIDE = 9400  # 88.4 million, more than a gateway allows by default


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def webp(side: int, number: int = 0) -> bytes:
    """46 bytes: a lossless image of one colour needs none for its pixels."""
    colour = (number % 251, number // 251 % 251, 77)
    small = bytearray(_encoded(Image.new("RGB", (16, 16), colour), "WEBP", lossless=True))
    place = small.index(b"VP8L") + 9
    bits = int.from_bytes(small[place : place + 4], "little") >> 28 << 28
    bits |= (side - 1) | (side - 1) << 14
    small[place : place + 4] = bits.to_bytes(4, "little")
    return bytes(small)


@cache
def _zeros(row_bytes: int, rows: int) -> bytes:
    stream = zlib.compressobj(9)
    return b"".join([stream.compress(bytes(row_bytes)) for _ in range(rows)]) + stream.flush()


def png(side: int, number: int = 0, *, bits: int = 8, colour: int = 2) -> bytes:
    """Black pixels, in 11 to 115 KiB."""
    channels = {0: 1, 2: 3, 6: 4}[colour]
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, colour, 0, 0, 0))
    pixels = _zeros(1 + (side * channels * bits + 7) // 8, side)
    mark = _chunk(b"tEXt", b"n\0%d" % number)
    return b"\x89PNG\r\n\x1a\n" + head + mark + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


@cache
def _gif(side: int) -> bytes:
    return _encoded(Image.new("P", (side, side)), "GIF")


def gif(side: int, number: int = 0) -> bytes:
    whole = _gif(side)
    comment = b"%d" % number
    return whole[:-1] + b"!\xfe" + bytes((len(comment),)) + comment + b"\0;"


@cache
def _progressive(side: int) -> bytes:
    return _encoded(Image.new("RGB", (side, side)), "JPEG", progressive=True)


def scans(count: int, side: int, number: int = 0) -> bytes:
    """A progressive JPEG with `count` empty scans before its own."""
    whole = _progressive(side)
    first = whole.index(b"\xff\xda")
    head = whole[first : first + 2 + int.from_bytes(whole[first + 2 : first + 4], "big")]
    mark = b"\xff\xfe\0\x0a%08d" % number
    return whole[:2] + mark + whole[2:first] + head * count + whole[first:]


def texts(number: int = 0) -> bytes:
    """A PNG with 63 texts of 1 MiB each, in 64 KiB."""
    whole = _encoded(Image.new("RGB", (64, 64), (number % 251, number // 251, 9)), "PNG")
    text = _chunk(b"zTXt", b"key\0\0" + zlib.compress(b"x" * ((1 << 20) - 1), 9))
    return whole[:33] + text * 63 + whole[33:]


def segments(size: int, number: int = 0) -> bytes:
    """A JPEG with as many tiny Exif segments as `size` bytes hold."""
    whole = _encoded(Image.new("RGB", (64, 64), (number % 251, number // 251, 9)), "JPEG")
    segment = b"\xff\xe1\0\x0aExif\0\0MM"
    return whole[:2] + segment * (size // len(segment)) + whole[2:]


def small(number: int) -> bytes:
    """An honest image: 64 x 64 pixels that no other number gives."""
    image = Image.new("RGB", (64, 64), (number % 251, number // 251 % 251, number // 63001 % 251))
    return _encoded(image, "PNG")
