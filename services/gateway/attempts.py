"""The failure contract between the gateway and the two services behind it.

When an encoder or a decoder fails, it is excluded and the request submitted again: encoding is
idempotent, and a decoder continues what another one has begun from the prompt and the token ids
generated so far. To the client the answer goes on. An unreadable image ends the request at once,
whichever service reports it. `ChatService.answer` runs one `Attempts` per request; it knows no HTTP
and no text.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from blake3 import blake3

from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlyImage,
    InternalError,
    InvalidGrammar,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.tracing import Span, start_span
from services.gateway.clients.decoders import DecoderPod, DecoderPool, EmbeddingLost, TokenEvent
from services.gateway.clients.encoders import (
    EncoderDescription,
    EncoderLost,
    EncoderPod,
    EncoderPool,
)
from services.gateway.media.images import Image
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.sampling import choice_seed
from services.gateway.tenancy.admission import uncounted
from services.gateway.tenancy.tenants import Tenant

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
# Decoders that a request may lose in mid-answer: one that loses more may be the cause. It may leave
# as many others that are about to go.
MAX_HANDOVERS = 2
_SOURCES_GRACE_S = 0.05
# Of an answer that waits for its client: some 10,000 tokens, or some hundreds with all logprobs.
# Counted in steps.
MAX_WAITING_BYTES, _WAITING_STEP_BYTES = 4 << 20, 64 << 10
# Prompts that begin with the same tokens, up to this many, go to the same decoder.
_AFFINITY_TOKENS = 256
Item = TypeVar("Item")


@dataclass(slots=True)
class PreparedRequest:
    """A valid request, ready for the services.

    Attributes:
        sampling: of the first choice.
        tenant: whose request it is.
        cache_salt: of the tenant and the request.
        deadline: on the monotonic clock.
        grammar: what the answer has to be; None: any text.
        grammar_param: the field that an error of the grammar names.
        priority: lower ones run first.
        hold: counts memory that the answer takes while it waits for the client; may refuse.
        wait_for_sources: the response has `encode_sources`, so wait briefly for late encode calls.
        encode_sources: per image, the `Source` of its EncodeResponse in lower case; None: unknown.
    """

    request_id: str
    prompt: Prompt
    images: Sequence[Image]
    sampling: pb.SamplingParams
    num_choices: int
    tenant: Tenant
    cache_salt: bytes
    deadline: float
    timings: Timings
    hold: Callable[[int], None] = uncounted
    grammar: pb.Grammar | None = None
    grammar_param: str | None = None
    priority: int = 0
    wait_for_sources: bool = False
    encode_sources: list[str | None] = field(default_factory=list[str | None])

    def remaining_s(self) -> float:
        """Time left; always positive, so that it can be a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)


class Mailbox(Generic[Item]):
    """Items from several producers for one consumer, which takes all items at hand.

    Attributes:
        num_bytes: of the items that wait.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self.num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item, num_bytes: int = 0) -> None:
        """Adds an item; never waits."""
        self._items.append(item)
        self.num_bytes += num_bytes
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Drops all items."""
        self._items = []
        self.num_bytes = 0

    async def take(self) -> list[Item]:
        """All items at hand, at least one. For one caller at a time."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._items
        self.clear()
        return items


class _RetryableFailure(Exception):
    """A failure that another pod may not have."""

    def __init__(self, error: TriptychError, service: str, pod: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.service = service
        self.pod = pod  # to be excluded


class _Leaving(_RetryableFailure):
    """Not a failure: the decoder drains, and the sequences may outlast it."""

    def __init__(self, session: str) -> None:
        super().__init__(Unavailable("the decoder is about to go"), "decoder", session)


class _TooSlow(Overloaded):
    """More of the answer waits for the client than there is room for."""


_Item = TokenEvent | _RetryableFailure | InvalidRequest | _TooSlow


class Attempts:
    """All attempts of one request. Iterate `events` to its end or close it."""

    def __init__(
        self,
        request: PreparedRequest,
        encoders: EncoderPool,
        decoders: DecoderPool,
        metrics: GatewayMetrics,
        encode_timeout_s: float,
    ) -> None:
        self._request = request
        self._encoders = encoders
        self._decoders = decoders
        self._metrics = metrics
        self._encode_timeout_s = encode_timeout_s
        self._mailbox: Mailbox[_Item] = Mailbox()
        self._counted_bytes = 0  # of what waits or has waited
        self._decoder: DecoderPod | None = None
        self._session = ""  # of the decoder
        self._fingerprint = b""  # of what it serves
        self._sequences: dict[int, int] = {}  # of this attempt: running choice -> sequence id
        # Of the choices that have not ended: the token ids so far.
        self._generated = {choice: array("i") for choice in range(request.num_choices)}
        self._lost_at = 0.0  # when a decoder was lost in mid-answer; 0: the answer goes on
        self._decoder_leaves = False
        self._span = Span()  # of the running attempt's sequences
        self._encodes: list[asyncio.Task[None]] = []
        self._encoded: dict[bytes, str] = {}  # image key -> address of the encoder that has it
        self._keys: list[bytes] = []  # of each image
        # Encoders by address, decoders by session: one that has restarted may be the only one.
        self._excluded: dict[str, set[str]] = {"encoder": set(), "decoder": set()}
        self._cause: TriptychError | None = None  # of the last failed attempt
        self._has_readmitted_encoders = False

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        """Batches of events, in order per choice, until all choices have ended or stopped.

        Raises:
            TriptychError: the request failed.
        """
        num_lost = num_left = 0
        for _ in range(MAX_ATTEMPTS):
            started = False  # in this attempt
            try:
                await self._start()
                while self._sequences:
                    good, failure = self._sort(await self._mailbox.take(), started)
                    if good:
                        started = True
                        if self._lost_at:
                            self._record_handover()
                        yield good
                    if failure is not None:
                        raise failure
                    if self._decoder_leaves and num_left < MAX_HANDOVERS and self._should_leave():
                        raise _Leaving(self._session)
                if self._encodes and self._request.wait_for_sources:
                    await asyncio.wait(self._encodes, timeout=_SOURCES_GRACE_S)
                return
            except _RetryableFailure as failure:
                if not self._generated:
                    return  # the last choices were stopped by the caller
                if started:
                    num_left += isinstance(failure, _Leaving)
                    num_lost += not isinstance(failure, _Leaving)
                    if num_lost > MAX_HANDOVERS:
                        raise failure.error from None
                    self._lost_at = time.monotonic()
                self._exclude(failure)
            finally:
                self._cancel()
        raise self._no_pod_left()

    def stop(self, choice: int) -> None:
        """Cancels one choice; no more events of it follow."""
        self._generated.pop(choice, None)
        self._cancel_sequence(choice)

    def _cancel_sequence(self, choice: int) -> None:
        sequence_id = self._sequences.pop(choice, None)
        if sequence_id is not None and self._decoder is not None:
            self._decoder.cancel(sequence_id)

    async def _start(self) -> None:
        """Starts the encode calls and submits all choices that run, at the same time."""
        await self._decoders.reconnected()
        if self._request.images:
            await self._encoders.reconnected()
        refs, calls = await self._assign_encoders()
        self._mailbox = Mailbox()
        self._encodes = [
            asyncio.create_task(self._encode(key, pod, index))
            for key, (pod, index) in calls.items()
        ]
        if self._encodes:  # they go out first: the prompt waits for the images
            await asyncio.sleep(0)
        try:
            decoder = self._choose_decoder(self._excluded["decoder"])
        except Unavailable:
            raise self._no_pod_left() from None
        # What has begun with one checkpoint is not continued with another.
        fingerprint = decoder.description.fingerprint if decoder.description else b""
        if any(self._generated.values()) and fingerprint != self._fingerprint:
            raise self._no_pod_left()
        self._fingerprint = fingerprint
        self._decoder, self._session = decoder, decoder.session
        self._decoder_leaves = False
        self._span = start_span(
            "decode stream",
            decoder=decoder.address,
            num_choices=len(self._generated),
            num_generated=sum(map(len, self._generated.values())),
        )
        request, prompt = self._request, self._request.prompt
        positions = b""
        if prompt.positions is not None:
            positions = prompt.positions.astype("<i4", copy=False).tobytes()
        submit = pb.Submit(
            request_id=request.request_id,
            prompt_token_ids=prompt.token_ids.astype("<i4", copy=False).tobytes(),
            positions=positions,
            position_delta=prompt.position_delta,
            images=refs,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            tenant=request.tenant.name,
            tenant_weight=request.tenant.limits.weight,
            timeout_s=request.remaining_s(),
            traceparent=self._span.traceparent,
            grammar=request.grammar,
            priority=request.priority,
        )
        for choice, generated in self._generated.items():
            submit.sampling.seed = choice_seed(request.sampling.seed, choice)
            submit.generated_token_ids = generated.tobytes()
            if choice > 0 or generated:  # the prompt's logprobs come once, before the first token
                submit.sampling.ClearField("prompt_logprobs")
            self._sequences[choice] = decoder.submit(submit, choice, self._deliver)

    def _choose_decoder(self, exclude: Collection[str]) -> DecoderPod:
        request = self._request
        num_tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
        return self._decoders.choose(self._affinity_key(), exclude, num_tokens)

    def _should_leave(self) -> bool:
        """Whether another decoder can go on with the answer."""
        if not self._sequences:
            return False
        try:
            other = self._choose_decoder(self._excluded["decoder"] | {self._session})
        except Unavailable:
            return False
        found = other.description
        return found is not None and found.fingerprint == self._fingerprint

    async def _assign_encoders(
        self,
    ) -> tuple[list[pb.ImageRef], dict[bytes, tuple[EncoderPod, int]]]:
        """Assigns an encoder to each image.

        Returns:
            A reference per image, and the encode calls to make: at most one per distinct key.
        """
        request, prompt = self._request, self._request.prompt
        pods: dict[bytes, EncoderPod] = {}
        calls: dict[bytes, tuple[EncoderPod, int]] = {}
        refs: list[pb.ImageRef] = []
        self._keys = []
        description = self._encoders.description() if request.images else None
        for index, image in enumerate(request.images):
            if description is None:
                raise self._no_pod_left()
            key = await image.key(description.key_prefix, request.cache_salt)
            if key not in pods:
                pods[key] = self._choose_encoder(description, key)
                if self._encoded.get(key) != pods[key].address:
                    calls[key] = (pods[key], index)
            refs.append(
                pb.ImageRef(
                    image_key=key,
                    offset=prompt.image_offsets[index],
                    num_tokens=prompt.image_lengths[index],
                    encoder_address=pods[key].address,
                )
            )
            self._keys.append(key)
        return refs, calls

    def _choose_encoder(self, description: EncoderDescription, key: bytes) -> EncoderPod:
        try:
            return self._encoders.choose(description, key, self._excluded["encoder"])
        except Unavailable:
            if not isinstance(self._cause, EmbeddingLost) or self._has_readmitted_encoders:
                raise self._no_pod_left() from None
        # The only encoder evicted an embedding before the decoder fetched it: try it once more.
        self._has_readmitted_encoders = True
        self._excluded["encoder"].clear()
        return self._choose_encoder(description, key)

    async def _encode(self, key: bytes, pod: EncoderPod, index: int) -> None:
        request, image = self._request, self._request.images[index]
        num_tokens = request.prompt.image_lengths[index]
        timeout_s = min(self._encode_timeout_s, request.remaining_s())
        attributes = {"encoder": pod.address, "patches": math.prod(image.grid)}
        suspects = self._encoders.suspects
        try:
            async with suspects.turn(key) as alone:
                try:
                    with request.timings.measure("encode", span_name="encode call", **attributes):
                        done = await pod.encode(
                            key, image.data, image.grid, salt=request.cache_salt,
                            timeout_s=timeout_s, share=request.tenant.share,
                        )  # fmt: skip
                except DeadlyImage:
                    raise suspects.condemn(key) from None
                except EncoderLost:
                    suspects.suspect(key)
                    if alone and await pod.has_ended():
                        raise suspects.condemn(key) from None
                    raise
                except DeadlineExceeded:
                    if timeout_s < self._encode_timeout_s:
                        raise  # the request's own deadline
                    if alone:
                        raise suspects.condemn(key) from None
                    suspects.suspect(key)
                    raise
                suspects.clear(key)
            if done.num_tokens != num_tokens:
                raise InternalError("an encoder returned an embedding of the wrong size")
        except InvalidRequest as error:
            error.param = image.param
            self._mailbox.put(error.without_frames())
        except TriptychError as error:
            failure = _RetryableFailure(error.without_frames(), "encoder", pod.address)
            self._mailbox.put(failure)
        else:
            self._encoded[key] = pod.address
            self._metrics.encodes.labels(done.source).inc()
            for other_index, other in enumerate(self._keys):
                if other == key:
                    request.encode_sources[other_index] = done.source

    def _deliver(self, event: TokenEvent) -> None:
        """Called for each event of a sequence. A client that does not read ends its request."""
        mailbox = self._mailbox
        mailbox.put(event, event.num_bytes)
        if mailbox.num_bytes <= self._counted_bytes:
            return
        try:
            if mailbox.num_bytes > MAX_WAITING_BYTES:
                raise Overloaded("the answer is read too slowly")
            self._request.hold(_WAITING_STEP_BYTES)
            self._counted_bytes += _WAITING_STEP_BYTES
        except Overloaded as error:
            mailbox.clear()
            mailbox.put(_TooSlow(error.message, retry_after_s=1))
            for sequence_id in self._sequences.values():
                if self._decoder is not None:
                    self._decoder.cancel(sequence_id)

    def _sort(self, items: list[_Item], started: bool) -> tuple[list[TokenEvent], Exception | None]:
        """The events to pass on, and the failure that ends this attempt, if any."""
        good: list[TokenEvent] = []
        for item in items:
            if not isinstance(item, TokenEvent):
                if isinstance(item, _TooSlow):
                    return good, item
                if started or good:
                    continue  # the decoder got the embedding elsewhere
                return good, item
            if item.choice not in self._sequences:
                continue
            if item.leaving:
                self._decoder_leaves = True
                if not (item.token_ids or item.is_last or item.prompt_logprobs):
                    continue
            if item.error is not None:
                del self._sequences[item.choice]
                return good, self._decoder_failure(item.error)
            if item.finish_reason is not None:
                del self._sequences[item.choice], self._generated[item.choice]
            else:
                self._generated[item.choice].extend(item.token_ids)
            good.append(item)
        return good, None

    def _decoder_failure(self, error: TriptychError) -> Exception:
        if isinstance(error, EmbeddingLost):
            # That encoder must be called again for all its images.
            lost = error.encoder_address
            self._encoded = {k: a for k, a in self._encoded.items() if lost and a != lost}
            return _RetryableFailure(error, "encoder", lost)
        if isinstance(error, Cancelled):  # not by this gateway, which ignores events then
            error = Unavailable("the decoder cancelled the request")
        if isinstance(error, InvalidGrammar):
            error.param = self._request.grammar_param
        return _RetryableFailure(error, "decoder", self._session) if error.retryable else error

    def _record_handover(self) -> None:
        """Records how long the client has waited for another decoder."""
        self._metrics.handovers.inc()
        self._request.timings.record("handover", time.monotonic() - self._lost_at)
        self._lost_at = 0.0

    def _exclude(self, failure: _RetryableFailure) -> None:
        self._cause = failure.error
        self._excluded[failure.service].add(failure.pod)
        self._metrics.retries.labels(failure.service).inc()
        log.warning(
            "retrying without %s %s: %s", failure.service, failure.pod, failure.error.message
        )

    def _no_pod_left(self) -> TriptychError:
        if isinstance(self._cause, Overloaded):
            return Overloaded(self._cause.message, retry_after_s=self._cause.retry_after_s or 1)
        return Unavailable("no healthy service is left for this request", retry_after_s=1)

    def _affinity_key(self) -> bytes:
        """Equal for requests that probably share a cached prefix."""
        if self._keys:
            return self._keys[0]
        return blake3(self._request.prompt.token_ids[:_AFFINITY_TOKENS].tobytes()).digest()

    def _cancel(self) -> None:
        for choice in list(self._sequences):
            self._cancel_sequence(choice)
        for task in self._encodes:
            task.cancel()
        self._encodes = []
        self._span.end()
        self._span = Span()
