"""The figures of the guides are those that the code computes and that the log has."""

import re
from pathlib import Path

from scripts.reference import BY_USE, SETTINGS
from services.common.frame_pairs import NO_LIMITS, FramePairs, PixelLimits, Sampling
from services.common.geometry import Geometry

ROOT = Path(__file__).resolve().parents[3]
LOG = (ROOT / "benchmarks/LOG.md").read_text(encoding="utf-8")
# The limits of the published Qwen3-VL checkpoints, as tests/parity has them.
IMAGES = Geometry(0, patch_size=16, merge_size=2, min_pixels=65_536, max_pixels=16_777_216)
VIDEOS = FramePairs(
    video_token_id=0, start_token_id=0, end_token_id=0, patch_size=16, merge_size=2,
    min_pixels=4096, max_pixels=25_165_824,
)  # fmt: skip
LOW, MEGAPIXEL, RATE = 512 * 512, 1 << 20, 30.0


def rows(page: str, name: str) -> list[list[str]]:
    """Returns the cells of the rows of the table between the comments `name` and `/name`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name.split()[0]} ")[0]
    lines = table.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def sides(text: str) -> tuple[int, int]:
    """Returns height and width of a text with width and height."""
    width, height = re.findall(r"\d+", text)[:2]
    return int(height), int(width)


def test_tokens_of_images_are_those_of_the_code() -> None:
    found = rows("images.md", "image tokens")
    assert len(found) > 7
    for name, *shown in found:
        for cell, limit in zip(shown, (None, LOW, MEGAPIXEL), strict=True):
            geometry = IMAGES.narrowed(None, limit)
            (unit,) = geometry.units(sides(name))
            assert cell == f"{geometry.num_tokens(unit):,}", name


def test_tokens_of_clips_are_those_of_the_code() -> None:
    found = rows("images.md", "clip tokens")
    assert len(found) > 5
    for name, frames, size, *shown in found:
        length = int(re.findall(r"\d+", name)[2]) * (60 if "minutes" in name else 1)
        ways = (
            (Sampling(), NO_LIMITS),
            (Sampling(), PixelLimits(cap_per_frame=True)),
            (Sampling(fps=1.0), NO_LIMITS),
        )
        for cell, (sampling, limits) in zip(shown, ways, strict=True):
            indices = VIDEOS.indices(int(length * RATE), RATE, sampling)
            units = VIDEOS.units(indices, sides(name), limits)
            assert cell == f"{sum(map(VIDEOS.num_tokens, units)):,}", name
        indices = VIDEOS.indices(int(length * RATE), RATE, Sampling())
        assert int(frames) == len(indices)
        assert sides(size) == VIDEOS.resized(len(indices), sides(name))


# Requests of the table of prices -> row of the log.
ROWS = {
    "new 512² image": "img512_c64, req/s", "512² images": "img512_reuse80_c64, req/s",
    "new 1024² image": "img1024_c32, req/s", "text": "text_c256, tok/s",
    "new clip of 10 s": "10 s, 8 at a time", "new clip of 60 s": "60 s, 8 at a time",
}  # fmt: skip
TOKENS_OF_TEXT = 128


def measured(row: str, model: str) -> float:
    """Returns the rate in a row of the log: its last number in the model's column."""
    if model == "32B":
        found = re.search(rf"{row.partition(',')[0]} ([\d.]+) req/s", LOG)
        assert found
        return float(found[1])
    lines = LOG.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| {row} |"))
    first = next(i for i in range(place, 0, -1) if not lines[i - 1].startswith("|"))
    heads, cells = ([c.strip() for c in lines[i].split("|")] for i in (first, place))
    return float(re.findall(r"[\d.,]+", cells[heads.index(model)])[-1].replace(",", ""))


def test_prices_follow_from_measured_rates() -> None:
    found = rows("sizing.md", "prices 3")
    assert len(found) > 10
    for name, model, shown, price in found:
        row = next(row for start, row in ROWS.items() if name.startswith(start))
        rate = measured(row, model) / (TOKENS_OF_TEXT if name.startswith("text") else 1)
        assert float(shown) == float(f"{rate:.3g}") or float(shown) == rate, (name, model)
        assert float(price) == float(f"{3 / 3600 / rate * 1e6:.3g}"), (name, model)


def test_settings_ordered_by_use_exist() -> None:
    names = {name for cls in SETTINGS.values() for name in cls.model_fields}
    assert set(BY_USE) <= names and len(set(BY_USE)) == len(BY_USE)
