"""The encoder's embeddings: memory, then Redis, then the engine; one encode per image at a time.

All callers that want one key share the encode in flight; when the last of them leaves, it is
cancelled. Other pods may encode it, too. The servicer calls `encode` and `reading`; no
gRPC and no pixels are seen here. Errors are `TriptychError`s, and a failed encode leaves nothing.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import EmbeddingUnavailable, InvalidRequest, Overloaded, TriptychError
from services.common.geometry import Geometry, Unit
from services.encoder.engine.messages import NO_TIMES, Source, StageTimes
from services.encoder.front.admission import NOBODY, Admission, Share
from services.encoder.front.engine_client import EngineClient, EngineJob
from services.encoder.front.memory_tier import MemoryTier, Reading, Word, first_of
from services.encoder.metrics import EncoderMetrics

_MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients follow no longer wait
_MAX_SOURCES_BYTES, _SOURCE_S = 256 << 20, 120.0


class Origin(Enum):
    """Where an embedding came from."""

    COMPUTED = "computed"
    MEMORY = "memory"
    REDIS = "redis"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding is available, here or in Redis."""

    origin: Origin
    lookup_s: float = 0.0
    times: StageTimes = NO_TIMES


class SharedTier(Protocol):
    """`RedisTier`, as far as it is used here. Never raises."""

    async def has(self, key: bytes, spec: EmbeddingSpec) -> bool:
        """Whether it has an embedding."""
        ...

    async def read(self, entry: ArenaEntry) -> bool:
        """Whether it has an entry's embedding, whose bytes it writes there."""
        ...

    def put(self, entry: ArenaEntry) -> None:
        """Queues an entry for writing."""
        ...


class Work(NamedTuple):
    """What an embedding is made from, and for whom."""

    source: Source
    unit: Unit
    share: Share = NOBODY


@dataclass(slots=True, eq=False)
class _Encode:
    """An encode in flight.

    Attributes:
        need_bytes: an entry in Redis alone is not enough: a reader waits for the bytes.
        num_queued_patches: in work when it started, its own included.
        entry: done when the engine starts to write the embedding.
    """

    key: bytes
    work: Work
    spec: EmbeddingSpec
    need_bytes: bool
    num_queued_patches: int
    job: EngineJob
    entry: "asyncio.Future[ArenaEntry]"
    flight: "SharedTask[Encoded]" = field(init=False)


class Embeddings:
    """All embeddings that this pod can give.

    Args:
        like: an embedding's dtype, features and hidden size; its token count is ignored.
        redis: shared by all pods; None: there is none.
        admission: of images that have to be encoded.
        max_queued_bytes: files beyond this in work are refused at once.
        min_streamed_bytes: smaller embeddings are handed out in one piece: the messages for their
            features would cost more than they hide.
    """

    def __init__(
        self,
        *,
        like: EmbeddingSpec,
        geometry: Geometry,
        memory: MemoryTier,
        engine: EngineClient,
        redis: SharedTier | None,
        admission: Admission,
        metrics: EncoderMetrics,
        max_queued_bytes: int = 1 << 30,
        min_streamed_bytes: int = 8 << 20,
    ) -> None:
        self._like = like
        self.geometry = geometry
        self._memory = memory
        self._engine = engine
        self._redis = redis
        self._metrics = metrics
        self._max_queued_bytes = max_queued_bytes
        self._min_streamed_bytes = min_streamed_bytes
        self._sources = SourceStore(min(_MAX_SOURCES_BYTES, max_queued_bytes))
        self._encodes: dict[bytes, _Encode] = {}
        self._admission = admission
        self._queued_bytes = 0
        self._s_per_patch = 0.0  # measured on the last image; 0: none yet
        self._awaited: dict[bytes, set[asyncio.Future[None]]] = {}  # readers of keys without encode
        metrics.backlog_seconds.set_function(self._backlog_s)
        metrics.queue_images.set_function(lambda: len(self._encodes))
        metrics.queue_patches.set_function(lambda: admission.num_patches)
        metrics.cache_bytes.set_function(lambda: memory.arena.used_bytes)

    def spec_of(self, unit: Unit) -> EmbeddingSpec:
        return replace(self._like, num_tokens=self.geometry.num_tokens(unit))

    async def encode(self, key: bytes, work: Work) -> Encoded:
        """Makes the embedding available here or in Redis.

        Raises:
            Overloaded: too much is in work already; says how long that will take.
            TriptychError: the image's own error, or the engine's.
        """
        entry = self._memory.arena.get(key)
        self._metrics.memory_lookups.labels("hit" if entry else "miss").inc()
        if entry:
            self._sources.put(key, work)
            return Encoded(Origin.MEMORY)
        if encode := self._running(key):
            del work  # which the encode has, and nothing counts here
            await encode.flight.join()
            return Encoded(Origin.JOINED)
        return await self._start(key, work, need_bytes=False).flight.join()

    @asynccontextmanager
    async def reading(
        self, key: bytes, timeout_s: float | None, word: Word | None = None
    ) -> AsyncGenerator[Reading]:
        """An embedding, held in memory for the block. Waits until its first bytes are about to be
        written: by an encode in flight, or by one that has not been requested yet. `word` is called
        meanwhile.

        Raises:
            InvalidRequest: no encoder can encode the image.
            EmbeddingUnavailable: no encode was requested in time, or it failed.
        """
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    reading = await self._hold(key, word)
            except TimeoutError:
                raise EmbeddingUnavailable("the image was not encoded here in time") from None
            try:
                yield reading
            finally:
                # Nothing is awaited here: gRPC may cancel a cancelled call once more.
                self._memory.arena.release(reading.entry)
                if reading.work is not None:
                    reading.work.cancel()  # leaves the encode to its other waiters
        except (InvalidRequest, EmbeddingUnavailable):
            raise
        except TriptychError as error:  # another encoder may succeed, unless the image is bad
            raise EmbeddingUnavailable(f"the image was not encoded: {error.message}") from None

    async def close(self) -> None:
        tasks = [encode.flight.task for encode in self._encodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Reading.

    async def _hold(self, key: bytes, word: Word | None) -> Reading:
        while True:
            if entry := self._memory.arena.get(key):
                self._memory.arena.acquire(entry)
                return Reading(entry, self._memory, self._memory.written_ranges(entry))
            encode = self._running(key)
            if encode is None and (kept := self._sources.get(key)):
                # Answered from Redis, or evicted since: now the bytes are needed here.
                encode = self._start(key, kept, need_bytes=True)
            if encode is None:
                await self._until_requested(key, word)
            elif reading := await self._hold_when_written(encode, word):
                return reading

    async def _hold_when_written(self, encode: _Encode, word: Word | None) -> Reading | None:
        """None: the encode has ended; its result must be looked up."""
        work = encode.flight.join()
        try:
            await first_of({work, encode.entry}, word)
            if not work.done():
                entry = encode.entry.result()
                # The work may have failed before its future says so.
                if self._memory.try_hold(entry):
                    return Reading(entry, self._memory, self._memory.written_ranges(entry), work)
                await asyncio.wait({work})
            work.result()
        except BaseException:
            work.cancel()
            raise
        return None

    async def _until_requested(self, key: bytes, word: Word | None) -> None:
        """Returns when an encode of the key starts."""
        requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(key, set())
        waiting.add(requested)
        try:
            await first_of({requested}, word, in_work=False)
        finally:
            waiting.discard(requested)
            if not waiting and self._awaited.get(key) is waiting:
                del self._awaited[key]

    # Encoding.

    def _start(self, key: bytes, work: Work, *, need_bytes: bool) -> _Encode:
        source, unit, share = work
        is_full = self._queued_bytes + source.num_bytes > self._max_queued_bytes
        rank = None if is_full else self._admission.enter(share, unit.num_patches)
        if rank is None:
            retry_after_s = min(max(self._backlog_s(), 1.0), _MAX_RETRY_AFTER_S)
            raise Overloaded("too many images are being encoded", retry_after_s=retry_after_s)
        try:
            # The image is decoded during the lookup in Redis, which rarely has the embedding.
            job = self._engine.submit(source, unit, rank, share.tenant)
        except BaseException:
            self._admission.leave(share, unit.num_patches)
            raise
        self._queued_bytes += source.num_bytes
        encode = _Encode(
            key, work, self.spec_of(unit), need_bytes, self._admission.num_patches, job,
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        self._encodes[key] = encode
        encode.flight = SharedTask(self._run(encode))
        encode.flight.task.add_done_callback(lambda task: self._complete(encode, task))
        self.announce(key)
        return encode

    def announce(self, key: bytes) -> None:
        """Wakes those who wait for a key: it is there, or an encode of it has started."""
        for requested in self._awaited.pop(key, ()):
            if not requested.done():
                requested.set_result(None)

    def _backlog_s(self) -> float:
        """How long what is in work will take, as far as the last image tells."""
        return self._admission.num_patches * self._s_per_patch

    def _complete(self, encode: _Encode, task: "asyncio.Task[Encoded]") -> None:
        self._engine.cancel(encode.job)  # unless it has ended
        source, unit, share = encode.work
        self._admission.leave(share, unit.num_patches)
        self._queued_bytes -= source.num_bytes
        if self._encodes.get(encode.key) is encode:
            del self._encodes[encode.key]
        del encode.flight  # whose error's traceback refers to the encode
        if not task.cancelled() and task.exception() is None:
            self._sources.put(encode.key, encode.work)

    def _running(self, key: bytes) -> _Encode | None:
        """Returns the encode of a key that callers may join. None if there is none, or if all of
        its callers have left, so that it is being cancelled.
        """
        encode = self._encodes.get(key)
        return None if encode is None or encode.flight.is_abandoned else encode

    async def _run(self, encode: _Encode) -> Encoded:
        start = time.monotonic()  # the event loop's clock has a resolution of 1 ms
        redis, times = self._redis, NO_TIMES
        if redis is not None and not encode.need_bytes and await redis.has(encode.key, encode.spec):
            return Encoded(Origin.REDIS, time.monotonic() - start)
        lookup_s = time.monotonic() - start
        entry = await self._memory.reserve(encode.key, encode.spec)
        try:
            if not entry.committed:
                self._memory.begin(entry)
                encode.entry.set_result(entry)  # for readers, before it can be evicted
                if redis is not None and encode.need_bytes and await self._read(redis, entry):
                    return Encoded(Origin.REDIS, time.monotonic() - start)
                times = await self._compute(encode.job, entry)
                self._s_per_patch = (time.monotonic() - start) / encode.num_queued_patches
            if redis is not None:
                redis.put(entry)
        finally:
            self._memory.arena.release(entry)
        self._metrics.stages.labels("lookup").observe(lookup_s)
        return Encoded(Origin.COMPUTED, lookup_s, times)

    async def _read(self, redis: SharedTier, entry: ArenaEntry) -> bool:
        """Whether Redis has the embedding, which is complete then."""
        try:
            found = await redis.read(entry)
        except BaseException:
            self._memory.abort(entry)
            raise
        if found:
            self._memory.commit(entry)
        return found

    async def _compute(self, job: EngineJob, entry: ArenaEntry) -> StageTimes:
        """Runs the engine."""
        self._memory.arena.acquire(entry)  # for the engine, even if no caller waits any more
        self._engine.place(job, entry.offset, lambda feature: self._feature(entry, feature))
        job.done.add_done_callback(lambda done: self._written(entry, job.rank, done))
        times = await asyncio.shield(job.done)
        self._metrics.stages.labels("queue").observe(times.queue_s)
        self._metrics.stages.labels("preprocess").observe(times.preprocess_s)
        self._metrics.stages.labels("forward").observe(times.forward_s)
        return times

    def _feature(self, entry: ArenaEntry, feature: int) -> None:
        """The engine has written one feature; the others follow."""
        if entry.spec.size_bytes >= self._min_streamed_bytes:
            size = entry.spec.size_bytes // entry.spec.num_features
            self._memory.add_range(entry, feature * size, (feature + 1) * size)

    def _written(self, entry: ArenaEntry, rank: float, done: "asyncio.Future[StageTimes]") -> None:
        """The engine no longer uses the entry's memory."""
        self._admission.ran(rank)
        if done.exception() is None:
            self._metrics.images_encoded.inc()
            self._memory.commit(entry)
        else:
            self._memory.abort(entry)
        self._memory.arena.release(entry)


class SourceStore:
    """The files of images answered lately, in case their embedding is needed again.

    Holds at most `max_bytes`, each file for two minutes; the oldest are dropped first. Of videos
    only their names are here.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By time of `put`: each and when it expires, as time.monotonic().
        self._sources: OrderedDict[bytes, tuple[Work, float]] = OrderedDict()
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, key: bytes) -> Work | None:
        self._expire()
        return self._sources[key][0] if key in self._sources else None

    def put(self, key: bytes, work: Work) -> None:
        """Keeps a file, unless it is larger than the whole store."""
        self._drop(key)
        if work.source.num_bytes > self._max_bytes:
            return
        self._sources[key] = work, time.monotonic() + _SOURCE_S
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
        if (kept := self._sources.pop(key, None)) is not None:
            self._used_bytes -= kept[0].source.num_bytes
