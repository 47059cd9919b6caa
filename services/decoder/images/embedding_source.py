"""The embeddings of the decoder's sequences. Each is obtained once for all sequences that need it.

`EmbeddingStore` looks each embedding up in the arena, in Redis and at the encoders. Sequences get
memory of the arena in order of arrival, and each sequence gets the memory for all its images at
once. Otherwise two sequences could each hold half of their images and wait for the memory of the
other one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from services.common.embeddings.arena import ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_memory import PAGE_BYTES
from services.common.embeddings.store import MEMORY, EmbeddingStore, Lookup
from services.common.errors import InternalError, InvalidRequest
from services.decoder.images.embedding_fetch import EncoderFailed, FetchProgress
from services.decoder.images.encoders_tier import Fetch
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

# If an encoder does not answer, gateways name another encoder for the same image. A sequence that
# names another encoder than a running lookup calls replaces the lookup once it has lasted this
# long.
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
class _WaitingSequence:
    """A sequence that waits for embeddings.

    Attributes:
        since: time at which the sequence began to wait, by the event loop's clock.
        progress: times of the encoders' messages, by image key.
    """

    since: float
    progress: dict[bytes, FetchProgress] = field(default_factory=dict[bytes, FetchProgress])

    @property
    def last_work_at(self) -> float:
        """Time at which an encoder last reported work on any image of the sequence. The beginning
        of the wait if there was no such report.
        """
        return max([self.since, *(progress.last_work_at for progress in self.progress.values())])


# References to entries, one for each image.
_References = dict[ImageRequest, ArenaEntry]


@dataclass(slots=True)
class EmbeddingSource:
    """Obtains the embeddings of sequences. It decides which entries of the arena a sequence holds,
    how long the sequence waits, and which encoder is called.

    Args:
        store: the embeddings in the arena, and the tiers.
        metrics: metrics of the decoder.
        standstill_s: seconds after which a waiting sequence fails, if the encoder of an image has
            sent no message, or no encoder has reported work on any of the sequence's images.
        takeover_s: seconds after which a sequence that names another encoder replaces a lookup.
    """

    store: EmbeddingStore[Fetch]
    metrics: DecoderMetrics
    standstill_s: float = _STANDSTILL_S
    takeover_s: float = _TAKEOVER_S

    def take_resident(self, requests: Sequence[ImageRequest]) -> list[ArenaEntry]:
        """Takes references to the entries of all images, if all entries are complete and no
        sequence waits for memory.

        Returns:
            One entry per image, which the caller must `release`. An empty list if an embedding has
            to be obtained with `obtain`.
        """
        arena = self.store.arena
        if arena.has_claims:
            return []
        entries = [e for r in requests if (e := arena.get(r.key)) and e.spec == r.spec]
        if len(entries) < len(requests):
            return []
        for entry in entries:
            arena.acquire(entry)
            self.store.hits.labels(MEMORY).inc()
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
        arena = self.store.arena
        needed = sum(-(-r.spec.size_bytes // PAGE_BYTES) * PAGE_BYTES for r in requests)
        if needed > arena.size_bytes:
            raise InvalidRequest(
                f"the images' embeddings need {needed} bytes; this decoder has room for "
                f"{arena.size_bytes}"
            )
        references = await arena.claim(_ImagesClaim(self, requests))
        sequence = _WaitingSequence(asyncio.get_running_loop().time())
        complete = [request for request, entry in references.items() if entry.committed]
        tasks = [
            asyncio.create_task(self._wait(request, entry, sequence))
            for request, entry in references.items()
            if not entry.committed
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
        self.store.arena.release(entry)

    async def close(self) -> None:
        """Cancels all lookups and closes the connections to the encoders."""
        await self.store.close()

    # Memory.

    def try_reference_all(self, requests: Sequence[ImageRequest]) -> _References | None:
        """Takes a reference to each image's entry, and reserves the entries that do not exist.
        Returns None if there is too little memory.
        """
        references = self._try_reference_each(requests)
        if references is None:
            # Unreferenced entries, even of these images, may fragment the room for the others.
            self.store.arena.evict_unreferenced()
            references = self._try_reference_each(requests)
        for entry in (references or {}).values():
            counter = self.store.hits if entry.committed else self.store.misses
            counter.labels(MEMORY).inc()
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
        """Takes a reference to an image's entry, which other sequences may wait for, or reserves a
        new entry. Returns None if there is too little memory.
        """
        entry = self.store.arena.find(request.key)
        if entry is None:
            return self.store.arena.try_reserve(request.key, request.spec)
        if entry.spec != request.spec:
            raise InvalidRequest(
                f"an image has {entry.spec.num_tokens} tokens, not {request.spec.num_tokens}"
            )
        self.store.arena.acquire(entry)
        return entry

    def release_all(self, references: _References) -> None:
        """Releases the references that `try_reference_all` took."""
        for entry in references.values():
            self.release(entry)

    # Lookups.

    async def _wait(
        self, request: ImageRequest, entry: ArenaEntry, sequence: _WaitingSequence
    ) -> ImageRequest:
        """Waits until an embedding is complete, and returns its request.

        Each turn of the loop waits for the lookup under way, which may be another sequence's, and
        starts a lookup if there is none. If the lookup calls another encoder than this sequence
        names, the sequence replaces it once, after `takeover_s`. Otherwise the sequence fails after
        `standstill_s` without news.
        """
        address, progress = request.encoder_address, FetchProgress()
        joined, has_taken_over = self.store.running(request.key) is not None, False
        while not entry.committed:
            lookup = self.store.running(request.key) or self._start(request, entry, progress)
            task, called = lookup.task, lookup.inputs.encoder_address
            progress = sequence.progress[request.key] = lookup.inputs.progress
            now = asyncio.get_running_loop().time()
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
            joint = task.join()
            try:
                finished, _ = await asyncio.wait({joint}, timeout=max(0.0, timeout_s))
                if not finished:
                    # Another sequence may have replaced the lookup meanwhile.
                    if may_take_over and self.store.running(request.key) is lookup:
                        has_taken_over = True
                        self._start(request, entry, progress)
                    continue
            finally:
                joint.cancel()
            # After an error of another address, the next turn starts a lookup at this address.
            if not joint.cancelled() and (error := joint.exception()) and called == address:
                raise _copy_of(error, address)
        progress.report(in_work=True)  # for the sequence's other images, see `last_work_at`
        if joined:
            self.store.hits.labels("joined").inc()
        return request

    def _start(
        self, request: ImageRequest, entry: ArenaEntry, progress: FetchProgress
    ) -> Lookup[Fetch]:
        """Starts a lookup that calls the sequence's encoder. A lookup under way is replaced, and
        the sequences that wait for it wait for the new lookup then.
        """
        progress.start()
        fetch = Fetch(request.encoder_address, progress)
        return self.store.start(request.key, request.spec, fetch, entry=entry)


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
