"""The inputs of embeddings that were made lately, in case an embedding is needed again."""

import time
from collections import OrderedDict
from typing import NamedTuple

from services.common.geometry import Unit
from services.encoder.engine.messages import Source
from services.encoder.front.admission import NOBODY, Share

_SOURCE_TTL_S = 120.0


class Work(NamedTuple):
    """The inputs of an embedding, its tenant, and the tower that computes it."""

    source: Source
    unit: Unit
    share: Share = NOBODY
    tower: int = 0


class SourceStore:
    """The inputs of recent embeddings, in case an embedding is evicted and needed again.

    Each input is stored for two minutes, and the oldest are dropped first. A video counts as its
    name alone, because `VideoStore` has the file.

    Args:
        max_bytes: the most bytes of all files.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Each input and the time.monotonic() at which it expires, in the order of `put`.
        self._sources: OrderedDict[bytes, tuple[Work, float]] = OrderedDict()
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, key: bytes) -> Work | None:
        """Returns the inputs of an embedding, or None."""
        self._expire()
        return self._sources[key][0] if key in self._sources else None

    def put(self, key: bytes, work: Work) -> None:
        """Stores the inputs of an embedding, unless they are larger than the whole store.

        The share of a foreground request is not replaced by that of background work, because the
        request may still need the embedding.
        """
        if key in self._sources and work.share.background:
            before = self._sources[key][0].share
            work = work if before.background else work._replace(share=before)
        self._drop(key)
        if work.source.num_bytes > self._max_bytes:
            return
        self._sources[key] = work, time.monotonic() + _SOURCE_TTL_S
        self._used_bytes += work.source.num_bytes
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._sources:
            key, (_, expires_at) = next(iter(self._sources.items()))
            if self._used_bytes <= self._max_bytes and expires_at > now:
                break
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        if (dropped := self._sources.pop(key, None)) is not None:
            self._used_bytes -= dropped[0].source.num_bytes
