"""Two images share a key only if they must get the same embedding."""

import io
import subprocess
import sys
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from services.common.geometry import Unit
from services.common.images.image_key import (
    KEY_BYTES,
    frames_key,
    image_key,
    key_prefix,
    still_digest,
)

PREFIX = bytes(32)


def prefix(**changes: object) -> bytes:
    fields = {"model": "m", "weights": b"w", "vision_config": b"{}", "dtype": "bfloat16"}
    return key_prefix(**(fields | changes))  # type: ignore[arg-type]


def test_golden_digests() -> None:
    """A change here makes every stored entry unreachable: is that what is meant?"""
    assert prefix().hex() == "18c365abf7484e21425e711607e752945e5d7d040fe291244ab3b69b02c75432"
    assert (
        image_key(PREFIX, b"image", unit=Unit((1, 16, 16)), salt=b"").hex()
        == "904f89107520650ef32431d282567c2e6b5539ad6d4695e16429f80e127bad4e"
    )


def test_each_field_of_the_prefix_counts() -> None:
    prefixes = [
        prefix(), prefix(model="n"), prefix(weights=b"v"), prefix(vision_config=b"{ }"),
        prefix(dtype="float32"), prefix(model="mw", weights=b""), prefix(model="", weights=b"mw"),
    ]  # fmt: skip
    assert len(set(prefixes)) == len(prefixes)
    assert {len(p) for p in prefixes} == {KEY_BYTES}


def test_each_field_of_the_key_counts() -> None:
    keys = [
        image_key(PREFIX, b"image", unit=Unit((1, 16, 16)), salt=b""),
        image_key(b"\1" * 32, b"image", unit=Unit((1, 16, 16)), salt=b""),
        image_key(PREFIX, b"imagf", unit=Unit((1, 16, 16)), salt=b""),
        image_key(PREFIX, b"image", unit=Unit((1, 8, 32)), salt=b""),
        image_key(PREFIX, b"image", unit=Unit((1, 32, 8)), salt=b""),
        image_key(PREFIX, b"image", unit=Unit((1, 1, 616)), salt=b""),
        image_key(PREFIX, b"image", unit=Unit((11, 6, 16)), salt=b""),
        image_key(PREFIX, b"image", unit=Unit((1, 16, 16)), salt=b"tenant"),
        image_key(PREFIX, b"mage", unit=Unit((1, 16, 16)), salt=b"i"),
    ]
    assert len(set(keys)) == len(keys)


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6)), max_size=8, unique=True))
def test_no_two_concatenations_meet(pairs: list[tuple[bytes, bytes]]) -> None:
    keys = {image_key(PREFIX, image, unit=Unit((1, 2, 2)), salt=salt) for image, salt in pairs}
    assert len(keys) == len(pairs)


def encoded(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def test_images_whose_pixel_bytes_are_equal_differ() -> None:
    pixels = np.arange(3000, dtype=np.uint8)
    wide = Image.fromarray(pixels.reshape(30, 100))
    tall = Image.fromarray(pixels.reshape(100, 30))
    assert wide.tobytes() == tall.tobytes()
    palettes = []
    for shift in (0, 1):
        image = Image.new("P", (8, 8), 3)
        image.putpalette([(n + shift) % 256 for n in range(768)])
        palettes.append(image)
    assert palettes[0].tobytes() == palettes[1].tobytes()
    files = [encoded(wide), encoded(tall), *map(encoded, palettes)]
    keys = [image_key(PREFIX, file, unit=Unit((1, 4, 4)), salt=b"") for file in files]
    for one, other in combinations(keys, 2):
        assert one != other


def test_every_process_finds_the_same_key() -> None:
    code = (
        "from services.common.images.image_key import image_key;"
        "from services.common.geometry import Unit;"
        "print(image_key(bytes(32), b'image', unit=Unit((1, 16, 16)), salt=b'').hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {image_key(PREFIX, b"image", unit=Unit((1, 16, 16)), salt=b"").hex()}


def test_each_field_of_a_pairs_key_counts() -> None:
    first, second, still = b"a" * 16, b"b" * 16, still_digest(b"image")
    grid = (1, 4, 6)
    keys = [
        frames_key(PREFIX, first, second, grid=grid, salt=b""),
        frames_key(PREFIX, second, first, grid=grid, salt=b""),
        frames_key(PREFIX, first, first, grid=grid, salt=b""),
        frames_key(PREFIX, first, second, grid=(1, 6, 4), salt=b""),
        frames_key(PREFIX, first, second, grid=grid, salt=b"s"),
        frames_key(b"1" * 32, first, second, grid=grid, salt=b""),
        frames_key(PREFIX, still, still, grid=grid, salt=b""),
        image_key(PREFIX, b"image", unit=Unit(grid), salt=b""),
    ]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {KEY_BYTES}
