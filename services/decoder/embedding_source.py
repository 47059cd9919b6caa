"""Where a sequence's image embeddings come from: the own arena → Redis → the encoder.

An embedding is brought once, however many sequences wait for it. Room is given to sequences in
order of arrival, and to a sequence for all its images at once: no two can wait for each other with
half of their images in hand.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.arena import Arena, ArenaEntry
from services.common.embedding import EmbeddingSpec
from services.common.errors import EmbeddingUnavailable, InternalError, InvalidRequest
from services.decoder.embedding_fetch import EncoderFailed, EncoderFetcher
from services.decoder.submission import ImageRequest

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096  # the arena's granularity
Ready = Callable[[bytes, ArenaEntry], None]


class EmbeddingCache(Protocol):
    """The shared tier; `services.common.embedding_cache.RedisCache` is one. Never raises."""

    async def header(self, key: bytes) -> tuple[EmbeddingSpec, bytes] | None:
        """Spec and digest of a stored entry."""
        ...

    async def read(self, key: bytes, spec: EmbeddingSpec, digest: bytes, into: memoryview) -> bool:
        """Whether `into` now holds the entry, verified."""
        ...


class Observer(Protocol):
    """Who counts what happens; the metrics."""

    def embedding_found(self, tier: str) -> None:
        """An image was had from "memory", "redis", "encoder", or from another's wait, "joined"."""
        ...

    def embedding_missed(self, tier: str) -> None:
        """An image was not in "memory" or "redis"."""
        ...

    def embedding_failed(self, *, corrupt: bool) -> None:
        """An encoder did not deliver, or delivered something else."""
        ...

    def embedding_fetched(self, seconds: float, size_bytes: int, path: str) -> None:
        """An encoder delivered, by "shm" or "grpc"."""
        ...


@dataclass(slots=True, eq=False)
class _Flight:
    """An embedding on its way. Each waiter, and the task, holds a reference to the entry."""

    entry: ArenaEntry
    address: str = ""
    task: asyncio.Task[None] | None = None
    num_waiters: int = 0


@dataclass(slots=True, eq=False)
class _Hold:
    """A reference to an entry, and the flight that fills it if it is not filled yet."""

    request: ImageRequest
    entry: ArenaEntry
    flight: _Flight | None


@dataclass(slots=True, eq=False)
class _Claim:
    """A sequence that waits for room."""

    requests: Sequence[ImageRequest]
    holds: asyncio.Future[list[_Hold]]


@dataclass(slots=True)
class EmbeddingSource:
    """The only one who puts embeddings into the decoder's arena.

    Args:
        arena: owned by this event loop.
        fetcher: the last resort.
        cache: the shared tier; None: there is none.
        observer: counts.
    """

    arena: Arena
    fetcher: EncoderFetcher
    cache: EmbeddingCache | None
    observer: Observer
    _flights: dict[bytes, _Flight] = field(default_factory=dict[bytes, _Flight])
    _claims: deque[_Claim] = field(default_factory=deque[_Claim])

    def take_resident(self, requests: Sequence[ImageRequest]) -> list[ArenaEntry]:
        """The entries of all images, each with a reference for the caller, if all are at hand and
        nobody waits for room; else an empty list, and `obtain` is the way.
        """
        if self._claims or any(request.key in self._flights for request in requests):
            return []
        entries = [e for r in requests if (e := self.arena.get(r.key)) and e.spec == r.spec]
        if len(entries) < len(requests):
            return []
        for entry in entries:
            self.arena.acquire(entry)
            self.observer.embedding_found("memory")
        return entries

    async def obtain(self, requests: Sequence[ImageRequest], ready: Ready) -> None:
        """Brings distinct images; `ready` is called once for each, with a reference to its entry
        that the caller gives back with `release`. Cancelling it harms no other caller.

        Raises:
            EncoderFailed: one could not be had; what `ready` came with stays the caller's.
            InvalidRequest: they would not fit into an empty arena, or have another size.
        """
        needed = sum(-(-r.spec.size_bytes // _PAGE_BYTES) * _PAGE_BYTES for r in requests)
        if needed > self.arena.size_bytes:
            raise InvalidRequest(
                f"the images' embeddings need {needed} bytes; this decoder has room for "
                f"{self.arena.size_bytes}"
            )
        holds = await self._claim(requests)
        left = set(holds)
        tasks: list[asyncio.Task[None]] = []
        try:
            for hold in holds:
                if hold.entry.committed:
                    left.discard(hold)
                    ready(hold.request.key, hold.entry)
            tasks = [asyncio.create_task(self._wait(hold, left, ready)) for hold in left]
            await asyncio.gather(*tasks)
        finally:
            # Nothing is awaited before all is given back: this may be cancelled once more.
            for task in tasks:
                task.cancel()
            for hold in left:
                self._release_entry(hold.entry)
            self._serve_claims()
            await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, entry: ArenaEntry) -> None:
        """Gives back a reference that `ready` came with."""
        self.arena.release(entry)
        self._serve_claims()

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [flight.task for flight in self._flights.values() if flight.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fetcher.close()

    # Room.

    async def _claim(self, requests: Sequence[ImageRequest]) -> list[_Hold]:
        if not self._claims and (holds := self._try_claim(requests)) is not None:
            return holds
        claim = _Claim(requests, asyncio.get_running_loop().create_future())
        self._claims.append(claim)
        try:
            return await claim.holds
        except asyncio.CancelledError:
            if claim.holds.done() and not claim.holds.cancelled() and not claim.holds.exception():
                for hold in claim.holds.result():  # granted in the very moment of the cancellation
                    self._drop(hold)
            elif claim in self._claims:
                self._claims.remove(claim)
                self._serve_claims()
            raise

    def _serve_claims(self) -> None:
        while self._claims:
            claim = self._claims[0]
            if not claim.holds.cancelled():
                try:
                    holds = self._try_claim(claim.requests)
                except InvalidRequest as error:
                    claim.holds.set_exception(error)
                else:
                    if holds is None:
                        return
                    claim.holds.set_result(holds)
            self._claims.popleft()

    def _try_claim(self, requests: Sequence[ImageRequest]) -> list[_Hold] | None:
        """A reference to each image's entry, made where there was none; or None: wait."""
        holds = self._try_hold_all(requests)
        if holds is None:
            # What nobody uses, one of these images perhaps, may lie amid the room for the rest.
            self.arena.evict_unreferenced()
            holds = self._try_hold_all(requests)
        for hold in holds or ():
            if hold.flight is None:
                self.observer.embedding_found("memory")
            else:
                self.observer.embedding_missed("memory")
        return holds

    def _try_hold_all(self, requests: Sequence[ImageRequest]) -> list[_Hold] | None:
        holds: list[_Hold] = []
        try:
            for request in requests:
                hold = self._try_hold(request)
                if hold is None:
                    self._undo(holds)
                    return None
                holds.append(hold)
        except InvalidRequest:
            self._undo(holds)
            raise
        return holds

    def _try_hold(self, request: ImageRequest) -> _Hold | None:
        flight = self._flights.get(request.key)
        entry = flight.entry if flight else self.arena.get(request.key)
        if entry is None:
            entry = self.arena.try_reserve(request.key, request.spec)
            if entry is None:
                return None
            flight = self._flights[request.key] = _Flight(entry)
            return _Hold(request, entry, flight)
        if entry.spec != request.spec:
            raise InvalidRequest(
                f"an image has {entry.spec.num_tokens} tokens, not {request.spec.num_tokens}"
            )
        self.arena.acquire(entry)
        return _Hold(request, entry, flight)

    def _undo(self, holds: list[_Hold]) -> None:
        for hold in holds:
            self._release_entry(hold.entry)

    def _drop(self, hold: _Hold) -> None:
        self._release_entry(hold.entry)
        self._serve_claims()

    def _release_entry(self, entry: ArenaEntry) -> None:
        self.arena.release(entry)
        if entry.references == 0 and not entry.committed:
            del self._flights[entry.key]

    # Bytes.

    async def _wait(self, hold: _Hold, left: set[_Hold], ready: Ready) -> None:
        """Waits until the entry is filled, by whomever, and hands it over."""
        flight, address = hold.flight, hold.request.encoder_address
        assert flight is not None
        joined = flight.task is not None
        while not hold.entry.committed:
            task = flight.task
            if task is None or task.done():
                task = self._start(flight, address)
            asked = flight.address
            flight.num_waiters += 1
            try:
                await asyncio.wait({task})
            finally:
                flight.num_waiters -= 1
                if flight.num_waiters == 0 and not task.done():
                    task.cancel()
            # A flight that somebody else's asking failed at another encoder is tried at ours.
            if not task.cancelled() and (error := task.exception()) and asked == address:
                raise _same(error, address)
        if joined:
            self.observer.embedding_found("joined")
        left.discard(hold)
        ready(hold.request.key, hold.entry)

    def _start(self, flight: _Flight, address: str) -> asyncio.Task[None]:
        """Starts to fill the entry. The task's reference is given back when it is over, also when
        it is cancelled before its first turn.
        """

        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                task.exception()  # seen: an error that nobody waits for any more is nobody's
            self._release_entry(flight.entry)
            self._serve_claims()

        self.arena.acquire(flight.entry)
        flight.address = address
        flight.task = asyncio.create_task(self._fill(flight))
        flight.task.add_done_callback(over)
        return flight.task

    async def _fill(self, flight: _Flight) -> None:
        entry = flight.entry
        try:
            view = self.arena.view(entry)
            if not await self._read_cache(entry, view):
                started = time.monotonic()
                fetched = await self.fetcher.fetch(flight.address, entry.key, entry.spec, view)
                entry.digest = fetched.digest
                self.observer.embedding_found("encoder")
                self.observer.embedding_fetched(
                    time.monotonic() - started, entry.spec.size_bytes, fetched.path
                )
            self.arena.commit(entry)
            del self._flights[entry.key]
        except EncoderFailed as error:
            self.observer.embedding_failed(corrupt=error.corrupt)
            raise

    async def _read_cache(self, entry: ArenaEntry, view: memoryview) -> bool:
        if self.cache is None:
            return False
        found = await self.cache.header(entry.key)
        if found is not None and found[0] == entry.spec:
            entry.digest = found[1]
            if await self.cache.read(entry.key, entry.spec, found[1], view):
                self.observer.embedding_found("redis")
                return True
        self.observer.embedding_missed("redis")
        return False


def _same(error: BaseException, address: str) -> Exception:
    """The error of a flight, anew for each who waited for it."""
    if isinstance(error, EncoderFailed):
        return EncoderFailed(error.message, address, corrupt=error.corrupt)
    if isinstance(error, InvalidRequest):
        return type(error)(error.message)
    log.error("bringing an embedding failed", exc_info=error)
    return InternalError("bringing an embedding failed")


__all__ = ["EmbeddingCache", "EmbeddingSource", "EmbeddingUnavailable", "Observer"]
