"""The failure contract between the gateway and the two services behind it.

When an encoder or a decoder fails, it is excluded and the request submitted again: encoding is
idempotent, and a decoder continues what another one has begun from the prompt and the token ids
generated so far. To the client the answer goes on. What a process died of is not tried for ever:
`losses` counts. An unreadable image ends the request at once, whichever service reports it.
`ChatService.answer` runs one `Attempts` per request; it knows no HTTP and no text.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Collection

from blake3 import blake3
from msgspec import structs

from services.common.errors import (
    Cancelled,
    InvalidGrammar,
    InvalidRequest,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.spans import Span, start_span
from services.gateway.answers.thinking_budget import ThinkingBudget
from services.gateway.clients.decoders import DecoderPod, DecoderPool, EmbeddingLost, TokenEvent
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.sent_prompts import PromptChain
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.completion import Completion
from services.gateway.request.encode_calls import EncodeCalls
from services.gateway.request.losses import Losses, RetryableFailure
from services.gateway.request.mailbox import Mailbox
from services.gateway.request.sampling import choice_seed

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
# Decoders that are about to go and that a request may leave.
MAX_MOVES = 2
_SOURCES_GRACE_S = 0.05
# Of an answer that waits for its client: some 10,000 tokens, or some hundreds with all logprobs.
# Counted in steps.
MAX_WAITING_BYTES, _WAITING_STEP_BYTES = 4 << 20, 64 << 10
# Prompts without images that begin with the same tokens, up to this many, have one first decoder.
_AFFINITY_TOKENS = 256


# Overloaded: more of the answer waits for the client than there is room for.
_Item = TokenEvent | RetryableFailure | InvalidRequest | Overloaded


class Attempts:
    """All attempts of one request. Iterate `events` to its end or close it."""

    def __init__(
        self,
        request: Completion,
        encoders: EncoderPool,
        decoders: DecoderPool,
        metrics: GatewayMetrics,
        encode_timeout_s: float,
        thinking_budget: ThinkingBudget | None = None,
    ) -> None:
        self._request = request
        self._decoders = decoders
        self._metrics = metrics
        self._mailbox: Mailbox[_Item] = Mailbox()
        self._losses = Losses()
        self._encodes = EncodeCalls(
            request, encoders, self._losses, self._mailbox.put, metrics, encode_timeout_s
        )
        self._counted_bytes = 0  # of what waits or has waited
        self._decoder: DecoderPod | None = None
        self._session = ""  # of the decoder
        self._fingerprint: bytes | None = None  # of what it serves
        self._chain: PromptChain  # of this attempt
        self._sequences: dict[int, int] = {}  # of this attempt: running choice -> sequence id
        # Of the choices that have not ended: the token ids so far.
        self._generated = {choice: array("i") for choice in range(request.chat.num_choices)}
        # Choices that run up to the budget of their reasoning -> the number of tokens at which they
        # pause, and the choices that have come to it.
        self._budget = budget = thinking_budget
        self._pauses: dict[int, int] = {}
        if budget is not None and budget.num_tokens < request.sampling.max_tokens:
            self._pauses = dict.fromkeys(self._generated, budget.num_tokens)
        self._at_budget = list(self._pauses) if budget and not budget.num_tokens else []
        self._lost_at = 0.0  # when a decoder was lost in mid-answer; 0: the answer goes on
        self._decoder_leaves = False
        self._span = Span()  # of the running attempt's sequences

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        """Batches of events, in order per choice, until all choices have ended or stopped.

        Raises:
            TriptychError: the request failed.
        """
        num_moves = 0
        try:
            if closing := self._close_thoughts():
                yield closing
            for attempt in range(1, MAX_ATTEMPTS + 1):
                started = False  # in this attempt
                if not self._generated:
                    return
                try:
                    await self._start()
                    while self._sequences:
                        good, failure = self._sort(await self._mailbox.take(), started)
                        if good:
                            started = True
                            if self._lost_at:
                                self._record_handover()
                            yield good
                        resumed = self._at_budget
                        if resumed and (closing := self._close_thoughts()):
                            yield closing
                        if failure is not None:
                            raise failure
                        if resumed and (resumed := [c for c in resumed if c in self._generated]):
                            await self._start(resumed)
                        may_move = num_moves < MAX_MOVES and attempt < MAX_ATTEMPTS
                        if self._decoder_leaves and may_move and self._should_leave():
                            num_moves += 1
                            leaving = Unavailable("the decoder is about to go")
                            raise RetryableFailure(leaving, "decoder", self._session)
                    if self._request.chat.include_stage_times:
                        await self._encodes.finish(_SOURCES_GRACE_S)
                    return
                except RetryableFailure as failure:
                    if not self._generated:
                        return  # the last choices were stopped by the caller
                    if started:
                        self._lost_at = time.monotonic()
                    await self._recover(failure)
            raise self._losses.no_pod_left()
        finally:
            self._cancel_sequences()
            self._encodes.close()

    def stop(self, choice: int) -> None:
        """Cancels one choice; no more events of it follow."""
        self._generated.pop(choice, None)
        self._cancel_sequence(choice)

    def _cancel_sequence(self, choice: int) -> None:
        sequence_id = self._sequences.pop(choice, None)
        if sequence_id is not None and self._decoder is not None:
            self._decoder.cancel(sequence_id)

    def _close_thoughts(self) -> list[TokenEvent]:
        """What closes the reasoning of choices that have come to its budget; they may go on."""
        events: list[TokenEvent] = []
        budget, max_tokens = self._budget, self._request.sampling.max_tokens
        at_budget, self._at_budget = self._at_budget, []
        for choice in at_budget:
            del self._pauses[choice]
            if budget is None or choice not in self._generated:  # the caller has stopped it
                continue
            generated = self._generated[choice]
            if more := budget.more_tokens(choice, len(generated)):
                if len(generated) + more < max_tokens:
                    self._pauses[choice] = len(generated) + more
                continue
            ids = budget.ids_behind(choice)[: max_tokens - len(generated)]
            generated.extend(ids)
            is_full = len(generated) == max_tokens
            if is_full:
                del self._generated[choice]
            if ids:
                events.append(TokenEvent(choice, ids, finish_reason="length" if is_full else None))
        return events

    async def _start(self, resumed: Collection[int] | None = None) -> None:
        """Starts the encode calls and submits choices at the same time.

        Args:
            resumed: these, beside others that run; None: all of a new attempt.
        """
        if resumed is None:
            self._mailbox.clear()  # of the attempt before
        request, prompt = self._request, self._request.prompt
        refs = await self._encodes.assign()
        self._chain = PromptChain(prompt.token_ids, refs, request.cache_salt)
        if refs:  # the encode calls go out first: the prompt waits for the images
            await asyncio.sleep(0)
        decoder = self._decoder if self._sequences else None
        try:
            decoder = decoder or self._choose_decoder(self._losses.excluded["decoder"])
        except Unavailable:
            raise self._losses.no_pod_left() from None
        # What has begun with one checkpoint is not continued with another, nor by other choices.
        fingerprint = decoder.description.fingerprint if decoder.description else b""
        has_begun = any(self._generated.values()) or len(self._generated) < request.chat.num_choices
        if has_begun and self._fingerprint not in (None, fingerprint):
            raise self._losses.no_pod_left()
        self._fingerprint = fingerprint
        self._decoder, self._session = decoder, decoder.session
        self._decoder_leaves = self._decoder_leaves and bool(self._sequences)
        self._span.end()
        self._span = start_span(
            "decode stream",
            decoder=decoder.address,
            num_choices=len(self._generated),
            num_generated=sum(map(len, self._generated.values())),
        )
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
            tenant=request.slot.tenant.name,
            tenant_weight=request.slot.tenant.weight,
            timeout_s=request.remaining_s(),
            traceparent=self._span.traceparent,
            grammar=request.answer_format.grammar,
            priority=request.chat.priority or 0,
        )
        for choice, generated in self._generated.items():
            if resumed is not None and choice not in resumed:
                continue
            self._set_length(submit.sampling, choice)
            submit.sampling.seed = choice_seed(request.sampling.seed, choice)
            submit.generated_token_ids = generated.tobytes()
            if choice > 0 or generated:  # the prompt's logprobs come once, before the first token
                submit.sampling.ClearField("prompt_logprobs")
            self._sequences[choice] = decoder.submit(submit, choice, self._deliver, self._chain)

    def _set_length(self, sampling: pb.SamplingParams, choice: int) -> None:
        """Up to the choice's pause, or as the request says."""
        wanted = self._request.sampling
        most = self._pauses.get(choice, wanted.max_tokens)
        sampling.max_tokens, sampling.min_tokens = most, min(wanted.min_tokens, most)

    def _choose_decoder(self, exclude: Collection[str]) -> DecoderPod:
        request = self._request
        num_tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
        # Equal for requests that should go to the same decoder, if all else is equal.
        keys, start = self._encodes.keys, request.prompt.token_ids[:_AFFINITY_TOKENS]
        key = keys[0] if keys else blake3(start.tobytes()).digest()
        return self._decoders.choose(self._chain, key, exclude, num_tokens)

    def _should_leave(self) -> bool:
        """Whether another decoder can go on with the answer."""
        if not self._sequences:
            return False
        try:
            other = self._choose_decoder({*self._losses.excluded["decoder"], self._session})
        except Unavailable:
            return False
        found = other.description
        return found is not None and found.fingerprint == self._fingerprint

    def _deliver(self, event: TokenEvent) -> None:
        """Called for each event of a sequence. A client that does not read ends its request."""
        mailbox = self._mailbox
        mailbox.put(event, event.num_bytes)
        if isinstance(event.error, ProcessLost):  # at once: an encode failure may end the attempt
            self._losses.add("decoder", self._session, event.error)
        if mailbox.num_bytes <= self._counted_bytes:
            return
        try:
            if mailbox.num_bytes > MAX_WAITING_BYTES:
                raise Overloaded("the answer is read too slowly")
            self._request.slot.hold(_WAITING_STEP_BYTES)
            self._counted_bytes += _WAITING_STEP_BYTES
        except Overloaded as error:
            mailbox.clear()
            mailbox.put(Overloaded(error.message, retry_after_s=1))
            for sequence_id in self._sequences.values():
                if self._decoder is not None:
                    self._decoder.cancel(sequence_id)

    def _sort(self, items: list[_Item], started: bool) -> tuple[list[TokenEvent], Exception | None]:
        """The events to pass on, and the failure that ends this attempt, if any."""
        good: list[TokenEvent] = []
        for item in items:
            if not isinstance(item, TokenEvent):
                if isinstance(item, Overloaded) or not (started or good):
                    return good, item
                continue  # the decoder got the embedding elsewhere
            if item.choice not in self._sequences:
                continue
            if item.leaving:
                self._decoder_leaves = True
                if not (item.token_ids or item.is_last or item.prompt_logprobs):
                    continue
            if item.error is not None:
                del self._sequences[item.choice]
                return good, self._decoder_failure(item.error)
            if item.finish_reason == "length" and item.choice in self._pauses:
                item = structs.replace(item, finish_reason=None)
                del self._sequences[item.choice]
                self._at_budget.append(item.choice)
            if item.finish_reason is not None:
                del self._sequences[item.choice], self._generated[item.choice]
            else:
                self._generated[item.choice].extend(item.token_ids)
            good.append(item)
        return good, None

    def _decoder_failure(self, error: TriptychError) -> Exception:
        if isinstance(error, EmbeddingLost):
            return RetryableFailure(error, "encoder", error.encoder_address)
        if isinstance(error, Cancelled):  # not by this gateway, which ignores events then
            error = Unavailable("the decoder cancelled the request")
        if isinstance(error, InvalidGrammar):
            error.param = self._request.answer_format.grammar_param
        return RetryableFailure(error, "decoder", self._session) if error.retryable else error

    def _record_handover(self) -> None:
        """Records how long the client has waited for another decoder."""
        self._metrics.handovers.inc()
        self._request.timings.record("handover", time.monotonic() - self._lost_at)
        self._lost_at = 0.0

    async def _recover(self, failure: RetryableFailure) -> None:
        """Ends an attempt, so that the next one avoids the pod; raises if there may be none."""
        self._cancel_sequences()
        error = failure.error
        if failure.service == "decoder":
            self._losses.add("decoder", failure.pod, error)
        elif isinstance(error, EmbeddingLost):
            await self._encodes.not_delivered(error)
        elif isinstance(error, ProcessLost):
            await self._encodes.hear(failure.pod)
        log.warning("%s %s failed: %s", failure.service, failure.pod, error.message)
        self._losses.check()
        self._metrics.retries.labels(failure.service).inc()

    def _cancel_sequences(self) -> None:
        for choice in list(self._sequences):
            self._cancel_sequence(choice)
        self._span.end()
        self._span = Span()
