"""Arrival traces: synthetic ones from a seed, and recorded ones from a file.

A recorded trace is a JSON object a line: `{"arrival_s": 0.5, "prompt_tokens": 1058,
"output_tokens": 64, "images": [[1024, 1024]]}`. `prompt_tokens` counts those of the images;
`images` are the sizes in pixels of those that no cache knew. Unknown fields are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.simulation.requests import Request

_BIN_S = 10.0
_FIELDS = {"arrival_s", "prompt_tokens", "output_tokens", "images"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of requests. Lengths are lognormal: (median, sigma, most).

    Attributes:
        text: prompt tokens without those of images.
        output: tokens generated.
        num_images: (least, most), evenly.
        sizes: width and height of an image in pixels; a request's images have one size.
    """

    name: str
    text: tuple[float, float, int]
    output: tuple[float, float, int]
    num_images: tuple[int, int] = (0, 0)
    sizes: tuple[tuple[int, int], ...] = ()


CHAT = Kind("chat", (1500, 0.8, 16_000), (350, 0.8, 3000))
IMAGE = Kind(
    "image", (80, 0.8, 2000), (160, 0.7, 1000), (1, 3), ((512, 512), (1024, 768), (1024, 1024))
)
DOCUMENT = Kind("document", (200, 0.6, 2000), (300, 0.6, 2000), (4, 10), ((960, 1344),))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns."""

    name: str
    duration_s: float
    kinds: tuple[str, ...]
    arrival: Sequence[float]
    prompt: Sequence[int]
    output: Sequence[int]
    images: Sequence[tuple[int, ...]]
    kind: Sequence[int]

    def __len__(self) -> int:
        return len(self.arrival)

    def requests(self) -> Iterator[Request]:
        """Fresh requests, which a simulation changes."""
        rows = zip(self.arrival, self.prompt, self.output, self.images, self.kind, strict=True)
        for arrival, prompt, output, images, kind in rows:
            yield Request(arrival, prompt, output, images, kind)


def patches_of(width: int, height: int) -> int:
    """An image's patches of 16 x 16 pixels, its sides rounded to 32; a token has four."""
    return max(1, round(width / 32)) * max(1, round(height / 32)) * 4


Rates = Mapping[Kind, np.ndarray]  # requests/s of each bin of 10 s


def synthetic(name: str, rates: Rates, seed: int) -> Trace:
    """Poisson arrivals of each kind at its rates."""
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, ...]], int]] = []
    for index, (kind, rate) in enumerate(rates.items()):
        rng = np.random.default_rng([seed, *kind.name.encode()])
        counts = rng.poisson(rate * _BIN_S)
        number = int(counts.sum())
        starts = np.repeat(np.arange(len(rate)) * _BIN_S, counts)
        arrival = np.sort(starts + rng.uniform(0, _BIN_S, number))
        images = _images(kind, number, rng)
        tokens = np.fromiter((sum(i) // 4 + 2 * len(i) for i in images), np.int64, number)
        prompt = _lengths(kind.text, number, rng) + tokens + 8
        columns.append((arrival, prompt, _lengths(kind.output, number, rng), images, index))
    arrival = np.concatenate([column[0] for column in columns])
    order = np.argsort(arrival, kind="stable")
    images = [image for column in columns for image in column[3]]
    index = np.concatenate([np.full(len(column[0]), column[4]) for column in columns])
    return Trace(
        name=name,
        duration_s=len(next(iter(rates.values()))) * _BIN_S,
        kinds=tuple(kind.name for kind in rates),
        arrival=arrival[order].tolist(),
        prompt=np.concatenate([column[1] for column in columns])[order].tolist(),
        output=np.concatenate([column[2] for column in columns])[order].tolist(),
        images=[images[i] for i in order],
        kind=index[order].tolist(),
    )


def day(
    scale: float = 1.0, seed: int = 0, *, hours: float = 24.0, first_hour: float = 0.0
) -> Trace:
    """A day: quiet at four in the morning, busiest at four in the afternoon, documents in office
    hours. Mean rate at scale 1: 11 requests/s.
    """
    clock = first_hour + np.arange(round(hours * 3600 / _BIN_S)) * _BIN_S / 3600
    wave = (1 - np.cos((clock - 4) / 24 * 2 * np.pi)) / 2  # 0 at 4 h, 1 at 16 h
    office = np.exp(-(((clock - 13.5) / 3.5) ** 2))
    return synthetic(
        "day",
        {
            CHAT: scale * (2.0 + 8.0 * wave),
            IMAGE: scale * (1.0 + 5.0 * wave),
            DOCUMENT: scale * (0.2 + 6.0 * office),
        },
        seed,
    )


def bursts(scale: float = 1.0, seed: int = 0, *, hours: float = 3.0) -> Trace:
    """Steady chat; every hour image-heavy traffic grows sixfold for ten minutes."""
    clock = np.arange(round(hours * 3600 / _BIN_S)) * _BIN_S
    burst = ((clock % 3600 >= 1800) & (clock % 3600 < 2400)).astype(float)
    flat = np.ones_like(clock)
    rates: Rates = {
        CHAT: scale * 10.0 * flat,
        IMAGE: scale * (3.0 + 15.0 * burst),
        DOCUMENT: scale * (1.0 + 5.0 * burst),
    }
    return synthetic("bursts", rates, seed)


def flash_crowd(scale: float = 1.0, seed: int = 0, *, hours: float = 2.0) -> Trace:
    """Steady traffic; after half an hour it grows fourfold within two minutes and fades in ten."""
    clock = np.arange(round(hours * 3600 / _BIN_S)) * _BIN_S
    since = clock - 1800
    crowd = 1 + 3 * np.clip(since / 120, 0, 1) * np.exp(-np.clip(since - 120, 0, None) / 600)
    rates: Rates = {
        CHAT: scale * 8.0 * crowd,
        IMAGE: scale * 5.0 * crowd,
        DOCUMENT: scale * 1.5 * crowd,
    }
    return synthetic("flash crowd", rates, seed)


SYNTHETIC = {"day": day, "bursts": bursts, "flash": flash_crowd}


def recorded(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        ValueError: a line is not of the form above; it names the line.
    """
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {number}: {error!r}") from None
    if not rows:
        raise ValueError(f"{path.name} has no request")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return Trace(
        name=path.stem,
        duration_s=rows[-1][0] - start + 60,
        kinds=("recorded",),
        arrival=[row[0] - start for row in rows],
        prompt=[row[1] for row in rows],
        output=[row[2] for row in rows],
        images=[row[3] for row in rows],
        kind=[0] * len(rows),
    )


def _row(fields: object) -> tuple[float, int, int, tuple[int, ...]]:
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    if unknown := set(fields) - _FIELDS:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    sizes = fields.get("images", [])
    if not isinstance(sizes, list):
        raise ValueError("images is a list of [width, height]")
    images = tuple(patches_of(int(width), int(height)) for width, height in sizes)
    arrival, prompt, output = (fields[n] for n in ("arrival_s", "prompt_tokens", "output_tokens"))
    if not isinstance(prompt, int) or not isinstance(output, int) or min(prompt, output) < 1:
        raise ValueError("prompt_tokens and output_tokens are integers of at least 1")
    if not isinstance(arrival, int | float) or not np.isfinite(arrival):
        raise ValueError("arrival_s is a number")
    return float(arrival), prompt, output, images


def _lengths(of: tuple[float, float, int], number: int, rng: np.random.Generator) -> np.ndarray:
    median, sigma, most = of
    return np.clip(rng.lognormal(np.log(median), sigma, number), 2, most).astype(np.int64)


def _images(kind: Kind, number: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    if not kind.sizes:
        return [()] * number
    least, most = kind.num_images
    counts = rng.integers(least, most + 1, number).tolist()
    sizes = rng.integers(0, len(kind.sizes), number).tolist()
    patches = [patches_of(*size) for size in kind.sizes]
    made = {(n, s): (patches[s],) * n for n in range(least, most + 1) for s in range(len(patches))}
    return [made[key] for key in zip(counts, sizes, strict=True)]
