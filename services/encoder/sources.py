"""Encoded files of images answered lately, for the case that their embedding is asked for again."""

import time
from collections import OrderedDict
from dataclasses import dataclass

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """What an image is encoded from."""

    image: bytes
    grid: Grid
    until: float  # time.monotonic()


class SourceStore:
    """At most `max_bytes` of files, each for `ttl_s`; the oldest go first."""

    def __init__(self, max_bytes: int = 256 << 20, ttl_s: float = 120.0) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._sources: OrderedDict[bytes, Source] = OrderedDict()  # by time of `put`
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, key: bytes) -> Source | None:
        """The file of that key, if it is still there."""
        self._expire()
        return self._sources.get(key)

    def put(self, key: bytes, image: bytes, grid: Grid) -> None:
        """Keeps a file. One that is larger than the whole store is not kept."""
        self._drop(key)
        if len(image) > self._max_bytes:
            return
        self._sources[key] = Source(image, grid, time.monotonic() + self._ttl_s)
        self._used_bytes += len(image)
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._sources:
            key, oldest = next(iter(self._sources.items()))
            if self._used_bytes <= self._max_bytes and oldest.until > now:
                break
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        source = self._sources.pop(key, None)
        if source is not None:
            self._used_bytes -= len(source.image)
