"""The encoder's embeddings: looked up in memory, then in Redis, then computed by the engine.

All callers that want one key share one encode. When the last of them leaves, the encode is
cancelled. Another pod may encode the same image at the same time. A failed encode leaves nothing
behind, and every error is a `TriptychError`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import EmbeddingUnavailable, InvalidRequest, Overloaded, TriptychError
from services.common.geometry import Geometry, Unit
from services.encoder.engine.messages import NO_TIMES, Source, StageTimes
from services.encoder.front.admission import NOBODY, Admission, Share
from services.encoder.front.engine_client import EngineClient, EngineJob
from services.encoder.front.memory_tier import MemoryTier, Progress, Reading
from services.encoder.front.redis_tier import RedisTier
from services.encoder.metrics import EncoderMetrics

_MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients ignore a longer wait
_SOURCE_TTL_S = 120.0


class Origin(Enum):
    """The origin of an embedding: computed now, found in a tier, or shared with another call."""

    COMPUTED = "computed"
    MEMORY = "memory"
    REDIS = "redis"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of an encode: the embedding is available, here or in Redis.

    Attributes:
        origin: the origin of the embedding.
        lookup_s: seconds of the lookup in Redis.
        times: times of the stages in the engine.
    """

    origin: Origin
    lookup_s: float = 0.0
    times: StageTimes = NO_TIMES


class Work(NamedTuple):
    """The inputs of an embedding, and the tenant that wants it."""

    source: Source
    unit: Unit
    share: Share = NOBODY


@dataclass(slots=True, eq=False)
class _Encode:
    """An encode in flight.

    Attributes:
        key: key of the embedding.
        work: inputs of the embedding.
        spec: shape and dtype of the embedding.
        need_bytes: whether a reader waits for the bytes, so that an entry in Redis alone is not
            enough.
        num_queued_patches: number of patches of all images in work when the encode started, this
            image included.
        job: the engine's job.
        entry: future of the entry, done when the engine starts to write the embedding.
        flight: the task of the encode and its waiters.
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
    """The embeddings that this pod has or can compute.

    Args:
        like: dtype, number of features and hidden size of an embedding; its number of tokens is
            ignored.
        geometry: the model's division of images into patches and tokens.
        memory: the tier in shared memory.
        engine: the client of the engine process.
        redis: the tier that all pods share. None if there is no Redis.
        admission: bounds and orders the images that have to be encoded.
        metrics: the encoder's metrics.
        max_queued_bytes: the most bytes of files in work; more are refused at once.
        max_sources_bytes: the most bytes of files that are stored in case they are needed again.

    Attributes:
        geometry: as above.
    """

    def __init__(
        self,
        *,
        like: EmbeddingSpec,
        geometry: Geometry,
        memory: MemoryTier,
        engine: EngineClient,
        redis: RedisTier | None,
        admission: Admission,
        metrics: EncoderMetrics,
        max_queued_bytes: int = 1 << 30,
        max_sources_bytes: int = 256 << 20,
    ) -> None:
        self._like = like
        self.geometry = geometry
        self._memory = memory
        self._engine = engine
        self._redis = redis
        self._metrics = metrics
        self._max_queued_bytes = max_queued_bytes
        self._sources = SourceStore(min(max_sources_bytes, max_queued_bytes))
        self._encodes: dict[bytes, _Encode] = {}
        self._admission = admission
        self._queued_bytes = 0
        self._s_per_patch = 0.0  # measured on the last image; 0 before the first
        # Readers of keys for which no encode has been requested yet.
        self._awaited: dict[bytes, set[asyncio.Future[None]]] = {}
        metrics.backlog_seconds.set_function(self._backlog_s)
        metrics.queue_images.set_function(lambda: len(self._encodes))
        metrics.queue_patches.set_function(lambda: admission.num_patches)
        metrics.cache_bytes.set_function(lambda: memory.arena.used_bytes)

    @property
    def num_awaited(self) -> int:
        """Number of keys that readers wait for and that no encode has been requested for."""
        return len(self._awaited)

    @property
    def num_patches(self) -> int:
        """Number of patches of all images in work, before merging."""
        return self._admission.num_patches

    def num_waiters(self, key: bytes) -> int:
        """Returns how many callers wait for the encode of a key."""
        encode = self._encodes.get(key)
        return encode.flight.num_waiters if encode else 0

    @property
    def keys_in_flight(self) -> list[bytes]:
        """Keys of the encodes in flight."""
        return list(self._encodes)

    def spec_of(self, unit: Unit) -> EmbeddingSpec:
        """Returns shape and dtype of a unit's embedding."""
        return replace(self._like, num_tokens=self.geometry.num_tokens(unit))

    async def encode(self, key: bytes, work: Work) -> Encoded:
        """Makes the embedding available here or in Redis.

        Args:
            key: key of the embedding.
            work: inputs of the embedding.

        Raises:
            Overloaded: too much is in work already. The error says when to try again.
            TriptychError: the image cannot be encoded, or the engine has failed.
        """
        entry = self._memory.arena.get(key)
        self._metrics.memory_lookups.labels("hit" if entry else "miss").inc()
        if entry:
            self._sources.put(key, work)  # for a later encode, if the entry is evicted
            return Encoded(Origin.MEMORY)
        if encode := self._running(key):
            del work  # the encode has its own copy, and a second one would not be counted
            await encode.flight.join()
            return Encoded(Origin.JOINED)
        return await self._start(key, work, need_bytes=False).flight.join()

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
            progress: gets a report now and then during the wait.

        Raises:
            InvalidRequest: no encoder can encode the image.
            EmbeddingUnavailable: no encode was requested in time, or the encode failed.
        """
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    reading = await self._acquire(key, progress)
            except TimeoutError:
                raise EmbeddingUnavailable("the image was not encoded here in time") from None
            try:
                yield reading
            finally:
                # Nothing is awaited here, because gRPC may cancel a cancelled call once more.
                self._memory.arena.release(reading.entry)
                if reading.work is not None:
                    reading.work.cancel()  # the encode goes on for its other waiters
        except (InvalidRequest, EmbeddingUnavailable):
            raise
        except TriptychError as error:  # another encoder may succeed
            raise EmbeddingUnavailable(f"the image was not encoded: {error.message}") from None

    async def close(self) -> None:
        """Cancels all encodes."""
        tasks = [encode.flight.task for encode in self._encodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Reading.

    async def _acquire(self, key: bytes, progress: Progress | None) -> Reading:
        """Acquires the embedding of a key, once an encode of it writes or has written it."""
        while True:
            if entry := self._memory.arena.get(key):
                self._memory.arena.acquire(entry)
                return Reading(entry, self._memory, self._memory.written_ranges(entry))
            encode = self._running(key)
            if encode is None and (work := self._sources.get(key)):
                # The embedding is in Redis alone, or was evicted, and its bytes are needed here.
                encode = self._start(key, work, need_bytes=True)
            if encode is None:
                await self._wait_for_request(key, progress)
            elif reading := await self._acquire_from(encode, progress):
                return reading

    async def _acquire_from(self, encode: _Encode, progress: Progress | None) -> Reading | None:
        """Acquires the entry that an encode writes.

        Returns None if the encode has ended before its entry could be acquired. The caller then
        looks the key up again. Raises the error of an encode that failed.
        """
        work = encode.flight.join()
        try:
            await self._memory.wait_first({work, encode.entry}, progress, in_work=True)
            if not work.done():
                entry = encode.entry.result()
                # The encode may have failed although the future of its task is not done yet.
                if self._memory.try_acquire(entry):
                    return Reading(entry, self._memory, self._memory.written_ranges(entry), work)
                await asyncio.wait({work})
            work.result()
        except BaseException:
            work.cancel()
            raise
        return None

    async def _wait_for_request(self, key: bytes, progress: Progress | None) -> None:
        """Waits until an encode of the key starts."""
        requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(key, set())
        waiting.add(requested)
        try:
            await self._memory.wait_first({requested}, progress, in_work=False)
        finally:
            waiting.discard(requested)
            if not waiting and self._awaited.get(key) is waiting:
                del self._awaited[key]

    # Encoding.

    def _start(self, key: bytes, work: Work, *, need_bytes: bool) -> _Encode:
        """Starts the encode of a key. Raises Overloaded if too much is in work."""
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
            key,
            work,
            self.spec_of(unit),
            need_bytes,
            self._admission.num_patches,
            job,
            asyncio.get_running_loop().create_future(),
        )
        self._encodes[key] = encode
        encode.flight = SharedTask(self._run(encode))
        encode.flight.task.add_done_callback(lambda task: self._complete(encode, task))
        self.announce(key)
        return encode

    def announce(self, key: bytes) -> None:
        """Wakes readers of a key whose embedding is in memory or whose encode has started."""
        for requested in self._awaited.pop(key, ()):
            if not requested.done():
                requested.set_result(None)

    def _backlog_s(self) -> float:
        """Returns the seconds that the images in work will take, at the speed of the last image."""
        return self._admission.num_patches * self._s_per_patch

    def _complete(self, encode: _Encode, task: "asyncio.Task[Encoded]") -> None:
        """Ends the accounting of an encode, and stores its inputs if it has succeeded."""
        self._engine.cancel(encode.job)  # has no effect on a job that has ended
        source, unit, share = encode.work
        self._admission.leave(share, unit.num_patches)
        self._queued_bytes -= source.num_bytes
        if self._encodes.get(encode.key) is encode:  # else a newer encode has replaced it
            del self._encodes[encode.key]
        del encode.flight  # its error's traceback refers to the encode, which would be a cycle
        if not task.cancelled() and task.exception() is None:
            self._sources.put(encode.key, encode.work)

    def _running(self, key: bytes) -> _Encode | None:
        """Returns the encode of a key that callers may join.

        Returns None if no encode is in flight, or if all of its callers have left, so that it is
        being cancelled.
        """
        encode = self._encodes.get(key)
        return None if encode is None or encode.flight.is_abandoned else encode

    async def _run(self, encode: _Encode) -> Encoded:
        """Finds the embedding in Redis, or has the engine compute it."""
        start = time.monotonic()  # the event loop's clock has a resolution of 1 ms
        redis, times = self._redis, NO_TIMES
        if redis is not None and not encode.need_bytes and await redis.has(encode.key, encode.spec):
            return Encoded(Origin.REDIS, time.monotonic() - start)
        lookup_s = time.monotonic() - start
        entry = await self._memory.reserve(encode.key, encode.spec)
        try:
            if not entry.committed:  # else the entry has been written meanwhile
                self._memory.begin(entry)
                encode.entry.set_result(entry)  # readers acquire it while this call holds it
                if redis is not None and encode.need_bytes and await self._read(redis, entry):
                    return Encoded(Origin.REDIS, time.monotonic() - start)
                times = await self._compute(encode.job, entry)
                # The image has also waited for the images before it: the time is that of all.
                self._s_per_patch = (time.monotonic() - start) / encode.num_queued_patches
            if redis is not None:
                redis.put(entry)
        finally:
            self._memory.arena.release(entry)
        self._metrics.stages.labels("lookup").observe(lookup_s)
        return Encoded(Origin.COMPUTED, lookup_s, times)

    async def _read(self, redis: RedisTier, entry: ArenaEntry) -> bool:
        """Reads the embedding from Redis into memory. Returns whether Redis has it."""
        try:
            found = await redis.read(entry)
        except BaseException:
            self._memory.abort(entry)
            raise
        if found:
            self._memory.commit(entry)
        return found

    async def _compute(self, job: EngineJob, entry: ArenaEntry) -> StageTimes:
        """Has the engine compute the embedding, and returns the times of its stages."""
        self._memory.arena.acquire(entry)  # for the engine, even if no caller waits any more
        self._engine.place(job, entry)
        job.done.add_done_callback(lambda done: self._written(entry, job.rank, done))
        times = await asyncio.shield(job.done)
        self._metrics.stages.labels("queue").observe(times.queue_s)
        self._metrics.stages.labels("preprocess").observe(times.preprocess_s)
        self._metrics.stages.labels("forward").observe(times.forward_s)
        return times

    def _written(self, entry: ArenaEntry, rank: float, done: "asyncio.Future[StageTimes]") -> None:
        """Commits or aborts an entry that the engine no longer uses, and releases it."""
        self._admission.ran(rank)  # the engine is done with the image of this rank
        if done.exception() is None:
            self._metrics.images_encoded.inc()
            self._memory.commit(entry)
        else:
            self._memory.abort(entry)
        self._memory.arena.release(entry)


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
        """Stores the inputs of an embedding, unless they are larger than the whole store."""
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
