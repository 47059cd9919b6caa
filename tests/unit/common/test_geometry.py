"""From a size to a grid, as Hugging Face's smart_resize."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import InvalidImage, InvalidRequest
from services.common.geometry import Geometry, Unit

GEOMETRY = Geometry(0, 16, 2, 65536, 16777216)


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
    assert GEOMETRY.resized(size) == resized


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
        geometry = Geometry(0, patch, 2, least, rng.choice((200_000, 1_003_520, 16_777_216)))
        try:
            expected = reference(
                height, width, factor=patch * 2, min_pixels=least, max_pixels=geometry.max_pixels
            )
        except ValueError:
            with pytest.raises(InvalidImage):
                geometry.resized((height, width))
        else:
            assert geometry.resized((height, width)) == expected, (height, width, geometry)


def test_the_grid_counts_patches() -> None:
    assert GEOMETRY.units((1372, 2044)) == (Unit((1, 86, 128)),)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001)])
def test_extreme_shapes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage):
        GEOMETRY.resized(size)


def test_a_unit_at_a_requests_limits_is_its_images_and_no_others() -> None:
    rng = random.Random(0)
    num_refused = 0
    for _ in range(5000):
        size = rng.randint(8, 4000), rng.randint(8, 4000)
        if max(size) > 200 * min(size):
            continue
        low, high = sorted(rng.randint(1, 5_000_000) for _ in range(2))
        (unit,) = GEOMETRY.narrowed(low, high).units(size)
        GEOMETRY.check(unit)
        assert GEOMETRY.is_of(unit, size)
        height, width = GEOMETRY.size_of(unit)
        if height != width:
            num_refused += not GEOMETRY.is_of(Unit((1, width // 16, height // 16)), size)
        assert not GEOMETRY.is_of(unit, (size[0], 4 * size[1])) or min(height, width) < 64
    assert num_refused > 4000


def test_limits_of_a_request_stay_within_the_models() -> None:
    narrowed = GEOMETRY.narrowed(1, 1 << 30)
    assert narrowed == GEOMETRY.narrowed(None, None) == GEOMETRY
    narrowed = GEOMETRY.narrowed(1 << 30, None)
    assert (narrowed.min_pixels, narrowed.max_pixels) == (1 << 24, 1 << 24)
    narrowed = GEOMETRY.narrowed(None, 1)
    assert (narrowed.min_pixels, narrowed.max_pixels) == (1 << 16, 1 << 16)


@pytest.mark.parametrize("grid", [(2, 4, 4), (1, 0, 4), (1, 4, 0), (1, 3, 4), (1, 4, 5)])
def test_what_is_no_unit_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="no image has a grid of"):
        GEOMETRY.check(Unit(grid))
