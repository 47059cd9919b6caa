"""Image embeddings in the decoder. Each embedding is obtained once for all sequences that need it.

An embedding comes from the arena, from Redis or from an encoder, in this order. Sequences get
memory of the arena in order of arrival, and each sequence gets the memory for all its images at
once. Otherwise two sequences could each hold half of their images and wait for the memory of the
other one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.shared_memory import PAGE_BYTES
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import InternalError, InvalidRequest
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher, FetchProgress
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

# If an encoder does not answer, gateways name another encoder for the same image. A sequence that
# names another encoder than a running fetch calls replaces the fetch once it has lasted this long.
_TAKEOVER_S = 1.0
_STANDSTILL_S = 30.0


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A distinct image of a sequence.

    Attributes:
        key: image key of the embedding.
        spec: shape and dtype that the embedding must have.
        encoder_address: address of the encoder that has the embedding.
    """

    key: bytes
    spec: EmbeddingSpec
    encoder_address: str


@dataclass(slots=True, eq=False)
class _EmbeddingWrite:
    """An entry of the arena whose bytes are not complete. Each sequence that waits for the entry
    holds a reference to it, and so does the fetch.

    Attributes:
        entry: the uncommitted entry.
        fetch: task that writes the bytes. None if no sequence has started it.
        encoder_address: address of the encoder that the fetch calls.
        progress: times of the fetch's start and of the encoder's messages.
    """

    entry: ArenaEntry
    fetch: SharedTask[None] | None = None
    encoder_address: str = ""
    progress: FetchProgress = field(default_factory=FetchProgress)


@dataclass(slots=True, eq=False)
class _WaitingSequence:
    """A sequence that waits for embeddings.

    Attributes:
        since: time at which the sequence began to wait, by the event loop's clock.
        writes: the embeddings that were not complete at that time.
    """

    since: float
    writes: Sequence[_EmbeddingWrite]

    @property
    def last_work_at(self) -> float:
        """Time at which an encoder last reported work on any image of the sequence. The beginning
        of the wait if there was no such report.
        """
        return max([self.since, *(write.progress.last_work_at for write in self.writes)])


# References to entries, one for each image.
_References = dict[ImageRequest, ArenaEntry]


@dataclass(slots=True)
class EmbeddingSource:
    """Obtains embeddings, each of them once. It is the only writer of the decoder's arena.

    Args:
        arena: memory for the embeddings, owned by this event loop.
        fetcher: client of the encoders.
        cache: Redis. None if the settings name none.
        metrics: metrics of the decoder.
        standstill_s: seconds after which a waiting sequence fails, if the encoder of an image has
            sent no message, or no encoder has reported work on any of the sequence's images.
        takeover_s: seconds after which a sequence that names another encoder replaces a fetch.
    """

    arena: Arena
    fetcher: EncoderFetcher
    cache: RedisCache | None
    metrics: DecoderMetrics
    standstill_s: float = _STANDSTILL_S
    takeover_s: float = _TAKEOVER_S
    _writes: dict[bytes, _EmbeddingWrite] = field(default_factory=dict[bytes, _EmbeddingWrite])

    @property
    def num_writes(self) -> int:
        """Number of embeddings that are not complete yet."""
        return len(self._writes)

    def take_resident(self, requests: Sequence[ImageRequest]) -> list[ArenaEntry]:
        """Takes references to the entries of all images, if all entries are complete and no
        sequence waits for memory.

        Returns:
            One entry per image, which the caller must `release`. An empty list if an embedding has
            to be obtained with `obtain`.
        """
        if self.arena.has_claims or any(request.key in self._writes for request in requests):
            return []
        entries = [e for r in requests if (e := self.arena.get(r.key)) and e.spec == r.spec]
        if len(entries) < len(requests):
            return []
        for entry in entries:
            self.arena.acquire(entry)
            self.metrics.hits.labels("memory").inc()
        return entries

    async def obtain(self, requests: Sequence[ImageRequest]) -> AsyncGenerator[ArenaEntry]:
        """Obtains the embeddings of a sequence. Cancelling the caller does not affect other
        sequences.

        Args:
            requests: distinct images of the sequence.

        Yields:
            The entry of each image as soon as the entry is complete, with a reference that the
            caller must `release`.

        Raises:
            EncoderFailed: an encoder did not deliver an embedding.
            InvalidRequest: the embeddings would not fit into an empty arena, or an embedding has
                another size.
        """
        needed = sum(-(-r.spec.size_bytes // PAGE_BYTES) * PAGE_BYTES for r in requests)
        if needed > self.arena.size_bytes:
            raise InvalidRequest(
                f"the images' embeddings need {needed} bytes; this decoder has room for "
                f"{self.arena.size_bytes}"
            )
        references = await self.arena.claim(_ImagesClaim(self, requests))
        writes = {r: self._writes[e.key] for r, e in references.items() if not e.committed}
        sequence = _WaitingSequence(asyncio.get_running_loop().time(), list(writes.values()))
        complete = [request for request in references if request not in writes]
        tasks = [
            asyncio.create_task(self._wait(request, write, sequence))
            for request, write in writes.items()
        ]
        try:
            for request in complete:
                yield references.pop(request)
            for done in asyncio.as_completed(tasks):
                request = await done
                yield references.pop(request)
        finally:
            # References are released before the await, which a second cancellation may interrupt.
            for task in tasks:
                task.cancel()
            self.release_all(references)
            await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, entry: ArenaEntry) -> None:
        """Releases a reference to an entry."""
        # A fetch holds a reference, so nothing writes an uncommitted entry whose last one this is.
        if entry.references == 1 and not entry.committed:
            del self._writes[entry.key]
        self.arena.release(entry)

    async def close(self) -> None:
        """Cancels all fetches and closes the connections to the encoders."""
        tasks = [write.fetch.task for write in self._writes.values() if write.fetch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fetcher.close()

    # Memory.

    def try_reference_all(self, requests: Sequence[ImageRequest]) -> _References | None:
        """Takes a reference to each image's entry, and reserves the entries that do not exist.
        Returns None if there is too little memory.
        """
        references = self._try_reference_each(requests)
        if references is None:
            # Unreferenced entries, even of these images, may fragment the room for the others.
            self.arena.evict_unreferenced()
            references = self._try_reference_each(requests)
        for entry in (references or {}).values():
            if entry.committed:
                self.metrics.hits.labels("memory").inc()
            else:
                self.metrics.misses.labels("memory").inc()
        return references

    def _try_reference_each(self, requests: Sequence[ImageRequest]) -> _References | None:
        references: _References = {}
        with ExitStack() as undo:
            undo.callback(self.release_all, references)
            for request in requests:
                if (entry := self._try_reference(request)) is None:
                    return None
                references[request] = entry
            undo.pop_all()
        return references

    def _try_reference(self, request: ImageRequest) -> ArenaEntry | None:
        write = self._writes.get(request.key)
        entry = write.entry if write else self.arena.get(request.key)
        if entry is None:
            entry = self.arena.try_reserve(request.key, request.spec)
            if entry is not None:
                self._writes[request.key] = _EmbeddingWrite(entry)
            return entry
        if entry.spec != request.spec:
            raise InvalidRequest(
                f"an image has {entry.spec.num_tokens} tokens, not {request.spec.num_tokens}"
            )
        self.arena.acquire(entry)
        return entry

    def release_all(self, references: _References) -> None:
        """Releases the references that `try_reference_all` took."""
        for entry in references.values():
            self.release(entry)

    # Bytes.

    async def _wait(
        self, request: ImageRequest, write: _EmbeddingWrite, sequence: _WaitingSequence
    ) -> ImageRequest:
        """Waits until an embedding is complete, and returns its request.

        Each turn of the loop waits for the fetch under way, which may be another sequence's, and
        starts a fetch if there is none. If the fetch calls another encoder than this sequence
        names, the sequence replaces it once, after `takeover_s`. Otherwise the sequence fails after
        `standstill_s` without news.
        """
        address, progress = request.encoder_address, write.progress
        joined, has_taken_over = write.fetch is not None, False
        while not write.entry.committed:
            fetch = write.fetch
            if fetch is None or fetch.task.done():
                fetch = self._start(write, address)
            called, now = write.encoder_address, asyncio.get_running_loop().time()
            may_take_over = joined and called != address and not has_taken_over
            if may_take_over:
                timeout_s = progress.started_at + self.takeover_s - now
            else:
                # Both kinds of news have to come, so the one that is older decides.
                last_report_at = min(progress.last_message_at, sequence.last_work_at)
                timeout_s = last_report_at + self.standstill_s - now
                if timeout_s <= 0:
                    self.metrics.fetch_errors.labels("unavailable").inc()
                    # The error has the address that the gateway named, even if another was called.
                    message = f"encoder {called} did not send the embedding in time"
                    raise EncoderFailed(message, address)
            joint = fetch.join()
            try:
                finished, _ = await asyncio.wait({joint}, timeout=max(0.0, timeout_s))
                if not finished:
                    # Another sequence may have replaced the fetch meanwhile.
                    if may_take_over and write.fetch is fetch and not fetch.task.done():
                        has_taken_over = True
                        self._start(write, address)
                    continue
            finally:
                joint.cancel()
            # After an error of another address, the next turn starts a fetch from this address.
            if not joint.cancelled() and (error := joint.exception()) and called == address:
                raise _copy_of(error, address)
        if joined:
            self.metrics.hits.labels("joined").inc()
        return request

    def _start(self, write: _EmbeddingWrite, address: str) -> SharedTask[None]:
        """Starts a fetch, which writes after the fetch that it replaces has ended. Sequences that
        wait for the replaced fetch wait for the new fetch.
        """
        self.arena.acquire(write.entry)
        replaced = write.fetch.task if write.fetch is not None else None
        write.encoder_address = address
        write.progress.start()
        write.fetch = SharedTask(self._fetch(write, address, replaced))
        write.fetch.task.add_done_callback(lambda _: self.release(write.entry))
        if replaced is not None:
            replaced.cancel()
        return write.fetch

    async def _fetch(
        self, write: _EmbeddingWrite, address: str, replaced: asyncio.Task[None] | None
    ) -> None:
        entry = write.entry
        if replaced is not None:
            try:
                await asyncio.wait((replaced,))
            except asyncio.CancelledError:
                # This fetch is cancelled, too, and must not end before the first writer has.
                await asyncio.wait((replaced,))
                raise
            if entry.committed:
                return
        try:
            view = self.arena.view(entry)
            digest = None
            if self.cache is not None:
                digest = await self.cache.read(entry.key, entry.spec, view)
                counter = self.metrics.misses if digest is None else self.metrics.hits
                counter.labels("redis").inc()
            if digest is None:
                started = time.monotonic()
                fetched = await self.fetcher.fetch(
                    address, entry.key, entry.spec, view, write.progress
                )
                digest = fetched.digest
                self.metrics.hits.labels("encoder").inc()
                self.metrics.fetch.observe(time.monotonic() - started)
                self.metrics.fetch_bytes.labels(fetched.path).inc(entry.spec.size_bytes)
        except EncoderFailed as error:
            self.metrics.fetch_errors.labels(error.kind).inc()
            raise
        entry.digest = digest
        write.progress.report(in_work=True)  # for the sequence's other images, see `last_work_at`
        del self._writes[entry.key]
        self.arena.commit(entry)


@dataclass(frozen=True, slots=True)
class _ImagesClaim(Claim[_References]):
    """A sequence's claim of memory for all its images at once."""

    source: EmbeddingSource
    requests: Sequence[ImageRequest]

    def attempt(self) -> _References | None:
        return self.source.try_reference_all(self.requests)

    def undo(self, result: _References) -> None:
        self.source.release_all(result)


def _copy_of(error: BaseException, address: str) -> Exception:
    """Copies the error of a fetch, because each waiting sequence raises an exception of its own."""
    if isinstance(error, EncoderFailed):
        return EncoderFailed(error.message, address, error.kind)
    if isinstance(error, InvalidRequest):
        return type(error)(error.message)
    log.error("the decoder failed to fetch an embedding", exc_info=error)
    return InternalError("the decoder failed to fetch an embedding")
