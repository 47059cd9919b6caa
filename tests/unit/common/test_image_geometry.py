"""From a header to a grid: as Hugging Face's smart_resize, and nothing for hostile bytes."""

import importlib.util
import io
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from services.common.errors import InvalidImage
from services.common.image_geometry import (
    ImageLimits,
    image_grid,
    open_image,
    smart_resize,
    upright_size,
)

LIMITS = ImageLimits(16, 2, 65536, 16777216)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((16, 16), (256, 256)),
        ((15, 2000), (32, 2976)),
        ((1372, 2044), (1376, 2048)),
        ((1024, 1024), (1024, 1024)),
        ((48, 80), (224, 352)),
    ],
)
def test_known_sizes(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert smart_resize(*size, LIMITS) == resized


def theirs() -> Callable[..., tuple[int, int]]:
    """Hugging Face's function, cut out of its module's file (which wants torchvision)."""
    spec = importlib.util.find_spec("transformers.models.qwen2_vl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    source = (folder / "image_processing_pil_qwen2_vl.py").read_text()
    start = source.index("def smart_resize(")
    end = source.index("\n\n\n", start)
    scope: dict[str, object] = {"math": __import__("math")}
    exec(source[start:end], scope)
    return scope["smart_resize"]  # type: ignore[return-value]


def test_smart_resize_is_hugging_faces() -> None:
    reference = theirs()
    rng = random.Random(0)
    for _ in range(30_000):
        height, width = rng.randint(1, 6000), rng.randint(1, 6000)
        patch, least = rng.choice((14, 16)), rng.choice((3136, 65536))
        limits = ImageLimits(patch, 2, least, rng.choice((200_000, 1_003_520, 16_777_216)))
        try:
            expected = reference(
                height, width, factor=patch * 2, min_pixels=least, max_pixels=limits.max_pixels
            )
        except ValueError:
            with pytest.raises(InvalidImage):
                smart_resize(height, width, limits)
        else:
            assert smart_resize(height, width, limits) == expected, (height, width, limits)


def test_the_grid_counts_patches() -> None:
    assert image_grid(1372, 2044, LIMITS) == (1, 86, 128)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001)])
def test_extreme_shapes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage):
        smart_resize(*size, LIMITS)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_swaps_the_sides(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.new("RGB", (30, 20)), kind, exif=exif.tobytes())
    found = upright_size(open_image(data, max_source_pixels=1000))
    assert found == ((30, 20) if orientation >= 5 else (20, 30))


def png_header(width: int, height: int) -> bytes:
    """A PNG of any size without a pixel of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(13_000, 13_000), (100_000, 100_000), (1, 2_000_000)])
def test_the_cap_holds_on_the_header_alone(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage):
        open_image(png_header(*size), max_source_pixels=1_000_000)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "TGA", "JPEG2000", "PDF", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    data = encoded(Image.new("RGB", (32, 32)), kind)
    with pytest.raises(InvalidImage, match="allowed formats"):
        open_image(data, max_source_pixels=10_000)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"GIF89a", b"\xff\xd8\xff", b"RIFF    WEBP"])
def test_hostile_bytes_are_invalid_images(data: bytes) -> None:
    with pytest.raises(InvalidImage) as caught:
        open_image(data, max_source_pixels=10_000)
    assert "0x" not in caught.value.message


def test_damaged_exif_is_opened_as_if_it_had_none_and_without_a_warning() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03"  # ends within its first entry
    data = encoded(Image.new("RGB", (40, 30)), "JPEG", exif=exif)
    assert upright_size(open_image(data, max_source_pixels=1 << 20)) == (30, 40)
    # Where nothing but the module itself has set filters:
    program = (
        "import sys; from services.common.image_geometry import open_image, upright_size;"
        "upright_size(open_image(sys.stdin.buffer.read(), max_source_pixels=1 << 20))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program], input=data, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
