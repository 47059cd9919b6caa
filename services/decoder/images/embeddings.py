"""Image embeddings in the decoder: obtained once for all sequences, held for each until it is read.

An embedding comes from the arena, Redis or an encoder, in this order. Room in the arena is given to
sequences in order of arrival, and to a sequence for all its images at once: otherwise two sequences
could each hold half of their images and wait for the other's memory.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_memory import PAGE_BYTES
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import InternalError, InvalidRequest, TriptychError
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import AddSequence, EngineMessage, ImageReady, ImagesOf
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher
from services.decoder.input_listener import InputListener
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

# An image that is asked for at another encoder is fetched from there when the fetch in flight has
# taken this long: gateways name another encoder when the first one does not answer.
_TAKEOVER_S = 1.0
# A sequence fails when it has heard nothing of an image's encoder for so long, or of none of its
# images that an encoder works on it.
_STANDSTILL_S = 30.0
Ready = Callable[[ArenaEntry], None]


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One distinct image of a sequence: what its embedding must be, and the encoder that has it."""

    key: bytes
    spec: EmbeddingSpec
    encoder_address: str


class EmbeddingCache(Protocol):
    """`RedisCache` of `common/embeddings`, as far as it is used here. Never raises."""

    async def read(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> bytes | None:
        """The digest of what `into` now holds, verified; None: a miss."""
        ...


@dataclass(slots=True, eq=False)
class _Filling:
    """An entry without its bytes yet. Each sequence that waits for it, and the flight, hold a
    reference.

    Attributes:
        flight: writes the bytes; None: not started.
        address: of the encoder that the flight calls.
        started_at: of the flight, by the event loop's clock.
        heard_at: a message of the encoder's has come last; the flight's start before the first.
        worked_at: likewise of one that says that the image is in work; 0: none.
    """

    entry: ArenaEntry
    flight: SharedTask[None] | None = None
    address: str = ""
    started_at: float = 0.0
    heard_at: float = 0.0
    worked_at: float = 0.0

    def heard(self, in_work: bool) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        if in_work:
            self.worked_at = self.heard_at


# References to entries, one for each image. Those that are not complete are being filled.
_Held = dict[ImageRequest, ArenaEntry]


@dataclass(slots=True)
class EmbeddingSource:
    """Obtains embeddings, each once. Nothing else writes to the decoder's arena.

    Args:
        arena: owned by this event loop.
        cache: Redis; None: there is none.
        standstill_s: see `_STANDSTILL_S`.
    """

    arena: Arena
    fetcher: EncoderFetcher
    cache: EmbeddingCache | None
    metrics: DecoderMetrics
    standstill_s: float = _STANDSTILL_S
    _filling: dict[bytes, _Filling] = field(default_factory=dict[bytes, _Filling])

    def take_resident(self, requests: Sequence[ImageRequest]) -> list[ArenaEntry]:
        """The entries of all images, each with a reference for the caller, if all are complete and
        no sequence waits for room; else an empty list: use `obtain`.
        """
        if self.arena.has_claims or any(request.key in self._filling for request in requests):
            return []
        entries = [e for r in requests if (e := self.arena.get(r.key)) and e.spec == r.spec]
        if len(entries) < len(requests):
            return []
        for entry in entries:
            self.arena.acquire(entry)
            self.metrics.hits.labels("memory").inc()
        return entries

    async def obtain(self, requests: Sequence[ImageRequest], ready: Ready) -> None:
        """Obtains distinct images. Cancelling it does not affect other callers.

        Args:
            ready: called once for each, with a complete entry and a reference to it, which the
                caller releases with `release`.

        Raises:
            EncoderFailed: one was not delivered; references given to `ready` stay the caller's.
            InvalidRequest: they would not fit into an empty arena, or have another size.
        """
        needed = sum(-(-r.spec.size_bytes // PAGE_BYTES) * PAGE_BYTES for r in requests)
        if needed > self.arena.size_bytes:
            raise InvalidRequest(
                f"the images' embeddings need {needed} bytes; this decoder has room for "
                f"{self.arena.size_bytes}"
            )
        held = await self.arena.claim(_ImagesClaim(self, requests))
        not_ready = dict(held)
        fillings = [self._filling[e.key] for e in held.values() if not e.committed]
        began_at = asyncio.get_running_loop().time()

        def worked_at() -> float:
            return max([began_at, *(filling.worked_at for filling in fillings)])

        async def wait(request: ImageRequest, filling: _Filling) -> None:
            await self._wait(filling, request.encoder_address, worked_at)
            ready(not_ready.pop(request))

        tasks: list[asyncio.Task[None]] = []
        try:
            for request, entry in held.items():
                if entry.committed:
                    ready(not_ready.pop(request))
            tasks = [asyncio.create_task(wait(r, self._filling[r.key])) for r in not_ready]
            await asyncio.gather(*tasks)
        finally:
            # Releases come before any await, because this task may be cancelled again.
            for task in tasks:
                task.cancel()
            self.release_all(not_ready)
            await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, entry: ArenaEntry) -> None:
        if entry.references == 1 and not entry.committed:
            del self._filling[entry.key]
        self.arena.release(entry)

    async def close(self) -> None:
        """Ends all fetches."""
        tasks = [filling.flight.task for filling in self._filling.values() if filling.flight]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fetcher.close()

    # Memory.

    def try_hold_all(self, requests: Sequence[ImageRequest]) -> _Held | None:
        """Takes a reference to each image's entry, and reserves the entries that do not exist.
        Returns None if there is too little memory.
        """
        held = self._try_hold_each(requests)
        if held is None:
            # Unreferenced entries, even of these images, may fragment the room for the others.
            self.arena.evict_unreferenced()
            held = self._try_hold_each(requests)
        for entry in (held or {}).values():
            if entry.committed:
                self.metrics.hits.labels("memory").inc()
            else:
                self.metrics.misses.labels("memory").inc()
        return held

    def _try_hold_each(self, requests: Sequence[ImageRequest]) -> _Held | None:
        held: _Held = {}
        with ExitStack() as undo:
            undo.callback(self.release_all, held)
            for request in requests:
                if (entry := self._try_hold(request)) is None:
                    return None
                held[request] = entry
            undo.pop_all()
        return held

    def _try_hold(self, request: ImageRequest) -> ArenaEntry | None:
        filling = self._filling.get(request.key)
        entry = filling.entry if filling else self.arena.get(request.key)
        if entry is None:
            entry = self.arena.try_reserve(request.key, request.spec)
            if entry is not None:
                self._filling[request.key] = _Filling(entry)
            return entry
        if entry.spec != request.spec:
            raise InvalidRequest(
                f"an image has {entry.spec.num_tokens} tokens, not {request.spec.num_tokens}"
            )
        self.arena.acquire(entry)
        return entry

    def release_all(self, held: _Held) -> None:
        """Releases the references that `try_hold_all` took."""
        for entry in held.values():
            self.release(entry)

    # Bytes.

    async def _wait(self, filling: _Filling, address: str, worked_at: Callable[[], float]) -> None:
        """Waits until the entry is filled, at any sequence's request.

        Args:
            address: of the encoder that has it.
            worked_at: when an encoder last worked on an image of this sequence.
        """
        joined, has_taken_over = filling.flight is not None, False
        while not filling.entry.committed:
            flight = filling.flight
            if flight is None or flight.task.done():
                flight = self._start(filling, address)
            asked, now = filling.address, asyncio.get_running_loop().time()
            patience_s = min(filling.heard_at, worked_at()) + self.standstill_s - now
            may_take_over = joined and asked != address and not has_taken_over
            if may_take_over:
                patience_s = filling.started_at + _TAKEOVER_S - now
            elif patience_s <= 0:
                self.metrics.fetch_errors.labels("unavailable").inc()
                message = f"encoder {asked} did not send the embedding in time"
                raise EncoderFailed(message, address)
            done = flight.join()
            try:
                finished, _ = await asyncio.wait({done}, timeout=max(0.0, patience_s))
                can_take_over = filling.flight is flight and not flight.task.done()
                if not finished and may_take_over and can_take_over:
                    has_taken_over = True
                    self._start(filling, address)
                if not finished:
                    continue
            finally:
                done.cancel()
            # A flight that failed at another sequence's encoder is tried again at ours.
            if not done.cancelled() and (error := done.exception()) and asked == address:
                raise _copy_of(error, address)
        if joined:
            self.metrics.hits.labels("joined").inc()

    def _start(self, filling: _Filling, address: str) -> SharedTask[None]:
        """Starts a flight. It writes after the one that it replaces has ended; waiters of that one
        wait for this one.
        """
        self.arena.acquire(filling.entry)
        last = filling.flight.task if filling.flight is not None else None
        filling.address = address
        filling.started_at = filling.heard_at = asyncio.get_running_loop().time()
        filling.flight = SharedTask(self._fill(filling, address, last))
        filling.flight.task.add_done_callback(lambda _: self.release(filling.entry))
        if last is not None:
            last.cancel()
        return filling.flight

    async def _fill(self, filling: _Filling, address: str, last: asyncio.Task[None] | None) -> None:
        entry = filling.entry
        if last is not None:
            try:
                await asyncio.wait((last,))
            except asyncio.CancelledError:
                await asyncio.wait((last,))  # one writer at a time
                raise
            if entry.committed:
                return
        try:
            view = self.arena.view(entry)
            digest = None
            if self.cache is not None:
                digest = await self.cache.read(entry.key, entry.spec, view)
                found = self.metrics.misses if digest is None else self.metrics.hits
                found.labels("redis").inc()
            if digest is None:
                started = time.monotonic()
                fetched = await self.fetcher.fetch(
                    address, entry.key, entry.spec, view, filling.heard
                )
                digest = fetched.digest
                self.metrics.hits.labels("encoder").inc()
                self.metrics.fetch.observe(time.monotonic() - started)
                self.metrics.fetch_bytes.labels(fetched.path).inc(entry.spec.size_bytes)
        except EncoderFailed as error:
            self.metrics.fetch_errors.labels(error.kind).inc()
            raise
        entry.digest = digest
        filling.heard(True)
        del self._filling[entry.key]
        self.arena.commit(entry)


@dataclass(frozen=True, slots=True)
class _ImagesClaim(Claim[_Held]):
    """A sequence's claim of memory for all its images at once."""

    source: EmbeddingSource
    requests: Sequence[ImageRequest]

    def attempt(self) -> _Held | None:
        return self.source.try_hold_all(self.requests)

    def undo(self, result: _Held) -> None:
        self.source.release_all(result)


def _copy_of(error: BaseException, address: str) -> Exception:
    """A flight's error for one of its waiters: each raises an exception of its own."""
    if isinstance(error, EncoderFailed):
        return EncoderFailed(error.message, address, error.kind)
    if isinstance(error, InvalidRequest):
        return type(error)(error.message)
    log.error("fetching an embedding failed", exc_info=error)
    return InternalError("fetching an embedding failed")


@dataclass(slots=True, eq=False)
class _Images:
    """One sequence's images: all that it names, and those that the engine may read now."""

    requests: Sequence[ImageRequest]
    submitted_at: float
    transfer_s: float = 0.0
    entries: dict[bytes, ArenaEntry] = field(default_factory=dict[bytes, ArenaEntry])
    fetches: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


@dataclass(slots=True, eq=False)
class SequenceImages:
    """Owner of all references to the arena that sequences have. Made and used in one event loop.

    An image's entry is held until the engine has read it. A sequence that is preempted after that
    may need it again; then it is obtained as at first.

    Attributes:
        engine: receives the sequences and the places of their images.
        listener: owner of the sequences, which ends those whose images cannot be obtained.
    """

    source: EmbeddingSource
    engine: FrontChannel[EngineMessage]
    listener: InputListener
    _of: dict[int, _Images] = field(default_factory=dict[int, _Images])  # by sequence number
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def add(self, message: AddSequence, requests: Sequence[ImageRequest]) -> None:
        """Sends a sequence to the engine and obtains its images, which are distinct."""
        if not requests:
            self.engine.send(message)
            return
        number = message.sequence_id
        self._of[number] = _Images(requests, time.monotonic())
        self._obtain(number, requests, message)

    def release_read(self, read: ImagesOf) -> None:
        """The engine has read these images."""
        if images := self._of.get(read.sequence_id):
            for key in read.keys:
                self.source.release(images.entries.pop(key))

    def obtain_again(self, wanted: ImagesOf) -> None:
        """The engine needs these images once more."""
        if images := self._of.get(wanted.sequence_id):
            keys = frozenset(wanted.keys)
            self._obtain(wanted.sequence_id, [r for r in images.requests if r.key in keys])

    def transfer_s(self, number: int) -> float:
        """Seconds from submission until the last image was ready; 0: it has none."""
        images = self._of.get(number)
        return images.transfer_s if images else 0.0

    def cancel_fetches(self, number: int) -> None:
        """Images that are not ready are no longer needed. The others stay, because a step in
        flight may read them.
        """
        if images := self._of.get(number):
            for task in images.fetches:
                task.cancel()

    def remove(self, number: int) -> None:
        """The engine has ended the sequence."""
        self.cancel_fetches(number)
        if images := self._of.pop(number, None):
            for entry in images.entries.values():
                self.source.release(entry)

    async def close(self) -> None:
        """Ends all fetches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.source.close()

    def _obtain(self, number: int, requests: Sequence[ImageRequest], *first: AddSequence) -> None:
        images = self._of[number]
        entries = self.source.take_resident(requests)
        # One send, so that the engine does not start a step on the text alone.
        self.engine.send(*first, *(ImageReady(number, e.key, e.offset) for e in entries))
        if entries:
            images.entries.update((entry.key, entry) for entry in entries)
            images.transfer_s = time.monotonic() - images.submitted_at
            return
        task = asyncio.create_task(self._fetch(number, images, requests))
        for tasks in (self._tasks, images.fetches):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _fetch(self, number: int, images: _Images, requests: Sequence[ImageRequest]) -> None:
        def ready(entry: ArenaEntry) -> None:
            if number not in self._of:  # the sequence ended in this turn of the event loop
                self.source.release(entry)
                return
            images.entries[entry.key] = entry
            images.transfer_s = time.monotonic() - images.submitted_at
            self.engine.send(ImageReady(number, entry.key, entry.offset))

        try:
            await self.source.obtain(requests, ready)
        except TriptychError as error:
            self.listener.input_failed(number, error)
        except Exception:
            log.exception("obtaining images failed", extra={"fields": {"sequence": number}})
            self.listener.input_failed(number, InternalError("obtaining the images failed"))
