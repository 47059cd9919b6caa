"""The decoder's front: sequences of all gateways on their way into the engine and out of it.

It assigns the engine's ids, obtains images, enforces deadlines, and ends each submitted sequence in
exactly one event, whatever breaks.
"""

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InternalError,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.spans import Span, record_span, start_span
from services.common.telemetry import bound_request_id
from services.common.transport.rpc import MAX_REQUEST_ID_CHARS
from services.decoder.engine.messages import (
    AbortSequence,
    AddSequence,
    EndOfSequence,
    EngineInfo,
    EngineMessage,
    EngineStats,
    KernelCalls,
    ResetPrefixCache,
    StartOfSequence,
    StepDone,
)
from services.decoder.front.departure import Departure
from services.decoder.front.outbox import Outbox
from services.decoder.front.submission import INT_BYTES, Demands, ReadDemands, read_submit
from services.decoder.images.embedding_fetch import EncoderFailed
from services.decoder.images.embeddings import EmbeddingSource, ImageRequest, SequenceImages
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

# Sequences accepted beyond those that can run at once, as a multiple of these.
QUEUE_FACTOR = 3
# A CPU runs fewer at once by default, and accepts as many as a GPU.
_LEAST_ROWS_ON_CPU = 256
_REASONS = {"stop": pb.Finished.REASON_STOP, "length": pb.Finished.REASON_LENGTH}


class Room(Protocol):
    """`TenantRoom`, as far as it is used here: how many sequences there are, of which tenants."""

    def has_room(self, tenant: str, amount: int) -> bool: ...

    def take(self, tenant: str, amount: int) -> None: ...

    def give_back(self, tenant: str, amount: int) -> None: ...


class Masks(Protocol):
    """The part of `masks.processes.MaskProcesses` that the front uses."""

    @property
    def read_demands(self) -> ReadDemands: ...

    def add(self, number: int, demands: Demands, generated: list[int], tenant: str) -> None: ...

    def tokens_arrived(self, tokens: Iterable[tuple[int, list[int]]]) -> None: ...

    def remove(self, number: int) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Stream:
    """One gateway's stream: its outbox, and its sequences without a last event so far."""

    outbox: Outbox = field(default_factory=Outbox)
    live: "dict[int, _Live]" = field(default_factory=dict[int, "_Live"])
    half_closed: bool = False


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence, from its submission to the engine's last event of it.

    Attributes:
        number: the engine's id of it.
        sequence_id: the gateway's, unique within the stream.
        submitted_at: as `time.time()`.
        first_token_at: as `time.time()`; 0: no token yet.
        num_generated, max_generated: tokens of this decoder, so far and at most.
        reported: its last event is in the outbox.
    """

    number: int
    sequence_id: int
    stream: Stream
    request_id: str
    span: Span
    submitted_at: float
    first_token_at: float = 0.0
    num_generated: int = 0
    max_generated: int = 0
    deadline: asyncio.TimerHandle | None = None
    reported: bool = False
    tenant: str = ""


class DecoderFront:
    """Owner of all sequences in the front process. Made and used in one event loop.

    Args:
        engine: the engine's ready message.
        masks: makes the owner of token masks, closed with the front, given what it calls with a
            sequence's number when it cannot go on.
        room: for as many sequences as `max_live` says.
    """

    def __init__(
        self,
        engine: EngineInfo,
        channel: FrontChannel[EngineMessage],
        source: EmbeddingSource,
        masks: Callable[[Callable[[int, TriptychError], None]], Masks],
        metrics: DecoderMetrics,
        room: Room,
    ) -> None:
        self.engine = engine
        self._channel = channel
        self._images = SequenceImages(source, channel, self._input_failed)
        self._metrics = metrics
        self._room = room
        self._masks = masks(self._input_failed)
        self._numbers = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._streams: set[Stream] = set()
        self._refusal = ""  # why submissions fail as overloaded from now on
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.num_rows = engine.max_num_sequences
        metrics.engine_step(EngineStats(0, 0, engine.num_blocks, engine.num_blocks, 0, 0, 0, 0), 0)
        metrics.cache_bytes.set_function(lambda: source.arena.used_bytes)

    def stats(self) -> EngineStats | None:
        return self._metrics.stats()

    # Streams.

    def open_stream(self) -> Stream:
        stream = Stream()
        self._streams.add(stream)
        return stream

    def half_close(self, stream: Stream) -> None:
        """The gateway will submit no more; the stream ends with its last sequence."""
        stream.half_closed = True
        if not stream.live:
            stream.outbox.close()

    def close_stream(self, stream: Stream) -> None:
        """The gateway has disconnected: its sequences are cancelled."""
        self._streams.discard(stream)
        for live in list(stream.live.values()):
            self._fail(live, Cancelled("the gateway has disconnected"))
        stream.outbox.close()

    def submit(self, stream: Stream, submit: pb.Submit) -> None:
        """Starts a sequence. Whatever is wrong with it is an event, never an exception."""
        request_id = submit.request_id[:MAX_REQUEST_ID_CHARS]
        span = start_span("sequence", submit.traceparent, request_id=request_id)
        with bound_request_id(request_id), span.as_current():
            live = _Live(
                next(self._numbers), submit.sequence_id, stream, request_id, span, time.time()
            )
            self._submit(live, submit)
        stream.outbox.flush()

    def _submit(self, live: _Live, submit: pb.Submit) -> None:
        stream = live.stream
        # An id in use: events could not be told apart. Both sequences end, in one event.
        if (namesake := stream.live.pop(submit.sequence_id, None)) is not None:
            self._abort(namesake)
            namesake.span.end()
        stream.live[live.sequence_id] = live
        try:
            if namesake is not None:
                raise InvalidRequest(f"sequence_id {submit.sequence_id} is in use")
            if self._refusal:
                raise Overloaded(self._refusal)
            if not self._room.has_room(submit.tenant, 1):
                raise Overloaded(f"{len(self._live)} sequences run or wait here already")
            message, images, demands = read_submit(
                submit, live.number, self.engine, self._masks.read_demands
            )
        except TriptychError as error:
            self._report(live, _failed(error), error.code)
        except Exception:
            log.exception("a submission failed")
            self._report(live, _failed(InternalError("the submission failed")), "internal_error")
        else:
            self._start(live, message, images, submit.timeout_s)
            if demands is not None:
                generated = array("i", message.generated_token_ids).tolist()
                self._masks.add(live.number, demands, generated, submit.tenant)

    def cancel(self, stream: Stream, sequence_id: int) -> None:
        """Ends a sequence, unless it has ended already."""
        if (live := stream.live.get(sequence_id)) is not None:
            self._fail(live, Cancelled("cancelled by the gateway"))

    def reset_prefix_cache(self) -> None:
        """Sequences that are submitted from now on find nothing of others."""
        self._channel.send(ResetPrefixCache())

    # Life of the process.

    async def run(self) -> None:
        """Forwards the engine's events to the gateways.

        Raises:
            ChannelClosed: the engine process has ended; all sequences have failed.
        """
        try:
            while True:
                message = await self._channel.receive()
                match message:
                    case StepDone():
                        self._dispatch(message)
                    case KernelCalls():
                        self._metrics.kernel_calls = message.calls
                    case _:
                        pass
        except ChannelClosed:
            self._refusal = "the decoder's engine process has ended"
            self._fail_all(EngineLost("the decoder's engine process has ended"))
            for live in list(self._live.values()):
                self._remove(live)
            raise

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    async def drain(self, grace_s: float) -> None:
        """Refuses new sequences, waits for the running ones, offers those that may take longer than
        `grace_s` to other decoders, fails what is left then, and closes all streams behind their
        last events.
        """
        self._refusal = "the decoder is shutting down"
        departure = Departure(time.monotonic(), grace_s)
        while self._live and (now := time.monotonic()) < departure.ends_at:
            for number in departure.due(now, self._seconds_left()):
                self._offer(self._live[number])
            with suppress(TimeoutError):
                async with asyncio.timeout(min(departure.period_s, departure.ends_at - now)):
                    await self._empty.wait()
        self._fail_all(Unavailable("the decoder is shutting down"))
        for stream in self._streams:
            stream.outbox.close()

    def _seconds_left(self) -> dict[int, float]:
        """What each sequence may still take. One without a second token is taken to be as fast as
        the others are on average.
        """
        now = time.time()
        paces = {
            number: (now - live.first_token_at) / (live.num_generated - 1)
            for number, live in self._live.items()
            if live.num_generated > 1
        }
        mean = sum(paces.values()) / max(1, len(paces))
        return {
            number: (live.max_generated - live.num_generated) * paces.get(number, mean)
            for number, live in self._live.items()
        }

    def _offer(self, live: _Live) -> None:
        if not live.reported:
            log.info("a sequence may outlast this decoder", extra=_fields(live))
            live.stream.outbox.add_leaving(live.sequence_id)
            live.stream.outbox.flush()

    async def close(self) -> None:
        await self._images.close()
        await self._masks.close()

    # Events.

    def _dispatch(self, done: StepDone) -> None:
        self._masks.tokens_arrived(
            (event.sequence_id, event.token_ids)
            for event in done.events
            if event.token_ids and event.end is None
        )
        num_generated = 0
        touched: set[Stream] = set()
        for event in done.events:
            live = self._live.get(event.sequence_id)
            if live is None:
                continue
            token_ids = event.token_ids
            num_generated += len(token_ids)
            live.num_generated += len(token_ids)
            if not live.reported:
                stream = live.stream
                touched.add(stream)
                if len(token_ids) == 1 and not (
                    event.logprobs or event.end or event.start or event.prompt_logprobs
                ):
                    stream.outbox.add_token(live.sequence_id, token_ids[0])
                    continue
                if event.prompt_logprobs is not None:
                    stream.outbox.add_prompt_logprobs(live.sequence_id, event.prompt_logprobs)
                if token_ids:
                    stream.outbox.add_tokens(live.sequence_id, token_ids, event.logprobs)
                    if event.start is not None:
                        stream.outbox.add_start(live.sequence_id, self._started(live, event.start))
            if event.end is not None:
                self._ended(live, event.end)
        for images in done.images_read:
            self._images.release_read(images)
        for images in done.images_wanted:
            self._images.obtain_again(images)
        self._metrics.engine_step(done.stats, num_generated)
        for stream in touched:
            if stream.outbox.is_full:
                self._drop_slow_reader(stream)
            stream.outbox.flush()

    def _ended(self, live: _Live, end: EndOfSequence) -> None:
        if not live.reported:
            if end.reason in _REASONS:
                finished = pb.Finished(
                    reason=_REASONS[end.reason], num_preemptions=end.num_preemptions
                )
                self._report(live, finished, end.reason)
            elif end.reason == "refused":
                refusal = InvalidRequest(end.message)
                self._report(live, _failed(refusal), refusal.code)
            else:
                # The front's own aborts are reported already, so this is the engine's failure.
                error = InternalError(end.message or "the engine aborted the sequence")
                log.error("a sequence failed: %s", end.message, extra=_fields(live))
                self._report(live, _failed(error), error.code)
        self._remove(live)

    def _started(self, live: _Live, start: StartOfSequence) -> pb.Started:
        """Records the times up to the first token."""
        metrics, prefill_s = self._metrics, start.first_token_s - start.first_scheduled_s
        metrics.queue.observe(start.first_scheduled_s)
        metrics.ttft.observe(start.first_token_s)
        metrics.prefill.observe(prefill_s)
        transfer_s = self._images.transfer_s(live.number)
        if transfer_s:
            metrics.transfer.observe(transfer_s)
        live.first_token_at = live.submitted_at + start.first_token_s
        parent, submitted_at = live.span.traceparent, live.submitted_at
        if parent:
            record_span("queue", parent, submitted_at, start.first_scheduled_s)
            if transfer_s:
                record_span("transfer", parent, submitted_at, transfer_s)
            record_span("prefill", parent, submitted_at + start.first_scheduled_s, prefill_s)
        return pb.Started(
            num_cached_tokens=start.num_cached_tokens,
            queue_s=start.first_scheduled_s,
            transfer_s=transfer_s,
            prefill_s=prefill_s,
        )

    def _fail(self, live: _Live, error: TriptychError) -> None:
        """Reports a sequence as failed and has the engine end it."""
        if live.reported:
            return
        self._report(live, _failed(error), error.code)
        live.stream.outbox.flush()
        self._abort(live)

    def _fail_all(self, error: TriptychError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)

    def _drop_slow_reader(self, stream: Stream) -> None:
        log.warning("a gateway reads too slowly; aborting its %d sequences", len(stream.live))
        reason = Cancelled("the gateway reads too slowly")
        stream.outbox.discard_tokens(_failed(reason))
        for live in list(stream.live.values()):
            self._fail(live, reason)

    def _report(self, live: _Live, end: pb.Finished | pb.Failed, outcome: str) -> None:
        """Puts the last event of a sequence into its stream."""
        live.reported = True
        stream = live.stream
        if stream.live.get(live.sequence_id) is live:
            del stream.live[live.sequence_id]
        stream.outbox.add_end(live.sequence_id, end)
        self._metrics.outcomes.labels(outcome).inc()
        self._log_end(live, outcome)
        if stream.half_closed and not stream.live:
            stream.outbox.close()

    def _log_end(self, live: _Live, outcome: str) -> None:
        now = time.time()
        fields = _fields(live, outcome=outcome, tokens=live.num_generated)
        log.info("sequence ended", extra=fields)
        if live.first_token_at and live.span.traceparent:
            duration_s = now - live.first_token_at
            record_span("decode", live.span.traceparent, live.first_token_at, duration_s)
        live.span.set(outcome=outcome, num_tokens=live.num_generated)
        live.span.end(now)

    def _abort(self, live: _Live) -> None:
        """Cancels a sequence's fetches and has the engine end it. Its images stay until the engine
        has answered, because a step in flight may read them.
        """
        live.reported = True
        self._images.cancel_fetches(live.number)
        self._masks.remove(live.number)
        self._channel.send(AbortSequence(live.number))

    def _remove(self, live: _Live) -> None:
        """The engine has ended the sequence."""
        if live.deadline is not None:
            live.deadline.cancel()
        del self._live[live.number]
        self._room.give_back(live.tenant, 1)
        self._images.remove(live.number)
        self._masks.remove(live.number)
        if not self._live:
            self._empty.set()

    def _start(
        self, live: _Live, message: AddSequence, images: list[ImageRequest], timeout_s: float
    ) -> None:
        self._live[live.number] = live
        live.tenant = message.tenant
        self._room.take(live.tenant, 1)
        num_before = len(message.generated_token_ids) // INT_BYTES
        live.max_generated = message.sampling.max_tokens - num_before
        self._empty.clear()
        self._images.add(message, images)
        if timeout_s:
            live.deadline = asyncio.get_running_loop().call_later(
                timeout_s, self._fail, live, DeadlineExceeded("the request's time is over")
            )

    def _input_failed(self, number: int, error: TriptychError) -> None:
        """An image or a token mask cannot be obtained."""
        if (live := self._live.get(number)) is not None:
            level = logging.INFO if isinstance(error, InvalidRequest) else logging.WARNING
            log.log(level, "a sequence cannot go on: %s", error, extra=_fields(live))
            self._fail(live, error)


def max_live(engine: EngineInfo) -> int:
    """Sequences that the front accepts at once."""
    rows = engine.max_num_sequences
    if not engine.on_gpu:
        rows = max(rows, _LEAST_ROWS_ON_CPU)
    return (1 + QUEUE_FACTOR) * rows


def _failed(error: TriptychError) -> pb.Failed:
    address = error.encoder_address if isinstance(error, EncoderFailed) else ""
    return pb.Failed(code=error.code, message=error.message, encoder_address=address)


def _fields(live: _Live, **others: object) -> dict[str, Any]:
    ids = {"request_id": live.request_id, "sequence_id": live.sequence_id}
    return {"fields": {**others, **ids}}
