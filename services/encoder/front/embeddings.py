"""The encoder's embeddings, as its calls use them: gateways have them made, decoders read them.

`EmbeddingStore` looks each embedding up in the arena, in Redis and in the vision tower. Another pod
may encode the same image at the same time. Every error is a `TriptychError`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.redis_tier import RedisTier
from services.common.embeddings.store import MEMORY, EmbeddingStore, Lookup
from services.common.errors import EmbeddingUnavailable, InvalidRequest, TriptychError
from services.common.geometry import Geometry, Unit
from services.encoder.front.reading import Progress, Reading, Waiter
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.front.tower_tier import TowerTier


class Origin(Enum):
    """The origin of an embedding: computed now, found in a tier, or shared with another call."""

    COMPUTED = "computed"
    MEMORY = "memory"
    REDIS = "redis"
    JOINED = "joined"


_ORIGINS = {RedisTier.name: Origin.REDIS, TowerTier.name: Origin.COMPUTED}


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of an encode: the embedding is available, here or in Redis.

    Attributes:
        origin: the origin of the embedding.
        seconds: time of each stage, by name. Empty unless this call started the lookup.
    """

    origin: Origin
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


class Embeddings:
    """The embeddings that this pod has or can compute.

    Args:
        like: dtype, number of features and hidden size of an embedding; its number of tokens is
            ignored.
        geometry: the model's division of images into patches and tokens.
        store: the embeddings in the arena, and the tiers.
        sources: inputs of recent embeddings, in case an embedding is evicted and needed again.
        report_s: seconds between two progress reports to a reader that waits.

    Attributes:
        geometry: the model's division of images into patches and tokens.
        store: the embeddings in the arena, and the tiers.
    """

    def __init__(
        self,
        *,
        like: EmbeddingSpec,
        geometry: Geometry,
        store: EmbeddingStore[Work],
        sources: SourceStore,
        report_s: float = 2.0,
    ) -> None:
        self._like = like
        self.geometry = geometry
        self.store = store
        self._sources = sources
        self._report_s = report_s
        # Readers of keys for which no encode has been requested yet.
        self._awaited: dict[bytes, set[asyncio.Future[None]]] = {}

    def spec_of(self, unit: Unit) -> EmbeddingSpec:
        """Returns shape and dtype of a unit's embedding."""
        return replace(self._like, num_tokens=self.geometry.num_tokens(unit))

    async def encode(self, key: bytes, work: Work) -> Encoded:
        """Makes the embedding available here or in Redis.

        If a lookup of the key is running, the call waits for it. The image then waits at the place
        of a foreground image if at least one of its callers is in the foreground.

        Args:
            key: key of the embedding.
            work: inputs of the embedding.

        Raises:
            Overloaded: too much is in work already. The error says when to try again.
            TriptychError: the image cannot be encoded, or the engine has failed.
        """
        if self.store.arena.get(key):
            self.store.hits.labels(MEMORY).inc()
            self._sources.put(key, work)  # for a later encode, if the entry is evicted
            return Encoded(Origin.MEMORY)
        self.store.misses.labels(MEMORY).inc()
        if lookup := self.store.running(key):
            joined = self.store.join(lookup, work)
            del work  # the encode has its own copy, and a second one would not be counted
            await joined
            self.store.hits.labels("joined").inc()
            return Encoded(Origin.JOINED)
        lookup = self._start(key, work, needs_bytes=False)
        tier = await lookup.task.join()
        return Encoded(_ORIGINS[tier], lookup.seconds)

    @asynccontextmanager
    async def reading(
        self, key: bytes, timeout_s: float | None, progress: Progress | None = None
    ) -> AsyncGenerator[Reading]:
        """Acquires an embedding for the block, and releases it afterwards.

        The call waits until an encode begins to write the first bytes. If no encode of the key is
        in flight, the call first waits until somebody requests one.

        Args:
            key: key of the embedding.
            timeout_s: the longest wait in seconds. None if there is no limit.
            progress: gets a report now and then during the wait, and while the embedding is read.

        Raises:
            InvalidRequest: no encoder can encode the image.
            EmbeddingUnavailable: no encode was requested in time, or the encode failed.
        """
        waiter = Waiter(progress, self._report_s)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    reading = await self._acquire(key, waiter)
            except TimeoutError:
                raise EmbeddingUnavailable("the image was not encoded here in time") from None
            try:
                yield reading
            finally:
                # Nothing is awaited here, because gRPC may cancel a cancelled call once more.
                self.store.arena.release(reading.entry)
                if reading.lookup is not None:
                    reading.lookup.cancel()  # the encode goes on for its other waiters
        except (InvalidRequest, EmbeddingUnavailable):
            raise
        except TriptychError as error:  # another encoder may succeed
            raise EmbeddingUnavailable(f"the image was not encoded: {error.message}") from None

    def announce(self, key: bytes) -> None:
        """Wakes readers of a key whose embedding is in memory or whose encode has started."""
        for requested in self._awaited.pop(key, ()):
            if not requested.done():
                requested.set_result(None)

    def _start(self, key: bytes, work: Work, *, needs_bytes: bool) -> Lookup[Work]:
        """Starts the lookup of a key. Raises Overloaded if too much is in work."""
        lookup = self.store.start(key, self.spec_of(work.unit), work, needs_bytes=needs_bytes)
        self.announce(key)
        return lookup

    async def _acquire(self, key: bytes, waiter: Waiter) -> Reading:
        """Acquires the embedding of a key, once an encode of it writes or has written it."""
        while True:
            if entry := self.store.arena.get(key):
                self.store.arena.acquire(entry)
                return Reading(entry, waiter)
            lookup = self.store.running(key)
            if lookup is None and (work := self._sources.get(key)):
                # The embedding is in Redis alone, or was evicted, and its bytes are needed here.
                lookup = self._start(key, work, needs_bytes=True)
            if lookup is None:
                await self._wait_for_request(key, waiter)
            elif reading := await self._acquire_from(lookup, waiter):
                return reading

    async def _acquire_from(self, lookup: Lookup[Work], waiter: Waiter) -> Reading | None:
        """Acquires the entry that a lookup writes.

        Returns None if the lookup has ended before its entry could be acquired. The caller then
        looks the key up again. Raises the error of a lookup that failed.
        """
        joined = lookup.task.join()
        try:
            await waiter.wait_first({joined, lookup.placed}, in_work=True)
            if not joined.done():
                write = lookup.placed.result()
                # The encode may have failed although the future of its task is not done yet.
                if write.try_acquire():
                    return Reading(write.entry, waiter, write, joined)
                await asyncio.wait({joined})
            joined.result()
        except BaseException:
            joined.cancel()
            raise
        return None

    async def _wait_for_request(self, key: bytes, waiter: Waiter) -> None:
        """Waits until an encode of the key starts."""
        requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(key, set())
        waiting.add(requested)
        try:
            await waiter.wait_first({requested}, in_work=False)
        finally:
            waiting.discard(requested)
            if not waiting and self._awaited.get(key) is waiting:
                del self._awaited[key]
