"""From a size to a grid, as Hugging Face's smart_resize."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import InvalidImage
from services.common.image_geometry import ImageLimits, image_grid, smart_resize

LIMITS = ImageLimits(16, 2, 65536, 16777216)


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
