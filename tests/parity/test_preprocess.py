"""Preprocessing equals Hugging Face's default (torchvision) image processor, bit for bit."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from services.common.geometry import Geometry
from services.encoder.decoding.preprocess import resize
from tests.in_process_decoder import preprocess
from tests.tower import pack_patches

LIMITS = {
    "the checkpoint's": Geometry(0, 16, 2, 65536, 16777216),
    "small": Geometry(0, 16, 2, 4096, 40000),
    "patch 14": Geometry(0, 14, 2, 3136, 200000),
}
SIZES = [
    (16, 16), (15, 2000), (300, 500), (480, 640), (33, 64), (1, 100), (1024, 1024),
    (1372, 2044), (2000, 301), (256, 256), (31, 31), (48, 80),
]  # fmt: skip


def processor(limits: Geometry) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
        patch_size=limits.patch_size, merge_size=limits.merge_size, temporal_patch_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise over a gradient: resizing it uses the whole range and clamps."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (height, width, 3))
    values[: height // 2] = np.linspace(0, 255, width)[None, :, None]
    return Image.fromarray(values.astype(np.uint8))


def ours(data: bytes, size: tuple[int, int], limits: Geometry) -> torch.Tensor:
    """pixel_values as the tower gets them, with the time axis spelled out."""
    (unit,) = limits.units(size)
    pixels = preprocess(data, unit, limits)
    patches = pack_patches(
        pixels.reshape(-1), [unit.grid], limits.patch_size, limits.merge_size, torch.float32
    )
    return patches.unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1).flatten(1)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixel_values_are_equal(size: tuple[int, int], limits: Geometry) -> None:
    image = noise(*size)
    theirs = processor(limits)(images=[image], return_tensors="pt")
    assert tuple(theirs["image_grid_thw"][0].tolist()) == limits.units(size)[0].grid
    assert torch.equal(ours(encoded(image), size, limits), theirs["pixel_values"])


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGB"])
def test_opaque_modes_are_equal(mode: str) -> None:
    limits, size = LIMITS["small"], (150, 210)
    image = noise(*size).convert(mode)
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    opened = Image.open(io.BytesIO(data))
    assert opened.mode == mode
    theirs = processor(limits)(images=[opened], return_tensors="pt")["pixel_values"]
    assert torch.equal(ours(data, size, limits), theirs)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_lossy_formats_are_equal(kind: str) -> None:
    limits, size = LIMITS["small"], (333, 222)
    data = encoded(noise(*size), kind)
    opened = Image.open(io.BytesIO(data))
    theirs = processor(limits)(images=[opened], return_tensors="pt")["pixel_values"]
    assert torch.equal(ours(data, size, limits), theirs)


def test_several_images_pack_as_the_processor_packs_them() -> None:
    limits = LIMITS["small"]
    images = [noise(100, 140, 1), noise(64, 64, 2), noise(90, 300, 3)]
    theirs = processor(limits)(images=images, return_tensors="pt")
    units = [limits.units((image.height, image.width))[0] for image in images]
    pixels = [
        preprocess(encoded(image), unit, limits).reshape(-1)
        for image, unit in zip(images, units, strict=True)
    ]
    grids = [unit.grid for unit in units]
    patches = pack_patches(torch.cat(pixels), grids, 16, 2, torch.float32)
    still = theirs["pixel_values"].unflatten(1, (3, 2, -1))[:, :, 0].flatten(1)
    assert theirs["image_grid_thw"].tolist() == [list(grid) for grid in grids]
    assert torch.equal(patches, still)


def test_an_image_of_the_right_size_is_left_alone() -> None:
    pixels = torch.from_numpy(np.array(noise(64, 96)))
    planes = pixels.permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(planes, (64, 96), mode="bicubic", antialias=True)
    assert torch.equal(resize(pixels, 64, 96), resized[0].permute(1, 2, 0))


def test_control_another_filter_is_noticed() -> None:
    limits, size = LIMITS["small"], (300, 500)
    image = noise(*size)
    theirs = processor(limits)(images=[image], return_tensors="pt")["pixel_values"]
    _, height, width = limits.units(size)[0].grid
    bilinear = image.resize((width * 16, height * 16), Image.Resampling.BILINEAR)
    grid = (1, height, width)
    pixels = torch.from_numpy(np.array(bilinear)).reshape(-1)
    patches = pack_patches(pixels, [grid], 16, 2, torch.float32)
    still = theirs.unflatten(1, (3, 2, -1))[:, :, 0].flatten(1)
    assert not torch.equal(patches, still)
