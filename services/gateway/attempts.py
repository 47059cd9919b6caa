"""The failure contract between the gateway and the two services behind it.

A request is tried until the client has seen its first token: a failed encoder or decoder is left
out and the whole of it submitted again, for nothing has been promised yet and encoding is
idempotent. Who shows nothing before the end is begun anew even later; else a failure after the
first token ends the request. An image that is none ends it at once, wherever it is found.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from services.common.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.gateway.clients.decoders import DecoderPod, DecoderPool, EmbeddingLost
from services.gateway.clients.encoders import EncoderDescription, EncoderPod, EncoderPool
from services.gateway.generation import Generation, Mailbox, PlacedImage, Sampling, TokenEvent
from services.gateway.images import Image
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompt import Prompt
from services.gateway.sampling import for_choice
from services.gateway.stages import Stages

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
_SOURCES_GRACE_S = 0.05
# Prompts that begin with as many equal tokens go to the same decoder.
_AFFINITY_TOKENS = 256


@dataclass(slots=True)
class Work:
    """A valid request, ready for the services.

    Attributes:
        deadline: on the monotonic clock.
        wait_for_sources: the response tells `encode_sources`, so give late encode calls a moment.
        encode_sources: per image, once known; see proto/encoder.proto.
    """

    request_id: str
    prompt: Prompt
    images: Sequence[Image]
    sampling: Sampling
    num_choices: int
    cache_salt: bytes
    deadline: float
    stages: Stages
    wait_for_sources: bool = False
    encode_sources: list[str | None] = field(default_factory=list[str | None])

    def remaining_s(self) -> float:
        """Time left; at least a moment, so that it can be used as a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)


class _Setback(Exception):
    """A failure that another pod may not have."""

    def __init__(self, error: TriptychError, service: str, address: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.service = service
        self.address = address


class Attempts:
    """One request's tries. Iterate `events` to its end or close it; `stop` ends single choices."""

    def __init__(
        self,
        work: Work,
        encoders: EncoderPool,
        decoders: DecoderPool,
        metrics: GatewayMetrics,
        encode_timeout_s: float,
    ) -> None:
        self._work = work
        self._encoders = encoders
        self._decoders = decoders
        self._metrics = metrics
        self._encode_timeout_s = encode_timeout_s
        self._mailbox: Mailbox[TokenEvent | _Setback | InvalidRequest] = Mailbox()
        self._decoder: DecoderPod | None = None
        self._sequences: dict[int, int] = {}  # open choice -> sequence id
        self._encodes: list[asyncio.Task[None]] = []
        self._encoded: dict[bytes, str] = {}  # key -> address of the encoder that has it
        self._keys: list[bytes] = []  # of each image
        self._excluded: dict[str, set[str]] = {"encoder": set(), "decoder": set()}
        self._cause: TriptychError | None = None  # of the last setback
        self._forgiven = False

    async def events(
        self, forget: Callable[[], None] | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Batches of events, each choice's in order, until all choices have ended or stopped.

        Args:
            forget: called where all events so far are void, because the answer begins anew; None:
                they have been shown to the client, so that it cannot.

        Raises:
            TriptychError: the request's end; before the first batch the client has seen nothing.
        """
        for _ in range(MAX_ATTEMPTS):
            started = False
            try:
                await self._start()
                while self._sequences:
                    good, failure = self._sort(await self._mailbox.take(), started)
                    if good:
                        started = True
                        yield good
                    if failure is not None:
                        raise failure
                if self._encodes and self._work.wait_for_sources:
                    await asyncio.wait(self._encodes, timeout=_SOURCES_GRACE_S)
                return
            except _Setback as setback:
                if started:
                    if forget is None:
                        raise setback.error from None
                    forget()
                self._note(setback)
            finally:
                self._cancel()
        raise self._none_left()

    def stop(self, choice: int) -> None:
        """Ends one choice; no more events of it come."""
        sequence_id = self._sequences.pop(choice, None)
        if sequence_id is not None and self._decoder is not None:
            self._decoder.cancel(sequence_id)

    async def _start(self) -> None:
        """Calls the encoders and, in the same instant, submits all choices."""
        placed, calls = await self._place_images()
        try:
            decoder = self._decoders.choose(self._affinity(placed), self._excluded["decoder"])
        except Unavailable:
            raise self._none_left() from None
        self._decoder = decoder
        self._mailbox = Mailbox()
        self._encodes = [
            asyncio.create_task(self._encode(key, pod, index))
            for key, (pod, index) in calls.items()
        ]
        # The images go first: the prompt will wait for them.
        await asyncio.sleep(0)
        work, prompt = self._work, self._work.prompt
        generation = Generation(
            work.request_id, prompt.token_ids, prompt.positions, prompt.position_delta,
            placed, work.sampling, work.cache_salt, work.remaining_s(),
        )  # fmt: skip
        for choice in range(work.num_choices):
            sampling = for_choice(work.sampling, choice)
            self._sequences[choice] = decoder.submit(
                replace(generation, sampling=sampling), choice, self._mailbox.put
            )

    async def _place_images(
        self,
    ) -> tuple[tuple[PlacedImage, ...], dict[bytes, tuple[EncoderPod, int]]]:
        """An encoder for each image, and the calls to make: at most one per distinct key."""
        work = self._work
        pods: dict[bytes, EncoderPod] = {}
        calls: dict[bytes, tuple[EncoderPod, int]] = {}
        placed: list[PlacedImage] = []
        self._keys = []
        description = self._encoders.description() if work.images else None
        for index, image in enumerate(work.images):
            if description is None:
                raise self._none_left()
            key = await image.key(description.key_prefix, work.cache_salt)
            if key not in pods:
                pods[key] = self._choose_encoder(description, key)
                if self._encoded.get(key) != pods[key].address:
                    calls[key] = (pods[key], index)
            offset, length = work.prompt.image_offsets[index], work.prompt.image_lengths[index]
            placed.append(PlacedImage(key, offset, length, pods[key].address))
            self._keys.append(key)
        return tuple(placed), calls

    def _choose_encoder(self, description: EncoderDescription, key: bytes) -> EncoderPod:
        try:
            return self._encoders.choose(description, key, self._excluded["encoder"])
        except Unavailable:
            if not isinstance(self._cause, EmbeddingLost) or self._forgiven:
                raise self._none_left() from None
        # The only encoder let an embedding go before the decoder had it: once more, from scratch.
        self._forgiven = True
        self._excluded["encoder"].clear()
        return self._choose_encoder(description, key)

    async def _encode(self, key: bytes, pod: EncoderPod, index: int) -> None:
        work, image = self._work, self._work.images[index]
        start = time.monotonic()
        try:
            done = await pod.encode(
                key, image.data, image.grid,
                request_id=work.request_id,
                timeout_s=min(self._encode_timeout_s, work.remaining_s()),
            )  # fmt: skip
            if done.num_tokens != work.prompt.image_lengths[index]:
                raise InternalError("an encoder returned an embedding of the wrong size")
        except InvalidRequest as error:
            error.param = image.param
            self._mailbox.put(error)
        except TriptychError as error:
            self._mailbox.put(_Setback(error, "encoder", pod.address))
        else:
            work.stages.record("encode", time.monotonic() - start)
            self._encoded[key] = pod.address
            self._metrics.encodes.labels(done.source).inc()
            for place, other in enumerate(self._keys):
                if other == key:
                    work.encode_sources[place] = done.source

    def _sort(
        self, items: list[TokenEvent | _Setback | InvalidRequest], started: bool
    ) -> tuple[list[TokenEvent], Exception | None]:
        """Events to hand out, and the failure that ends this attempt, if any."""
        good: list[TokenEvent] = []
        for item in items:
            if not isinstance(item, TokenEvent):
                if started or good:
                    continue  # the decoder had the embedding from elsewhere
                return good, item
            if item.choice not in self._sequences:
                continue
            if item.end is not None:
                del self._sequences[item.choice]
            if isinstance(item.end, TriptychError):
                return good, self._decoder_failure(item.end)
            good.append(item)
        return good, None

    def _decoder_failure(self, error: TriptychError) -> Exception:
        address = "" if self._decoder is None else self._decoder.address
        if isinstance(error, EmbeddingLost):
            self._forget(error.encoder_address)
            return _Setback(error, "encoder", error.encoder_address)
        if isinstance(error, Cancelled):  # not by us: we take no more events then
            error = Unavailable("the decoder gave the request up")
        return _Setback(error, "decoder", address) if error.retryable else error

    def _forget(self, address: str) -> None:
        """An encoder did not hand out what it said it had: ask anew."""
        self._encoded = {k: a for k, a in self._encoded.items() if address and a != address}

    def _note(self, setback: _Setback) -> None:
        self._cause = setback.error
        self._excluded[setback.service].add(setback.address)
        self._metrics.retries.labels(setback.service).inc()
        log.warning(
            "trying again without %s %s",
            setback.service,
            setback.address,
            extra={"fields": {"request_id": self._work.request_id, "error": str(setback.error)}},
        )

    def _none_left(self) -> TriptychError:
        if isinstance(self._cause, Overloaded):
            return Overloaded(self._cause.message, retry_after_s=self._cause.retry_after_s or 1)
        return Unavailable("no healthy service is left for this request", retry_after_s=1)

    def _affinity(self, placed: Sequence[PlacedImage]) -> bytes:
        if placed:
            return placed[0].key
        return blake3(self._work.prompt.token_ids[:_AFFINITY_TOKENS].tobytes()).digest()

    def _cancel(self) -> None:
        for choice in list(self._sequences):
            self.stop(choice)
        for task in self._encodes:
            task.cancel()
        self._encodes = []
