"""How an embedding is come by: memory, then Redis, then the engine; once for all who ask.

A flight is the work on one key. Whoever asks for the key while it is under way joins it; when the
last of them goes away, the flight is cancelled. Across pods, a claim in Redis does the same.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from services.common.arena import ArenaEntry
from services.common.embedding import EmbeddingSpec
from services.common.errors import EmbeddingUnavailable, Overloaded
from services.common.shared_memory import MemoryAddress
from services.encoder.encoded import Encoded, Origin
from services.encoder.engine_client import EngineClient, EngineJob, StageTimes
from services.encoder.memory_tier import MemoryTier
from services.encoder.metrics import EncoderMetrics
from services.encoder.reading import Reading, unavailable
from services.encoder.redis_writer import RedisWriter
from services.encoder.shared_tier import SharedTier, Wish
from services.encoder.sources import Grid, SourceStore

_MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients follow no longer wait


@dataclass(slots=True, eq=False)
class _Flight:
    """The work on one key, and how many wait for it.

    Attributes:
        wish: what it is for.
        patches_ahead: in work when it started, its own included.
        begun: the entry, once the engine writes it.
    """

    wish: Wish
    image: bytes
    grid: Grid
    patches_ahead: int = 0
    waiters: int = 0
    task: asyncio.Task[Encoded] | None = None
    begun: asyncio.Future[ArenaEntry] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def num_patches(self) -> int:
        """Patches before merging."""
        return self.grid[0] * self.grid[1] * self.grid[2]


class Embeddings:
    """All embeddings this pod can give.

    Args:
        like: an embedding's dtype, levels and hidden size; its token count is ignored.
        merge_size: patches per image-token side.
        memory: this pod's own.
        engine: makes them.
        shared: of all pods; None: there is none.
        writer: puts new ones there; None as `shared`.
        metrics: counts.
        max_queued_patches: images beyond this in work are refused at once.
        least_levelwise_bytes: embeddings that are smaller are handed out in one piece: the messages
            for their levels would cost more than they hide.
    """

    def __init__(
        self,
        *,
        like: EmbeddingSpec,
        merge_size: int,
        memory: MemoryTier,
        engine: EngineClient,
        shared: SharedTier | None,
        writer: RedisWriter | None,
        metrics: EncoderMetrics,
        max_queued_patches: int,
        least_levelwise_bytes: int = 8 << 20,
    ) -> None:
        self._like = like
        self._merge_size = merge_size
        self._memory = memory
        self._engine = engine
        self._shared = shared
        self._writer = writer
        self._metrics = metrics
        self._max_queued_patches = max_queued_patches
        self._least_levelwise_bytes = least_levelwise_bytes
        self._sources = SourceStore()
        self._flights: dict[bytes, _Flight] = {}
        self._queued_patches = 0
        self._s_per_patch = 0.0  # as the last image went; 0: none has yet
        self._arrivals: dict[bytes, set[asyncio.Future[None]]] = {}

    def spec_of(self, grid: Grid) -> EmbeddingSpec:
        """The embedding of an image of that grid."""
        tokens = grid[0] * grid[1] * grid[2] // self._merge_size**2
        return replace(self._like, num_tokens=tokens)

    async def encode(self, key: bytes, image: bytes, grid: Grid) -> Encoded:
        """Makes the embedding available here or in Redis.

        Raises:
            Overloaded: too much is in work already; says how long that will take.
            TriptychError: the image's own error, or the engine's.
        """
        entry = self._memory.get(key)
        self._metrics.memory_lookups.labels("hit" if entry else "miss").inc()
        if entry:
            self._sources.put(key, image, grid)
            return Encoded(Origin.MEMORY, entry)
        if flight := self._flights.get(key):
            found = await self._join(flight)
            return Encoded(Origin.JOINED, found.entry)
        return await self._join(self._start(key, image, grid, into_memory=False))

    @asynccontextmanager
    async def reading(self, key: bytes, timeout_s: float) -> AsyncGenerator[Reading]:
        """The bytes of a key, held in memory for the block; waits for work that is under way or
        has not been asked for yet, until the first of them can come.

        Raises:
            InvalidRequest: the image can be encoded nowhere.
            EmbeddingUnavailable: nobody asked for the key in time, or the work on it failed.
        """
        try:
            with unavailable():
                async with asyncio.timeout(timeout_s):
                    reading = await self._held(key)
        except TimeoutError:
            raise EmbeddingUnavailable("the image was not encoded here in time") from None
        try:
            yield reading
        finally:
            # Nothing is awaited: a call that its caller cancels is cancelled once more.
            self._memory.release(reading.entry)
            if reading.work is not None:
                reading.work.cancel()  # of the waiting for it; others may still wait

    async def digest_of(self, entry: ArenaEntry) -> bytes:
        """The digest of a held entry."""
        return await self._memory.digest_of(entry)

    def view(self, entry: ArenaEntry) -> memoryview:
        """The bytes of a held entry."""
        return self._memory.arena.view(entry)

    @property
    def address(self) -> MemoryAddress:
        """Where other processes on this machine find the bytes."""
        return self._memory.arena.address

    async def close(self) -> None:
        """Ends all work."""
        tasks = [flight.task for flight in self._flights.values() if flight.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _held(self, key: bytes) -> Reading:
        while True:
            if entry := self._memory.get(key):
                self._memory.arena.acquire(entry)
                return Reading(entry, self._memory, self._memory.ranges(entry))
            flight = self._flights.get(key)
            if flight is None and (source := self._sources.get(key)):
                # Answered from Redis, or evicted since: the bytes are wanted here after all.
                flight = self._start(key, source.image, source.grid, into_memory=True)
            if flight is None:
                await self._arrival(key)
                continue
            work = self._join(flight)
            try:
                await asyncio.wait({work, flight.begun}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    entry = flight.begun.result()
                    # The work may be over before this future of it is.
                    if self._memory.try_hold(entry):
                        return Reading(entry, self._memory, self._memory.ranges(entry), work)
                    await asyncio.wait({work})
                work.result()
            except BaseException:
                work.cancel()
                raise

    async def _arrival(self, key: bytes) -> None:
        """Returns when somebody asks for work on the key."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._arrivals.setdefault(key, set())
        waiting.add(arrived)
        try:
            await arrived
        finally:
            waiting.discard(arrived)
            if not waiting and self._arrivals.get(key) is waiting:
                del self._arrivals[key]

    def _join(self, flight: _Flight) -> asyncio.Future[Encoded]:
        """Waits for the flight from this moment on; cancelling the future leaves it."""
        assert flight.task is not None
        flight.waiters += 1
        joined = asyncio.shield(flight.task)
        joined.add_done_callback(lambda done: self._leave(flight, done))
        return joined

    def _leave(self, flight: _Flight, joined: asyncio.Future[Encoded]) -> None:
        if not joined.cancelled():
            joined.exception()  # seen: who has gone need not be told
        flight.waiters -= 1
        if flight.waiters == 0 and flight.task is not None and not flight.task.done():
            # Forgotten at once: who asks from now on starts anew.
            self._forget(flight)
            flight.task.cancel()

    def _start(self, key: bytes, image: bytes, grid: Grid, *, into_memory: bool) -> _Flight:
        flight = _Flight(Wish(key, self.spec_of(grid), into_memory), image, grid)
        room = self._max_queued_patches - self._queued_patches
        if flight.num_patches > room:
            work_s = self._queued_patches * self._s_per_patch
            retry_after_s = min(max(work_s, 1.0), _MAX_RETRY_AFTER_S)
            raise Overloaded("too many images are being encoded", retry_after_s=retry_after_s)
        self._flights[key] = flight
        self._queued_patches += flight.num_patches
        flight.patches_ahead = self._queued_patches
        flight.task = asyncio.create_task(self._fly(flight))
        flight.task.add_done_callback(lambda task: self._land(flight, task))
        self._show_queue()
        for arrived in self._arrivals.pop(key, ()):
            if not arrived.done():
                arrived.set_result(None)
        return flight

    def _land(self, flight: _Flight, task: asyncio.Task[Encoded]) -> None:
        self._queued_patches -= flight.num_patches
        self._forget(flight)
        self._show_queue()
        if not task.cancelled() and task.exception() is None:
            self._sources.put(flight.wish.key, flight.image, flight.grid)

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.wish.key) is flight:
            del self._flights[flight.wish.key]

    def _show_queue(self) -> None:
        self._metrics.queue_images.set(len(self._flights))
        self._metrics.queue_patches.set(self._queued_patches)
        self._metrics.cache_bytes.set(self._memory.arena.used_bytes)

    async def _fly(self, flight: _Flight) -> Encoded:
        start = time.monotonic()  # the loop's own clock has a grain of a millisecond
        # Decoded while Redis is asked; that Redis has it is the rarer case.
        job = self._engine.submit(flight.image, flight.grid)
        try:
            found = b"" if self._shared is None else await self._shared.find(flight.wish)
        except BaseException:
            self._engine.cancel(job)
            raise
        lookup_s = time.monotonic() - start
        if isinstance(found, Encoded):
            self._engine.cancel(job)
            return replace(found, lookup_s=lookup_s)
        try:
            entry, times = await self._compute(flight, job)
        except BaseException:
            self._engine.cancel(job)
            if self._shared is not None:
                await self._shared.give_up(flight.wish.key, found)
            raise
        self._s_per_patch = (time.monotonic() - start) / flight.patches_ahead
        try:
            if self._writer is not None:
                self._writer.put(entry, found)
        finally:
            self._memory.release(entry)
        self._metrics.observe_stage("lookup", lookup_s)
        return Encoded(Origin.COMPUTED, entry, lookup_s, times)

    async def _compute(self, flight: _Flight, job: EngineJob) -> tuple[ArenaEntry, StageTimes]:
        """Encodes; the caller releases the entry, which nothing can evict until then."""
        entry = await self._memory.reserve(flight.wish.key, flight.wish.spec)
        self._memory.arena.acquire(entry)
        try:
            if entry.committed:
                self._engine.cancel(job)
                return entry, StageTimes()
            self._memory.begin(entry)
            self._engine.place(job, entry.offset, lambda level: self._grow(entry, level))
            job.done.add_done_callback(lambda done: self._settle(entry, done))
            flight.begun.set_result(entry)
            return entry, await self._awaited(job)
        except BaseException:
            self._memory.release(entry)
            raise

    async def _awaited(self, job: EngineJob) -> StageTimes:
        times = await asyncio.shield(job.done)
        self._metrics.observe_stage("queue", times.queue_s)
        self._metrics.observe_stage("preprocess", times.preprocess_s)
        self._metrics.observe_stage("forward", times.forward_s)
        return times

    def _grow(self, entry: ArenaEntry, level: int) -> None:
        if entry.spec.size_bytes >= self._least_levelwise_bytes:
            size = entry.spec.size_bytes // entry.spec.num_features
            self._memory.extend(entry, level * size, (level + 1) * size)

    def _settle(self, entry: ArenaEntry, done: asyncio.Future[StageTimes]) -> None:
        """The engine has let go of the memory, whether anybody still waits or not."""
        if done.exception() is None:
            self._metrics.images_encoded.inc()
            self._memory.commit(entry)
        else:
            self._memory.abandon(entry)
        self._memory.release(entry)
