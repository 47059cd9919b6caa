"""The attempts of one request. If an attempt fails because of a pod, another attempt follows.

An attempt submits the request's choices to one decoder, as one sequence per choice, and calls
encoders for the images. When a pod fails, the next attempt chooses among the other pods. Encoding
an image twice does no harm. A new decoder continues the answer: the gateway sends the prompt and
the token ids that were generated so far. The client therefore sees one answer without a gap.
`Losses` counts the encoders and the decoders that died during the request, because the request may
have killed them, and ends the request after the second death of a kind. An unreadable image ends
the request at once.

`ChatService.answer` makes one `Attempts` for each request. This file knows nothing of HTTP or text.
"""

import logging
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Sequence

from blake3 import blake3

from services.common.errors import (
    Cancelled,
    InternalError,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.spans import Span, start_span
from services.gateway.clients.decoders import DecoderPod, DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.sent_prompts import PromptChain
from services.gateway.clients.token_event import EmbeddingLost, TokenEvent
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.completion import Completion
from services.gateway.request.encode_calls import OUTCOME_TIMEOUT_S, EncodeCalls
from services.gateway.request.losses import Losses, RetryableFailure
from services.gateway.request.mailbox import Mailbox, Message
from services.gateway.request.sampling import choice_seed
from services.gateway.request.token_sink import TokenSink

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
# How many times a request may move away from a decoder that drains.
MAX_MOVES = 2
# After the answer has ended, encode calls have this many seconds to report where embeddings came
# from, because a client with `include_stage_times` wants to know.
_SOURCES_GRACE_S = 0.05
# Largest size in bytes of the events that wait until the client reads them. This is enough for some
# 10,000 tokens without logprobs, or some hundreds with all logprobs.
MAX_WAITING_BYTES = 4 << 20
# The waiting bytes are charged to the request's memory in steps of this size.
_WAITING_STEP_BYTES = 64 << 10
# Two prompts without images go to the same decoder, all else being equal, if this many of their
# first tokens are equal.
_AFFINITY_TOKENS = 256


class Attempts:
    """All attempts to generate the answer of one request.

    The caller iterates `events` to its end, or closes it. `DecoderPod` calls `receive` for each
    event of a sequence. `receive` puts the event into the mailbox, from which `events` takes it.

    Args:
        request: request with its prompt, images and sampling parameters.
        encode_timeout_s: timeout in seconds of one encode call.
        outcome_timeout_s: longest time in seconds to wait until the encode calls to a lost encoder
            have ended.
        sink: object that may take tokens in the middle of a choice. None if `events` yields all
            tokens.
    """

    def __init__(
        self,
        request: Completion,
        encoders: EncoderPool,
        decoders: DecoderPool,
        metrics: GatewayMetrics,
        encode_timeout_s: float,
        outcome_timeout_s: float = OUTCOME_TIMEOUT_S,
        sink: TokenSink | None = None,
    ) -> None:
        self._request = request
        self._sink = sink
        self._has_tokens = False  # becomes True when the running attempt has yielded tokens
        self._decoders = decoders
        self._metrics = metrics
        self._mailbox = Mailbox(request.portion)
        self._counted_bytes = 0  # bytes of waiting events that the request's memory has counted
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
        # The decoder of the running attempt; its session, which is the name of its stream and
        # changes when it restarts; and the fingerprint of the checkpoint that it serves.
        self._decoder: DecoderPod | None = None
        self._session = ""
        self._fingerprint: bytes | None = None
        self._decoder_drains = False
        self._chain: PromptChain
        self._span = Span()
        # Sequence id of each choice that runs in the current attempt.
        self._sequences: dict[int, int] = {}
        # Token ids of each choice so far, and the number of tokens at which the choice ends.
        choices = range(request.chat.num_choices)
        self._generated = {choice: array("i") for choice in choices}
        self._max_tokens = dict.fromkeys(choices, request.sampling.max_tokens)
        self._unfinished = set(choices)
        self._extended: list[int] = []  # choices that `extend` was called for since `_submit`
        self._interrupted_at = 0.0  # when the answer's decoder failed; 0 if the answer goes on

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        """Yields batches of events, in order per choice, until all choices have ended or stopped.

        Raises:
            TriptychError: the request failed.
        """
        num_moves = 0
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                self._has_tokens = False
                if not self._unfinished:
                    return
                try:
                    self._mailbox.clear()  # drops messages of the attempt before
                    await self._submit(self._unfinished)
                    while self._sequences:
                        events, failure = self._read(await self._mailbox.take())
                        if events:
                            self._has_tokens = self._has_tokens or _have_tokens(events)
                            if self._interrupted_at:
                                self._record_handover()
                            yield events
                        if failure is not None:
                            try:
                                raise failure
                            finally:
                                # The failure's traceback refers to this frame. If the frame kept
                                # the failure, only the garbage collector would free the two.
                                del failure
                        # The caller may have called `extend` while it handled the batch.
                        if extended := self._unfinished.intersection(self._extended):
                            await self._submit(extended)
                        # The last attempt cannot move: no attempt would be left to continue.
                        may_move = num_moves < MAX_MOVES and attempt < MAX_ATTEMPTS
                        if self._decoder_drains and may_move and self._can_move():
                            num_moves += 1
                            # To move, the attempt ends as if the decoder had failed. `Losses` does
                            # not count the decoder as lost, because the error is no `ProcessLost`.
                            drains = Unavailable("the decoder drains")
                            raise RetryableFailure(drains, "decoder", self._session)
                    if self._request.chat.include_stage_times:
                        await self._encodes.finish(_SOURCES_GRACE_S)
                    return
                except RetryableFailure as failure:
                    if not self._unfinished:
                        return  # the caller has stopped all choices that had not ended
                    if self._has_tokens:
                        self._interrupted_at = time.monotonic()
                    await self._recover(failure)
            raise self._losses.no_pod_left()  # All attempts have failed.
        finally:
            self._cancel_sequences()
            self._encodes.close()

    def stop(self, choice: int) -> None:
        """Ends one choice, and cancels its sequence. `events` yields no more of its events."""
        self._unfinished.discard(choice)
        self._cancel_sequence(choice)

    def extend(self, choice: int, token_ids: Sequence[int], max_tokens: int) -> None:
        """Appends tokens to a choice, and lets the model continue the choice after them.
        `BoundedThinking` appends the tokens that close the reasoning.

        May be called before the first batch of events is asked for, and while the caller handles a
        batch in which the choice has ended with `length`.

        Args:
            token_ids: ids that are appended to the choice. May be empty.
            max_tokens: number of tokens at which the choice ends, counted from the start of the
                choice, with the appended tokens.
        """
        self._generated[choice].extend(token_ids)
        self._max_tokens[choice] = max_tokens
        self._unfinished.add(choice)
        self._extended.append(choice)

    def num_tokens(self, choice: int) -> int:
        """Returns the number of tokens of a choice so far."""
        return len(self._generated[choice])

    def receive(self, event: TokenEvent) -> None:
        """Passes the tokens of an event to the sink, or adds the event to the mailbox.

        If the client reads too slowly, events pile up in the mailbox. Above `MAX_WAITING_BYTES`, or
        if the gateway has no memory left for them, the request ends with `Overloaded`.
        """
        mailbox = self._mailbox
        if self._sink is not None and self._has_tokens and self._is_taken(event):
            return
        mailbox.put(event, event.num_bytes)
        if isinstance(event.error, ProcessLost):
            # The loss is counted now, because `events` may never read this event: if an encode call
            # fails first, the attempt ends and the mailbox is cleared.
            self._losses.add("decoder", self._session, event.error)
        if mailbox.num_bytes <= self._counted_bytes:
            return
        try:
            if mailbox.num_bytes > MAX_WAITING_BYTES:
                raise Overloaded("the answer is read too slowly")
            self._request.slot.memory.add(_WAITING_STEP_BYTES)
            self._counted_bytes += _WAITING_STEP_BYTES
        except Overloaded as error:
            # The error replaces the waiting events, so that their memory is free at once. The
            # sequences are cancelled, so that no more events arrive.
            mailbox.clear()
            mailbox.put(Overloaded(error.message, retry_after_s=1))
            for sequence_id in self._sequences.values():
                if self._decoder is not None:
                    self._decoder.cancel(sequence_id)

    def _is_taken(self, event: TokenEvent) -> bool:
        """Passes tokens to the sink if `events` waits for them and has nothing else to do with
        them. If the attempt may have to move to another decoder, all tokens are yielded.

        Returns:
            Whether the tokens were taken.
        """
        if self._decoder_drains or not (self._mailbox.is_awaited and event.is_bare):
            return False
        assert self._sink is not None
        try:
            if not self._sink.take(event.choice, event.token_ids):
                return False
        except Exception:
            # The client of the decoder calls this for all requests, so this request alone fails.
            log.exception("tokens could not be sent")
            self._mailbox.put(InternalError("internal error"))
        self._generated[event.choice].extend(event.token_ids)
        return True

    async def _submit(self, choices: Collection[int]) -> None:
        """Starts the encode calls that are missing, and submits choices to a decoder.

        Args:
            choices: choices to submit. When an attempt begins, these are all unfinished choices.
                While it runs, these are the choices for which `extend` was called.
        """
        self._extended.clear()
        request = self._request
        images = await self._encodes.assign()
        ids, coming = request.prompt.token_ids, self._encodes.coming
        self._chain = PromptChain(ids, images, request.cache_salt, request.adapter.digest, coming)
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
            # The logprobs of the prompt are the same for all choices, so only choice 0 requests
            # them, and only until its first token: the logprobs arrive before that token.
            if choice > 0 or generated:
                submit.sampling.ClearField("prompt_logprobs")
            self._sequences[choice] = decoder.submit(submit, choice, self, self._chain)
            request.was_submitted = True

    def _take_decoder(self) -> DecoderPod:
        """Returns the decoder that has sequences of the request, or else chooses a decoder.

        Raises:
            TriptychError: no decoder is left, or, if the answer has begun, no decoder that serves
                the same checkpoint.
        """
        decoder = self._decoder if self._sequences else None
        try:
            decoder = decoder or self._choose_decoder(self._losses.excluded["decoder"])
        except Unavailable:
            raise self._losses.no_pod_left() from None
        # All tokens of an answer have to come from the same checkpoint, which the fingerprint
        # identifies. During a roll-out, decoders may serve different checkpoints.
        fingerprint = decoder.description.fingerprint if decoder.description else b""
        has_ended = len(self._unfinished) < self._request.chat.num_choices
        has_begun = has_ended or any(self._generated.values())
        if has_begun and self._fingerprint not in (None, fingerprint):
            raise self._losses.no_pod_left()
        self._fingerprint = fingerprint
        self._decoder, self._session = decoder, decoder.session
        if not self._sequences:  # A newly chosen decoder has not reported that it drains.
            self._decoder_drains = False
        return decoder

    def _choose_decoder(self, exclude: Collection[str]) -> DecoderPod:
        request = self._request
        num_tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
        # If neither load nor cached prefixes decide, requests with the same affinity key go to the
        # same decoder. The affinity key is the image key of the first image or frame pair. Without
        # images, it is a digest of the first tokens.
        keys, start = self._encodes.keys, request.prompt.token_ids[:_AFFINITY_TOKENS]
        key = keys[0] if keys else blake3(start.tobytes()).digest()
        return self._decoders.choose(self._chain, key, exclude, num_tokens)

    def _submit_message(self, images: Sequence[pb.ImageRef]) -> pb.Submit:
        """Returns a message to the decoder with the fields that all choices have in common."""
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
            adapter=request.adapter.digest,
            prediction=request.prediction,
            tenant=request.slot.tenant.queue_name,
            tenant_weight=request.slot.tenant.weight,
            background=request.slot.tenant.is_background,
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

    def _read(self, messages: list[Message]) -> tuple[list[TokenEvent], Exception | None]:
        """Reads messages of the mailbox, up to the first failure that ends the attempt.

        Returns:
            The events to yield, and the failure that ends the attempt. The failure is None if the
            attempt goes on.
        """
        events: list[TokenEvent] = []
        for message in messages:
            if not isinstance(message, TokenEvent):
                # `Overloaded` means that the client reads too slowly: an overloaded pod would be a
                # `RetryableFailure`. `InternalError` is a fault of the sink. All other failures are
                # failed encode calls. They do not matter once the decoder has sent a token: it then
                # has the embeddings of all images, also of the image whose call failed, because it
                # found that embedding in its own memory or in Redis. Logprobs of a prompt prove
                # nothing: those of the tokens before a missing image come, too.
                if isinstance(message, Overloaded | InternalError) or not (
                    self._has_tokens or _have_tokens(events)
                ):
                    return events, message
                continue
            choice = message.choice
            if choice not in self._sequences:
                continue  # `stop` has ended the choice.
            if message.decoder_drains:
                self._decoder_drains = True
                # If the event has nothing but the news that the decoder drains, it is not yielded.
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
        """Returns the exception that the error of a sequence raises: a `RetryableFailure` if the
        request may succeed on another pod, and otherwise the error itself, which ends the request.
        """
        if isinstance(error, EmbeddingLost):
            return RetryableFailure(error, "encoder", error.encoder_address)
        # `DecoderPod` drops the events of sequences that this gateway has cancelled. An event that
        # gets here tells that the decoder has cancelled the sequence. Another decoder may answer
        # it.
        if isinstance(error, Cancelled):
            error = Unavailable("the decoder cancelled the request")
        if error.param is None:
            error.param = self._request.param_of(error)
        return RetryableFailure(error, "decoder", self._session) if error.retryable else error

    def _record_handover(self) -> None:
        """Records how long the answer was interrupted, until another decoder continued it."""
        self._metrics.handovers.inc()
        self._request.timings.record("handover", time.monotonic() - self._interrupted_at)
        self._interrupted_at = 0.0

    async def _recover(self, failure: RetryableFailure) -> None:
        """Ends a failed attempt. A decoder that has failed is excluded from the next attempts here,
        an encoder by the call that it has failed.

        Raises:
            TriptychError: the request may not be tried again.
        """
        self._cancel_sequences()
        error = failure.error
        if failure.service == "decoder":
            self._losses.add("decoder", failure.pod, error)
        elif isinstance(error, EmbeddingLost):
            # A decoder could not get an embedding. If the encoder's call has ended with an error,
            # that error is the cause of the loss.
            await self._encodes.record_undelivered(error)
        elif isinstance(error, ProcessLost):
            # An encoder was lost, so all calls to it end soon. They are awaited, because one of
            # their images may have killed the encoder, and each call reports its image to `Losses`.
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


def _have_tokens(events: list[TokenEvent]) -> bool:
    return any(event.token_ids for event in events)
