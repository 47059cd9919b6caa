"""Decoding: every format and mode, upright, on white; hostile bytes are the caller's error."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, PngImagePlugin

from services.common.errors import InvalidImage
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import read_header
from services.encoder.decoding.decode import decode, to_rgb
from tests.in_process_decoder import preprocess

GEOMETRY = Geometry(0, 16, 2, 1024, 1 << 20)
WHITE = (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    header = read_header(data, max_source_pixels=1 << 24)
    pixels = np.empty((*header.upright_size, 3), np.uint8)
    decode(data, header, pixels)
    return pixels


def make_image(width: int = 40, height: int = 30) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_opaque_png_modes(mode: str) -> None:
    image = make_image().convert(mode)
    assert np.array_equal(pixels_of(encoded(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_white(mode: str) -> None:
    image = make_image().convert(mode)
    alpha = Image.new("L", image.size, 0)
    alpha.paste(255, (0, 0, 20, 30))
    image.putalpha(alpha)
    found = pixels_of(encoded(image))
    assert (found[:, 20:] == 255).all()
    assert np.array_equal(found[:, :20], np.asarray(image.convert("RGB"))[:, :20])


def test_half_transparency_is_blended() -> None:
    found = pixels_of(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128))))
    assert abs(int(found[0, 0, 0]) - 127) <= 1


def test_palette_with_transparent_entry() -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (0, 0, 4, 8))
    found = pixels_of(encoded(image, transparency=0))
    assert tuple(found[0, 7]) == WHITE and tuple(found[0, 0]) == (200, 100, 50)


def test_color_key_transparency() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    found = pixels_of(encoded(image, transparency=(1, 2, 3)))
    assert tuple(found[0, 0]) == (9, 9, 9) and tuple(found[1, 1]) == WHITE


def test_sixteen_bits_keep_their_upper_eight() -> None:
    values = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    found = pixels_of(encoded(Image.fromarray(values)))
    assert np.array_equal(found[..., 0], values >> 8)


def test_sixteen_bits_with_a_transparent_value_keep_their_upper_eight() -> None:
    values = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    found = pixels_of(encoded(Image.fromarray(values), transparency=7000))
    assert np.array_equal(found[..., 0], np.where(values == 7000, 255, values >> 8))


def png(depth: int, color: int, key: bytes, row: bytes, width: int) -> bytes:
    """One row, as Pillow does not write it."""
    head = struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0)
    chunks = (b"IHDR", head), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def test_a_transparent_colour_has_the_depth_of_its_file() -> None:
    colours = struct.pack(">9H", 0, 0, 0, 0x1200, 0x1200, 0x1200, 0x3400, 0, 0)
    found = pixels_of(png(16, 2, struct.pack(">3H", 0x1200, 0x1200, 0x1200), colours, 3))
    assert found[0].tolist() == [[0, 0, 0], [255, 255, 255], [0x34, 0, 0]]
    found = pixels_of(png(4, 0, struct.pack(">H", 3), bytes([0x03, 0x4F]), 4))
    assert found[0, :, 0].tolist() == [0, 255, 0x44, 255]
    found = pixels_of(png(4, 0, struct.pack(">H", 0x13), bytes([0x03, 0x4F]), 4))
    assert found[0, :, 0].tolist() == [0, 255, 0x44, 255]  # of which no more than the depth counts
    found = pixels_of(png(8, 0, struct.pack(">H", 0x10A), bytes([9, 10, 11]), 3))
    assert found[0, :, 0].tolist() == [9, 255, 11]
    found = pixels_of(png(2, 0, struct.pack(">H", 1), bytes([0b00011011]), 4))
    assert found[0, :, 0].tolist() == [0, 255, 170, 255]
    colours = bytes([10, 11, 12, 13, 14, 15])
    found = pixels_of(png(8, 2, struct.pack(">3H", 0x10A, 0x20B, 12), colours, 2))
    assert found[0].tolist() == [[255, 255, 255], [13, 14, 15]]


@pytest.mark.parametrize(("key", "transparent"), [(0, 0), (1, 1), (0x100, 0), (0x101, 1), (2, 0)])
def test_of_one_bits_transparent_colour_one_bit_counts(key: int, transparent: int) -> None:
    """Black is white where it is transparent, and white stays white."""
    found = pixels_of(png(1, 0, struct.pack(">H", key), bytes([0b01000000]), 2))
    assert found[0, :, 0].tolist() == ([255, 255] if transparent == 0 else [0, 255])


@pytest.mark.parametrize("after_pixels", [False, True])
def test_texts_and_profiles_change_no_pixel_and_are_not_inflated(
    after_pixels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, texts = make_image(), PngImagePlugin.PngInfo()
    plain = encoded(image)
    texts.add_text("Software", "a camera")
    texts.add_text("transparency", "no colour", zip=True)
    texts.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta/>" * 1000, zip=True)
    texts.add_text("Comment", "x" * (16 << 20), zip=True)
    for _ in range(9):
        texts.add_text("Bomb", "x" * (1 << 20), zip=True)
    whole = encoded(image, pnginfo=texts, icc_profile=bytes(4000))
    first, end = whole.index(b"iCCP") - 4, whole.index(b"IDAT") - 4
    place = plain.index(b"IEND") - 4 if after_pixels else 33
    data = plain[:place] + whole[first:end] + plain[place:]
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", None)
    assert np.array_equal(pixels_of(data), np.asarray(image))


def test_a_text_whose_checksum_is_wrong_is_refused() -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Software", "a camera")
    damaged = encoded(make_image(), pnginfo=texts).replace(b"a camera", b"a kamera")
    with pytest.raises(InvalidImage):
        pixels_of(damaged)


def test_cmyk_jpeg() -> None:
    image = make_image().convert("CMYK")
    data = encoded(image, "JPEG", quality=100)
    assert np.array_equal(pixels_of(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


JPEG_SIZES = ((1, 1), (7, 1), (16, 16), (33, 31), (100, 127))


@pytest.mark.parametrize("sampling", ["444", "422", "420", "411", "440", "Gray"])
def test_jpegs_decode_as_pillow_decodes_them(sampling: str) -> None:
    for width, height in JPEG_SIZES:
        for quality in (5, 75, 100):
            data = simplejpeg.encode_jpeg(
                np.asarray(make_image(width, height)), quality, "RGB", sampling
            )
            expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            assert np.array_equal(pixels_of(data), expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_progressive_jpegs_decode_as_pillow_decodes_them(mode: str) -> None:
    for width, height in JPEG_SIZES:
        image = make_image(width, height).convert(mode)
        data = encoded(image, "JPEG", quality=60, progressive=True)
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(pixels_of(data), expected)


def test_a_jpeg_that_stores_rgb() -> None:
    data = encoded(make_image(50, 40), "JPEG", quality=90, keep_rgb=True)
    assert np.array_equal(pixels_of(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_damaged_jpegs_are_what_pillow_makes_of_them() -> None:
    whole, rng, shown = encoded(make_image(90, 60), "JPEG", quality=80), np.random.default_rng(0), 0
    for seed in range(300):
        damaged = bytearray(whole if seed % 3 else whole[: 200 + 17 * seed])
        for place in rng.integers(0, len(damaged), seed % 4):
            damaged[place] = rng.integers(0, 256)
        data = bytes(damaged)
        try:
            expected = np.asarray(Image.open(io.BytesIO(data), formats=("JPEG",)).convert("RGB"))
        except Exception:
            with pytest.raises(InvalidImage):
                pixels_of(data)
            continue
        assert np.array_equal(pixels_of(data), expected)
        shown += 1
    assert 30 < shown < 300


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_several(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert tuple(pixels_of(data)[8, 8]) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_every_orientation_is_made_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(make_image(), kind, exif=exif.tobytes())
    image = Image.open(io.BytesIO(data))
    stored = np.asarray(image.convert("RGB"))
    turned = {
        1: stored, 2: stored[:, ::-1], 3: stored[::-1, ::-1], 4: stored[::-1],
        5: stored.transpose(1, 0, 2), 6: stored[::-1].transpose(1, 0, 2),
        7: stored[::-1, ::-1].transpose(1, 0, 2), 8: stored[:, ::-1].transpose(1, 0, 2),
    }[orientation]  # fmt: skip
    found = pixels_of(data)
    assert np.array_equal(found, turned)
    assert read_header(data, max_source_pixels=10_000).upright_size == found.shape[:2]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b""])
def test_a_broken_exif_block_counts_as_none(exif: bytes) -> None:
    image = make_image()
    data = encoded(image, "JPEG", exif=exif)
    assert pixels_of(data).shape == (30, 40, 3)


def test_a_grid_that_is_not_the_images_is_refused() -> None:
    data = encoded(make_image(64, 96))
    (unit,) = GEOMETRY.units((96, 64))
    preprocess(data, unit, GEOMETRY)
    turned = Unit((1, unit.grid[2], unit.grid[1]))
    with pytest.raises(InvalidImage, match="grid"):
        preprocess(data, turned, GEOMETRY)


def test_what_a_requests_limits_make_of_an_image_is_made() -> None:
    data, size = encoded(make_image(700, 500)), (500, 700)
    for geometry in (GEOMETRY.narrowed(None, 100_000), GEOMETRY.narrowed(600_000, None)):
        (unit,) = geometry.units(size)
        assert geometry.size_of(unit) != GEOMETRY.size_of(*GEOMETRY.units(size))
        pixels = preprocess(data, unit, GEOMETRY)
        assert pixels.shape == (*geometry.size_of(unit), 3)


def test_the_pixel_cap_holds_before_decoding() -> None:
    data = encoded(Image.new("RGB", (500, 500)))
    with pytest.raises(InvalidImage, match="500x500"):
        preprocess(data, Unit((1, 2, 2)), GEOMETRY, max_source_pixels=10_000)


def hostile() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    whole = {kind: encoded(make_image(200, 200), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}
    cases: dict[str, bytes] = {"empty": b"", "text": b"not an image", "nul": bytes(1000)}
    for kind, data in whole.items():
        for share in (0.1, 0.5, 0.9):
            cases[f"{kind} cut at {share}"] = data[: int(len(data) * share)]
        for seed in range(30):
            damaged = bytearray(data)
            for place in rng.integers(10, len(data), 20):
                damaged[place] ^= 1 << (seed % 8)
            cases[f"{kind} damaged {seed}"] = bytes(damaged)
    cases["bmp"] = encoded(make_image(), "BMP")
    cases["tiff"] = encoded(make_image(), "TIFF")
    cases["ppm"] = encoded(make_image(), "PPM")
    return cases


def test_hostile_bytes_are_invalid_images_or_pixels() -> None:
    """Nothing else escapes, and no text of Pillow's."""
    refused = 0
    for name, data in hostile().items():
        try:
            header = read_header(data, max_source_pixels=1 << 20)
            (unit,) = GEOMETRY.units(header.upright_size)
            pixels = preprocess(data, unit, GEOMETRY)
            assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
            assert pixels.shape == (*GEOMETRY.size_of(unit), 3)
        except InvalidImage as error:
            refused += 1
            assert not re.search(r"0x[0-9a-f]{6,}|PIL|object at", error.message), name
    assert refused > 20


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_files_are_refused(kind: str) -> None:
    data = encoded(make_image(300, 200), kind)
    (unit,) = GEOMETRY.units((200, 300))
    with pytest.raises(InvalidImage):
        preprocess(data[: len(data) // 2], unit, GEOMETRY)


def test_bands_are_converted_as_a_whole_image_is() -> None:
    """Larger than a band, of each mode that is converted."""
    image = make_image(1100, 700)
    for mode in ("RGBA", "LA", "P", "L", "RGB", "1"):
        data = encoded(image.convert(mode))
        whole = np.asarray(to_rgb(Image.open(io.BytesIO(data))))
        assert np.array_equal(pixels_of(data), whole), mode
    values = (np.arange(1100 * 700, dtype=np.uint32) % 65536).astype(np.uint16).reshape(700, 1100)
    assert np.array_equal(pixels_of(encoded(Image.fromarray(values)))[..., 0], values >> 8)
    keyed = encoded(image, transparency=(1, 2, 3))
    assert np.array_equal(pixels_of(keyed), np.asarray(to_rgb(Image.open(io.BytesIO(keyed)))))
