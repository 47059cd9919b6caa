"""The header reader: as Pillow reads files, bounded where Pillow is not."""

import contextlib
import io
import random
import struct
import sys
import time
import tracemalloc
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.common.errors import InvalidImage
from services.common.images.image_header import (
    ALLOWED_FORMATS,
    MAX_CHUNKS,
    MAX_SEGMENTS,
    ImageHeader,
    read_header,
)
from tests.noise import least

SIZES = ((1, 1), (30, 20), (255, 256), (257, 3), (1000, 700))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read(data: bytes, max_source_pixels: int = 1 << 24) -> ImageHeader:
    return read_header(data, max_source_pixels=max_source_pixels)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def upright(data: bytes) -> tuple[int, int]:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return image.height, image.width


FILES = {
    "PNG": [(mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
    "JPEG": [("L", {}), ("RGB", {}), ("CMYK", {}), ("RGB", {"progressive": True}),
             ("RGB", {"subsampling": 0, "quality": 95}), ("RGB", {"comment": b"\xff\xd8\xff"}),
             ("RGB", {"icc_profile": b"x" * 200_000})],
    "WEBP": [("RGB", {}), ("RGBA", {}), ("RGB", {"lossless": True}), ("RGBA", {"lossless": True}),
             ("RGB", {"icc_profile": b"x" * 1001})],
    "GIF": [("P", {}), ("L", {}), ("P", {"comment": b"x" * 700}), ("P", {"transparency": 3})],
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_sizes_are_pillows(kind: str) -> None:
    for mode, options in FILES[kind]:
        for width, height in SIZES:
            image = noise(width, height, mode.partition(";")[0])
            if mode == "I;16":
                image = Image.fromarray(np.zeros((height, width), np.uint16))
            header = read(encoded(image, kind, **options))
            assert (header.format, header.width, header.height) == (kind, width, height)
            assert header.orientation == 1


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_pillows(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x010E] = "a description that lies before it, at an offset"
    exif[0x0112] = orientation
    for alpha in ("RGB", "RGBA")[: 1 + (kind == "WEBP")]:
        for block in (exif.tobytes(), exif.tobytes()[6:]):
            if kind == "JPEG":
                block = exif.tobytes()
            data = encoded(noise(30, 20, alpha), kind, exif=block)
            assert read(data).upright_size == upright(data)
            assert read(data).orientation == (orientation if 1 <= orientation <= 8 else 1)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_orientation_in_xmp_counts_where_exif_does_not_say(kind: str) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for exif, expected in ((None, 6), (Image.Exif(), 6), ({0x0112: 3}, 3), ({0x0100: 5}, 6)):
        block = Image.Exif()
        block.update(exif or {})
        options = {} if exif is None else {"exif": block.tobytes()}
        data = encoded(noise(30, 20), kind, xmp=xmp, **options)
        assert read(data).orientation == expected, exif
        assert read(data).upright_size == upright(data)


def test_a_first_frame_beyond_the_screen_enlarges_a_gif() -> None:
    data = bytearray(encoded(noise(30, 20, "P"), "GIF"))
    data[6:10] = struct.pack("<HH", 10, 12)
    assert (read(bytes(data)).height, read(bytes(data)).width) == (20, 30)
    assert Image.open(io.BytesIO(data)).size == (30, 20)


@pytest.mark.parametrize("kind", ALLOWED_FORMATS)
def test_animations_and_appended_bytes(kind: str) -> None:
    frames = [noise(30, 20).convert("RGB") for _ in range(3)]
    options = {} if kind == "JPEG" else {"save_all": True, "append_images": frames}
    data = encoded(frames[0], kind, **options) + b"\xff" * 100
    assert read(data).upright_size == (20, 30)


def test_what_pillow_decodes_has_the_size_that_is_read() -> None:
    """Damaged files: whatever both read has one size and one orientation."""
    rng, agreed = random.Random(0), 0
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, (mode, _) in [(kind, row) for kind, rows in FILES.items() for row in rows]:
        if mode == "I;16":
            continue
        options = {} if kind == "GIF" else {"exif": exif.tobytes()}
        whole = encoded(noise(40, 30, mode), kind, **options)
        for _ in range(40):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
            try:
                image = Image.open(io.BytesIO(data), formats=ALLOWED_FORMATS)
                image.load()
                header = read(bytes(data))
            except Exception:
                continue
            assert (header.width, header.height) == image.size
            agreed += 1
    assert agreed > 200


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(width: int, height: int, *before: bytes) -> bytes:
    """A PNG of any size without a pixel of data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = head + b"".join(before) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(13_000, 13_000), (100_000, 100_000), (1, 2_000_000)])
def test_the_cap_holds_on_the_header_alone(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage, match="at most 1000000"):
        read(png(*size), 1_000_000)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "TGA", "JPEG2000", "PDF", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(InvalidImage, match="allowed formats"):
        read(encoded(Image.new("RGB", (32, 32)), kind))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"GIF89a", b"\xff\xd8\xff", b"RIFF    WEBP"])
def test_hostile_bytes_are_invalid_images(data: bytes) -> None:
    with pytest.raises(InvalidImage) as caught:
        read(data)
    assert "0x" not in caught.value.message


def test_damaged_exif_counts_as_none() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03"  # ends within its first entry
    assert read(encoded(noise(40, 30), "JPEG", exif=exif)).upright_size == (30, 40)


def segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes((marker,)) + struct.pack(">H", len(data) + 2) + data


def jpeg_after(*segments: bytes) -> bytes:
    whole = encoded(noise(40, 30), "JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


@cache
def bombs() -> dict[str, bytes]:
    """Files that cost Pillow seconds or hundreds of MiB to open, and worse ones."""
    text = b"key\0\0" + zlib.compress(b"x" * (1 << 20), 9)
    ifd = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x00\0\x03\0\0\0\x01\0\0\0\0" * 5000
    gif = encoded(noise(20, 20, "P"), "GIF")
    after = 13 + (3 << (gif[10] & 7) + 1)
    webp = encoded(noise(20, 20, "RGBA"), "WEBP", exif=b"Exif\0\0MM")
    return {
        "png text": png(8, 8, *[chunk(b"zTXt", text)] * 63),
        "png chunks": png(8, 8, *[chunk(b"tEXt", b"")] * 300_000),
        "png exif": png(8, 8, *[chunk(b"eXIf", ifd[6:])] * 300),
        "jpeg exif": jpeg_after(*[segment(0xE1, b"Exif\0\0a")] * 300_000),
        "jpeg app": jpeg_after(*[segment(0xE5, b"")] * 600_000),
        "jpeg directories": jpeg_after(*[segment(0xE1, ifd)] * 300),
        "jpeg padding": jpeg_after(b"\xff" * (18 << 20)),
        "jpeg stuffing": jpeg_after(b"\xff\0" * (9 << 20)),
        "jpeg xmp": jpeg_after(*[segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0"
                                         + b"tiff:Orientation" * 4000)] * 250),
        "gif comments": gif[:after] + b"!\xfe" + b"\x01a" * 2_000_000 + b"\0" + gif[after:],
        "gif extensions": gif[:after] + b"!\xf9\0" * 2_000_000 + gif[after:],
        "gif junk": gif[:after] + b"\x01" * (18 << 20) + gif[after:],
        "webp chunks": b"RIFF\xff\xff\xff\x7f" + webp[8:30] + b"abcd\0\0\0\0" * 500_000,
    }  # fmt: skip


@pytest.mark.parametrize("name", bombs())
def test_no_header_costs_much(name: str) -> None:
    data = bombs()[name]

    def cost() -> float:
        start = time.process_time()
        with contextlib.suppress(InvalidImage):
            read(data)
        return time.process_time() - start

    assert least(cost, 0.3) <= 0.3
    tracemalloc.start()
    cost()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_segments_before_the_pixels_are_counted() -> None:
    assert read(jpeg_after(*[segment(0xFE, b"x" * 1000)] * (MAX_SEGMENTS - 20))).width == 40
    with pytest.raises(InvalidImage, match="segments"):
        read(jpeg_after(*[segment(0xFE, b"")] * MAX_SEGMENTS))


def test_a_jpeg_may_have_megabytes_before_its_pixels() -> None:
    """As phones write depth and a second picture into XMP."""
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = encoded(noise(40, 30), "JPEG", exif=exif.tobytes())
    at = whole.index(b"\xff\xdb")
    more = segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + b"x" * 65_000)
    data = whole[:at] + more * (MAX_SEGMENTS - 20) + whole[at:]
    assert len(data) > 15_000_000
    assert read(data).upright_size == upright(data) == (40, 30)


def test_it_needs_neither_pillow_nor_torch() -> None:
    module = sys.modules["services.common.images.image_header"]
    assert not {"PIL", "torch", "numpy"} & set(vars(module))


def test_chunks_of_pixels_are_counted_too() -> None:
    """A gateway reads headers in its event loop. Of 8 KiB, 2,560 make 20 MiB."""
    said = chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0")
    for num_chunks, orientation in ((2560, 6), (MAX_CHUNKS + 1, 1)):
        data = png(8, 8, *[chunk(b"IDAT", b"")] * num_chunks, said)
        assert read(data).orientation == orientation


@pytest.mark.parametrize("name", ["exif", "xmp", "both"])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("is_animated", [False, True])
def test_a_png_says_its_orientation_before_or_behind_its_pixels(
    name: str, is_before: bool, is_animated: bool
) -> None:
    """As Exif or as XMP; Pillow reads both, and no more once another frame begins."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    exif = Image.Exif()
    exif[0x0112] = 6
    said = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    xmp = b'<rdf:Description tiff:Orientation="8"/>'
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0en\0\0" + xmp)
    extra = {"exif": said, "xmp": text, "both": text + said}[name]
    first, second = (Image.new("RGB", (40, 30), colour) for colour in ("red", "blue"))
    frames = {"save_all": True, "append_images": [second]} if is_animated else {}
    data = encoded(first, **frames)
    at = data.index(b"IDAT") - 4 if is_before else data.index(b"IEND") - 4
    data = data[:at] + extra + data[at:]
    expected = 8 if name == "xmp" else 6
    assert read(data).orientation == (1 if is_animated and not is_before else expected)
    if name == "exif":  # the encoder's decoder has Pillow pass over texts, in this process, too
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert read(data).upright_size == (turned.height, turned.width)
