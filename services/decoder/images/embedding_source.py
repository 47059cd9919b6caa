"""The embeddings of the decoder's sequences.

`EmbeddingStore` looks each embedding up in the arena, in Redis and at the encoders, once for all
sequences that need it. This file gives sequences memory of the arena, in order of arrival, and
decides how long they wait. A sequence gets the memory for all its images at once. Otherwise, two
sequences could each hold the memory for half of their images, and wait forever for the other half.
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

# Two sequences may name different encoders for the same image, because a gateway chooses another
# encoder when one does not answer. If sequence B waits for a lookup that calls the encoder of
# sequence A, and the lookup lasts longer than this, B replaces it by a lookup that calls the
# encoder of B.
_TAKEOVER_S = 1.0
_STANDSTILL_S = 30.0


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The request of a sequence for one embedding. An image that occurs twice in the prompt is
    requested once.

    Attributes:
        key: image key of the embedding.
        spec: shape and dtype that the embedding must have.
        encoder_address: address of the encoder that has the embedding, as the gateway has named it.
    """

    key: bytes
    spec: EmbeddingSpec
    encoder_address: str


@dataclass(slots=True, eq=False)
class _WaitingSequence:
    """A sequence that waits for embeddings.

    Attributes:
        since: time at which the sequence began to wait, by the event loop's clock.
        progress: times at which encoders have sent messages about each image, by image key.
    """

    since: float
    progress: dict[bytes, FetchProgress] = field(default_factory=dict[bytes, FetchProgress])

    @property
    def last_work_at(self) -> float:
        """Time of the last message in which an encoder has reported work on an image of the
        sequence. The beginning of the wait if there was no such message.
        """
        return max([self.since, *(progress.last_work_at for progress in self.progress.values())])


# A reference to an entry of the arena for each image.
_References = dict[ImageRequest, ArenaEntry]


@dataclass(slots=True)
class EmbeddingSource:
    """Obtains the embeddings of sequences. It decides which entries of the arena a sequence holds,
    how long the sequence waits, and which encoder is called.

    Args:
        store: the arena with its embeddings, and the lookups of embeddings that it lacks.
        metrics: metrics of the decoder.
        standstill_s: seconds without progress after which a sequence fails (see `_wait`).
        takeover_s: seconds after which a sequence may replace a lookup that calls another encoder
            than the sequence has named.
    """

    store: EmbeddingStore[Fetch]
    metrics: DecoderMetrics
    standstill_s: float = _STANDSTILL_S
    takeover_s: float = _TAKEOVER_S

    def take_resident(self, requests: Sequence[ImageRequest]) -> list[ArenaEntry]:
        """Takes references to the entries of all images, if all of them are in the arena and no
        other sequence waits for memory. This spares most sequences the work of `obtain`.

        Returns:
            One entry per image, which the caller must `release`. An empty list if the embeddings
            have to be obtained with `obtain`.
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
            The entry of each image as soon as the entry is committed, with a reference that the
            caller must `release`.

        Raises:
            EncoderFailed: an encoder did not deliver an embedding.
            InvalidRequest: the embeddings would not fit into an empty arena, or an embedding in it
                has another size than the request says.
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
            # The references are released before the `await`, because it may be interrupted by a
            # second cancellation.
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
            # There may be enough free memory, but in pieces that are too small. All unreferenced
            # entries are evicted so that the pieces join, even if some hold this sequence's images,
            # which are then fetched again.
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
        """Takes a reference to the entry of an image, committed or not. If there is no entry,
        reserves one. Returns None if there is too little memory.
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
        """Waits until an entry is committed, and returns its request.

        Each turn of the loop waits for the running lookup, which another sequence may have started,
        or starts a lookup if none is running. If another sequence's lookup calls another encoder
        than this sequence has named, this sequence replaces it after `takeover_s`, but only once.

        Each message of an encoder about an image says either that the image is queued, or that
        work on the image goes on. The sequence fails if `standstill_s` have passed since the last
        message about this image, or since the last message that work on any image of the sequence
        goes on.
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
                last_report_at = min(progress.last_message_at, sequence.last_work_at)
                timeout_s = last_report_at + self.standstill_s - now
                if timeout_s <= 0:
                    self.metrics.fetch_errors.labels("unavailable").inc()
                    # The gateway excludes the encoder of the error from the next attempt. It can
                    # only exclude an encoder that it has chosen: `address`, and not `called`.
                    message = f"encoder {called} did not send the embedding in time"
                    raise EncoderFailed(message, address)
            joint = task.join()
            try:
                finished, _ = await asyncio.wait({joint}, timeout=max(0.0, timeout_s))
                if not finished:
                    # Nothing is done if another sequence has replaced the lookup meanwhile.
                    if may_take_over and self.store.running(request.key) is lookup:
                        has_taken_over = True
                        self._start(request, entry, progress)
                    continue
            finally:
                joint.cancel()
            # If the lookup has failed but called another sequence's encoder, the next turn starts a
            # lookup that calls the encoder of this sequence.
            if not joint.cancelled() and (error := joint.exception()) and called == address:
                raise _copy_of(error, address)
        # An encoder has just worked for this sequence, so its other images may wait longer.
        progress.report(in_work=True)
        if joined:
            self.store.hits.labels("joined").inc()
        return request

    def _start(
        self, request: ImageRequest, entry: ArenaEntry, progress: FetchProgress
    ) -> Lookup[Fetch]:
        """Starts a lookup that calls the sequence's encoder. If a lookup is running, the new lookup
        replaces it, also for the sequences that wait for it.
        """
        progress.start()
        fetch = Fetch(request.encoder_address, progress)
        return self.store.start(request.key, request.spec, fetch, entry=entry)


@dataclass(frozen=True, slots=True)
class _ImagesClaim(Claim[_References]):
    """A sequence's claim on memory for all its images at once, see `Arena.claim`."""

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
