"""The failure contract between the gateway and the two services behind it.

When an encoder or a decoder fails, the gateway excludes it and submits the request again. Encoding
is idempotent, and a decoder continues an answer that another decoder has begun: it gets the prompt
and the token ids generated so far. The client sees one answer without a gap. `Losses` counts the
processes that died with the request, and ends a request that kills processes. An unreadable image
ends the request at once, whichever service reports it.

`ChatService.answer` runs one `Attempts` per request. This file knows no HTTP and no text.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Sequence

from blake3 import blake3

from services.common.errors import (
    Cancelled,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.spans import Span, start_span
from services.gateway.clients.decoders import DecoderPod, DecoderPool, EmbeddingLost, TokenEvent
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.sent_prompts import PromptChain
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.completion import Completion
from services.gateway.request.encode_calls import OUTCOME_TIMEOUT_S, EncodeCalls
from services.gateway.request.losses import Losses, RetryableFailure
from services.gateway.request.mailbox import Mailbox, Message
from services.gateway.request.sampling import choice_seed

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
# Most times that a request moves away from a decoder that drains.
MAX_MOVES = 2
# Time that encode calls get to report where an embedding came from, after the answer has ended.
_SOURCES_GRACE_S = 0.05
# Most bytes of an answer that may wait until its client reads them: some 10,000 tokens, or some
# hundreds of tokens with all logprobs. The request's memory counts them in steps of the second
# number.
MAX_WAITING_BYTES, _WAITING_STEP_BYTES = 4 << 20, 64 << 10
# Prompts without images prefer the same decoder if their first tokens, this many, are equal.
_AFFINITY_TOKENS = 256


class Attempts:
    """All attempts to generate the answer of one request.

    Iterate `events` to its end, or close it. `DecoderPod` calls `receive` with each event of a
    sequence; `events` takes the events from the mailbox.

    Args:
        request: request with its prompt, images and sampling parameters.
        encode_timeout_s: timeout in seconds of one encode call.
        outcome_timeout_s: longest time in seconds to wait until the encode calls to a lost encoder
            have ended.
    """

    def __init__(
        self,
        request: Completion,
        encoders: EncoderPool,
        decoders: DecoderPool,
        metrics: GatewayMetrics,
        encode_timeout_s: float,
        outcome_timeout_s: float = OUTCOME_TIMEOUT_S,
    ) -> None:
        self._request = request
        self._decoders = decoders
        self._metrics = metrics
        self._mailbox = Mailbox()
        self._counted_bytes = 0  # bytes that the request's memory counts for waiting events
        self._losses = Losses()
        self._encodes = EncodeCalls(
            request,
            encoders,
            self._losses,
            self._mailbox,
            metrics,
            encode_timeout_s,
            outcome_timeout_s,
        )
        # The running attempt's decoder, the name of its session, and the fingerprint of the
        # checkpoint that it serves.
        self._decoder: DecoderPod | None = None
        self._session = ""
        self._fingerprint: bytes | None = None
        self._decoder_drains = False
        self._chain: PromptChain
        self._span = Span()
        # The running attempt's sequences: choice -> sequence id.
        self._sequences: dict[int, int] = {}
        # Token ids of each choice so far, and the number of tokens at which the choice ends.
        choices = range(request.chat.num_choices)
        self._generated = {choice: array("i") for choice in choices}
        self._max_tokens = dict.fromkeys(choices, request.sampling.max_tokens)
        self._unfinished = set(choices)
        self._extended: list[int] = []  # choices that `extend` has added since the last submit
        self._lost_at = 0.0  # when a decoder was lost in mid-answer; 0 while the answer goes on

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        """Yields batches of events, in order per choice, until all choices have ended or stopped.

        Raises:
            TriptychError: the request failed.
        """
        num_moves = 0
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                has_started = False  # this attempt has yielded events
                if not self._unfinished:
                    return
                try:
                    self._mailbox.clear()  # messages of the attempt before
                    await self._submit(self._unfinished)
                    while self._sequences:
                        # The messages are kept in no local variable. A failure among them, which is
                        # raised below, refers to this frame through its traceback. If the frame
                        # also referred to the messages, only the garbage collector could free them.
                        events, failure = self._read(await self._mailbox.take(), has_started)
                        if events:
                            has_started = True
                            if self._lost_at:
                                self._record_handover()
                            yield events
                        if failure is not None:
                            raise failure
                        # The caller may have called `extend` while it handled the batch.
                        if extended := self._unfinished.intersection(self._extended):
                            await self._submit(extended)
                        # The last attempt stays where it is: a move would need one attempt more.
                        may_move = num_moves < MAX_MOVES and attempt < MAX_ATTEMPTS
                        if self._decoder_drains and may_move and self._can_move():
                            num_moves += 1
                            # A move is an attempt that ends early, as if the decoder had failed. It
                            # does not count as a loss, because the error is no `ProcessLost`.
                            drains = Unavailable("the decoder drains")
                            raise RetryableFailure(drains, "decoder", self._session)
                    if self._request.chat.include_stage_times:
                        await self._encodes.finish(_SOURCES_GRACE_S)
                    return
                except RetryableFailure as failure:
                    if not self._unfinished:
                        return  # the caller has stopped the last choices
                    if has_started:
                        self._lost_at = time.monotonic()
                    await self._recover(failure)
            raise self._losses.no_pod_left()  # All attempts have failed.
        finally:
            self._cancel_sequences()
            self._encodes.close()

    def stop(self, choice: int) -> None:
        """Cancels one choice. No more events of the choice follow."""
        self._unfinished.discard(choice)
        self._cancel_sequence(choice)

    def extend(self, choice: int, token_ids: Sequence[int], max_tokens: int) -> None:
        """Continues a choice after appending token ids to it, as if the model had generated them.

        Call it before the first batch, or between two batches for a choice that has ended with
        `length`.

        Args:
            token_ids: ids that are appended to the choice. May be empty.
            max_tokens: number of tokens at which the choice ends. All tokens from the start of the
                choice count, also the appended tokens.
        """
        self._generated[choice].extend(token_ids)
        self._max_tokens[choice] = max_tokens
        self._unfinished.add(choice)
        self._extended.append(choice)

    def num_tokens(self, choice: int) -> int:
        """Returns the number of tokens of a choice so far."""
        return len(self._generated[choice])

    def receive(self, event: TokenEvent) -> None:
        """Adds an event of a sequence to the mailbox.

        If the client reads the answer too slowly, so that too many events wait, the request ends
        with `Overloaded`.
        """
        mailbox = self._mailbox
        mailbox.put(event, event.num_bytes)
        if isinstance(event.error, ProcessLost):
            # The loss is counted here and not when the event is read, because a failed encode call
            # may end the attempt before.
            self._losses.add("decoder", self._session, event.error)
        if mailbox.num_bytes <= self._counted_bytes:
            return
        try:
            if mailbox.num_bytes > MAX_WAITING_BYTES:
                raise Overloaded("the answer is read too slowly")
            self._request.slot.memory.add(_WAITING_STEP_BYTES)
            self._counted_bytes += _WAITING_STEP_BYTES
        except Overloaded as error:
            # The waiting events are dropped, so that their memory is free at once. The error takes
            # their place, and no more events can arrive from the cancelled sequences.
            mailbox.clear()
            mailbox.put(Overloaded(error.message, retry_after_s=1))
            for sequence_id in self._sequences.values():
                if self._decoder is not None:
                    self._decoder.cancel(sequence_id)

    async def _submit(self, choices: Collection[int]) -> None:
        """Starts the missing encode calls and submits choices to a decoder at the same time.

        Args:
            choices: all unfinished choices at the start of an attempt, or choices that join the
                attempt's running sequences.
        """
        self._extended.clear()
        request = self._request
        images = await self._encodes.assign()
        self._chain = PromptChain(request.prompt.token_ids, images, request.cache_salt)
        if images:  # Lets the encode calls be sent first, because the decoder waits for the images.
            await asyncio.sleep(0)
        decoder = self._take_decoder()
        self._span.end()
        self._span = start_span(
            "decode stream",
            decoder=decoder.address,
            num_choices=len(self._unfinished),
            num_generated=sum(len(self._generated[choice]) for choice in self._unfinished),
        )
        submit = self._submit_message(images)
        for choice in sorted(choices):
            if choice not in self._unfinished:
                continue  # The caller stopped the choice while encoders were assigned.
            generated, max_tokens = self._generated[choice], self._max_tokens[choice]
            submit.sampling.max_tokens = max_tokens
            submit.sampling.min_tokens = min(request.sampling.min_tokens, max_tokens)
            submit.sampling.seed = choice_seed(request.sampling.seed, choice)
            submit.generated_token_ids = generated.tobytes()
            # The prompt's logprobs arrive once for all choices, before the first token of choice 0.
            if choice > 0 or generated:
                submit.sampling.ClearField("prompt_logprobs")
            self._sequences[choice] = decoder.submit(submit, choice, self, self._chain)

    def _take_decoder(self) -> DecoderPod:
        """Returns the decoder of the running sequences, or else chooses a decoder for an attempt.

        Raises:
            TriptychError: no decoder is left that serves the checkpoint of the answer so far.
        """
        decoder = self._decoder if self._sequences else None
        try:
            decoder = decoder or self._choose_decoder(self._losses.excluded["decoder"])
        except Unavailable:
            raise self._losses.no_pod_left() from None
        # All tokens of an answer come from one checkpoint. Once the answer has begun, only a
        # decoder with the same fingerprint may continue it.
        fingerprint = decoder.description.fingerprint if decoder.description else b""
        has_ended = len(self._unfinished) < self._request.chat.num_choices
        has_begun = has_ended or any(self._generated.values())
        if has_begun and self._fingerprint not in (None, fingerprint):
            raise self._losses.no_pod_left()
        self._fingerprint = fingerprint
        self._decoder, self._session = decoder, decoder.session
        # Draining is forgotten with the last sequence: a newly chosen decoder reports it anew.
        self._decoder_drains = self._decoder_drains and bool(self._sequences)
        return decoder

    def _choose_decoder(self, exclude: Collection[str]) -> DecoderPod:
        request = self._request
        num_tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
        # Requests with the same key go to the same decoder unless load or cached prompts decide.
        # The key is that of the first image or frame pair, or else a digest of the first tokens.
        keys, start = self._encodes.keys, request.prompt.token_ids[:_AFFINITY_TOKENS]
        key = keys[0] if keys else blake3(start.tobytes()).digest()
        return self._decoders.choose(self._chain, key, exclude, num_tokens)

    def _submit_message(self, images: Sequence[pb.ImageRef]) -> pb.Submit:
        """Returns the message to the decoder, without the fields that differ between choices."""
        request, prompt = self._request, self._request.prompt
        positions = b""
        if prompt.positions is not None:
            positions = prompt.positions.astype("<i4", copy=False).tobytes()
        return pb.Submit(
            request_id=request.request_id,
            prompt_token_ids=prompt.token_ids.astype("<i4", copy=False).tobytes(),
            positions=positions,
            position_delta=prompt.position_delta,
            images=images,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            tenant=request.slot.tenant.name,
            tenant_weight=request.slot.tenant.weight,
            timeout_s=request.remaining_s(),
            traceparent=self._span.traceparent,
            grammar=request.answer_format.grammar,
            priority=request.chat.priority or 0,
        )

    def _can_move(self) -> bool:
        """Returns whether another decoder can continue the answer."""
        if not self._sequences:
            return False
        try:
            other = self._choose_decoder({*self._losses.excluded["decoder"], self._session})
        except Unavailable:
            return False
        found = other.description
        return found is not None and found.fingerprint == self._fingerprint

    def _read(
        self, messages: list[Message], has_started: bool
    ) -> tuple[list[TokenEvent], Exception | None]:
        """Reads messages up to the first failure that ends the attempt, and updates the choices.

        Args:
            has_started: True if the attempt has yielded events before.

        Returns:
            The events for the caller, and the failure that ends the attempt, or None.
        """
        events: list[TokenEvent] = []
        for message in messages:
            if not isinstance(message, TokenEvent):
                # `Overloaded` ends the request because its client reads too slowly. A failed encode
                # call ends the attempt only if no token has arrived.
                if isinstance(message, Overloaded) or not (has_started or events):
                    return events, message
                # Otherwise the decoder has all embeddings, and got this one from its own memory or
                # from Redis.
                continue
            choice = message.choice
            if choice not in self._sequences:
                continue  # The choice has been stopped.
            if message.decoder_drains:
                self._decoder_drains = True
                # An event that only reports the draining is not for the caller.
                if not (message.token_ids or message.is_last or message.prompt_logprobs):
                    continue
            if message.error is not None:
                del self._sequences[choice]
                return events, self._decoder_failure(message.error)
            self._generated[choice].extend(message.token_ids)
            if message.finish_reason is not None:
                del self._sequences[choice]
                self._unfinished.discard(choice)
            events.append(message)
        return events, None

    def _decoder_failure(self, error: TriptychError) -> Exception:
        """Returns the exception for the error of a sequence: a `RetryableFailure` if another pod
        may succeed, and otherwise the error itself.
        """
        if isinstance(error, EmbeddingLost):
            return RetryableFailure(error, "encoder", error.encoder_address)
        # This gateway did not cancel the sequence: `DecoderPod` passes on no event after `cancel`.
        if isinstance(error, Cancelled):
            error = Unavailable("the decoder cancelled the request")
        if error.param is None:
            error.param = self._request.param_of(error)
        return RetryableFailure(error, "decoder", self._session) if error.retryable else error

    def _record_handover(self) -> None:
        """Records how long the client has waited for another decoder."""
        self._metrics.handovers.inc()
        self._request.timings.record("handover", time.monotonic() - self._lost_at)
        self._lost_at = 0.0

    async def _recover(self, failure: RetryableFailure) -> None:
        """Ends a failed attempt and excludes the pod from the next attempt.

        Raises:
            TriptychError: the request may not be tried again.
        """
        self._cancel_sequences()
        error = failure.error
        if failure.service == "decoder":
            self._losses.add("decoder", failure.pod, error)
        elif isinstance(error, EmbeddingLost):
            # A decoder could not get an embedding. The encode calls tell why, if they have failed.
            await self._encodes.record_undelivered(error)
        elif isinstance(error, ProcessLost):
            # The failed encode call has counted the loss. The other calls to that encoder may name
            # further images on which it worked.
            await self._encodes.await_outcomes(failure.pod)
        log.warning("%s %s failed: %s", failure.service, failure.pod, error.message)
        self._losses.check()
        self._metrics.retries.labels(failure.service).inc()

    def _cancel_sequence(self, choice: int) -> None:
        sequence_id = self._sequences.pop(choice, None)
        if sequence_id is not None and self._decoder is not None:
            self._decoder.cancel(sequence_id)

    def _cancel_sequences(self) -> None:
        for choice in list(self._sequences):
            self._cancel_sequence(choice)
        self._span.end()
        self._span = Span()
