"""Image URLs to bytes and grids: bounds before work, and files in one directory alone."""

import base64
import io
import random
import time
from urllib.parse import quote

import pytest
from PIL import Image

from services.common.errors import (
    InvalidImage,
    InvalidRequest,
)
from services.common.geometry import Geometry
from services.gateway.bounds import Bounds
from services.gateway.entry_store import MemoryEntryStore
from services.gateway.media.images import LOW_DETAIL_PIXELS, ImageReader, ImageSource
from services.gateway.media.kinds import IMAGE, VIDEO
from services.gateway.media.local_files import LocalFiles
from services.gateway.media.media_loader import MediaLoader, decode_data_url
from tests.slots import slot_of

GEOMETRY = Geometry(0, 16, 2, 65536, 1 << 20)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


# data: URLs


TYPES = (
    "image/png", "image/jpeg", "", "application/octet-stream", "IMAGE/PNG;charset=x",
    "image/mpo",  # Pillow's name of what phones take
    "binary/octet-stream",  # S3's default
    "image/gif", "video/vnd.avi", "video/webm;codecs=vp9,opus", 'video/mp4; codecs="avc1, mp4a"',
)  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("wanted", [IMAGE, VIDEO])
def test_a_data_url_is_of_any_type(kind, wanted):
    assert decode_data_url(data_url(b"abc", kind), 3, wanted) == b"abc"


@pytest.mark.parametrize(
    "url",
    [
        "data:", "data:,", "data:image/png,abc", "data:image/png;base64", "data:;base64,####",
        "data:image/png;base64,Y", "data:image/png;base64,YWJj====", "data:image/png;base64,é",
        "data:image/png;base64,@@@@YWJj", "data:image/png;base64,YWJj\x0b",
        "data:image/png;base64,YW%4Aj", "data:" + ";x" * 200 + ",", "data:image/png;base64;x,YWJj",
    ],
)  # fmt: skip
def test_bad_data_url_is_the_callers_fault(url):
    with pytest.raises(InvalidRequest):
        decode_data_url(url, 100)


@pytest.mark.parametrize("size", [1, 2, 3, 200, 70_000])
def test_base64_is_read_as_encoders_write_it(size):
    """In lines, with blanks, escaped, of the URL-safe alphabet, without padding."""
    file = random.Random(size).randbytes(size)
    text = base64.b64encode(file).decode()
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    variants = [
        base64.encodebytes(file).decode(), "\r\n".join(lines) + "\r\n", f" {text}", text + "\n",
        base64.urlsafe_b64encode(file).decode(), text.rstrip("="),
    ]  # fmt: skip
    for variant in variants:
        assert decode_data_url(f"data:image/png;base64,{variant}", size) == file
    assert decode_data_url(f"data:image/png;base64,{quote(text, safe='')}", 3 * size) == file


def test_data_url_size_is_checked_before_decoding():
    with pytest.raises(InvalidImage, match="more than 3"):
        decode_data_url("data:;base64," + "!" * 100, 3)
    with pytest.raises(InvalidImage):
        decode_data_url(data_url(b"abcd"), 3)
    with pytest.raises(InvalidImage):
        decode_data_url("data:;base64,", 3)


# file: URLs


@pytest.fixture
def files(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(b"image")
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "big").write_bytes(b"x" * 101)
    return allowed


def loader(directory=None) -> MediaLoader:
    return MediaLoader(None, None if directory is None else LocalFiles(directory))


async def load(found: MediaLoader, url: str) -> bytes:
    return await found.load(url, 100, IMAGE, slot_of())


async def test_file_under_the_allowed_directory(files):
    for url in (f"file://{files}/a%20b.png", f"file:{files}/a b.png", f"FILE://{files}/a b.png"):
        assert await load(loader(files), url) == b"image"


@pytest.mark.parametrize(
    "path",
    ["../secret", "link", "%2e%2e/secret", "..%2fsecret", "", "missing", "a b.png/x", "big", "%00"],
)
async def test_file_elsewhere_is_refused(files, path):
    with pytest.raises(InvalidRequest):
        await load(loader(files), f"file://{files}/{path}")


async def test_a_path_that_is_too_long_is_refused_at_once(files):
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        await load(loader(files), f"file://{files}/{'a/' * 100_000}")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("swapped", ["folder", "folder/inner"])
async def test_a_folder_that_becomes_a_link_is_found_out(files, swapped):
    """Between the check of the path and the opening of the file."""
    (files / "folder" / "inner").mkdir(parents=True)
    (files / "folder" / "inner" / "image.png").write_bytes(b"image")
    outside = files.parent / "outside"
    (outside / "inner").mkdir(parents=True)
    for folder in (outside, outside / "inner"):
        (folder / "image.png").write_bytes(b"secret")

    class Swapped(LocalFiles):
        def resolve(self, path):
            found = super().resolve(path)
            (files / swapped).rename(files.parent / "before")
            (files / swapped).symlink_to(outside / swapped.removeprefix("folder").strip("/"))
            return found

    url = f"file://{files}/folder/inner/image.png"
    assert await load(loader(files), url) == b"image"
    with pytest.raises(InvalidRequest, match="outside"):
        await load(MediaLoader(None, Swapped(files)), url)


async def test_files_are_refused_by_default(files):
    for url in (f"file://{files}/a b.png", "/etc/passwd", "../x", "file:relative", "ftp://x/y"):
        with pytest.raises(InvalidRequest):
            await load(loader(), url)
    with pytest.raises(InvalidRequest):
        await load(loader(files), "file://host/etc/passwd")
    with pytest.raises(InvalidRequest):
        await load(loader(files), "file:///dev/zero")


# From bytes to a grid


def reader(**options) -> ImageReader:
    return ImageReader(MediaLoader(None), GEOMETRY, Bounds(**options), MemoryEntryStore())


async def test_grid_and_key_follow_from_the_bytes():
    sources = [ImageSource(data_url(png(300, 200)), "p0"), ImageSource(data_url(png(64, 64)), "p1")]
    images = await reader().read(sources, slot_of(), 1 << 20)
    assert [unit.grid for image in images for unit in image.units] == [(1, 14, 20), (1, 16, 16)]
    keys = {await image.key(prefix, image.units[0], salt)
            for image in images for prefix in (b"a", b"b") for salt in (b"", b"s")}  # fmt: skip
    assert len(keys) == 8
    assert all(len(key) == 32 for key in keys)


async def test_detail_and_pixel_limits_narrow_the_grid():
    url = data_url(png(1000, 800))

    async def area(**fields):
        (image,) = await reader().read([ImageSource(url, "p", **fields)], slot_of(), 1 << 20)
        return image.units[0].num_patches * 256

    assert await area() == await area(detail="high") > LOW_DETAIL_PIXELS
    assert await area(detail="low") <= LOW_DETAIL_PIXELS
    assert await area(max_pixels=100_000) <= 100_000
    assert await area(max_pixels=1) <= GEOMETRY.min_pixels
    assert 1 << 20 > await area(min_pixels=900_000) >= 900_000
    assert await area(min_pixels=1 << 31) < 1.1 * GEOMETRY.max_pixels  # HF's formula rounds up
    assert await area(detail="low", max_pixels=1 << 20) > LOW_DETAIL_PIXELS
    with pytest.raises(InvalidRequest):
        await area(min_pixels=200_000, max_pixels=100_000)


async def test_failure_names_the_image():
    sources = [ImageSource(data_url(png(9, 9)), "first"), ImageSource(data_url(b"no"), "second")]
    with pytest.raises(InvalidImage) as failed:
        await reader().read(sources, slot_of(), 1 << 20)
    assert failed.value.param == "second"
    for options, limit in (({}, 10), ({"max_source_pixels": 80}, 1 << 20)):
        with pytest.raises(InvalidImage):
            await reader(**options).read(sources[:1], slot_of(), limit)
