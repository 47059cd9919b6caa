"""The decoder's front: sequences of all gateways on their way into the engine and out of it.

It mints the engine's ids, has the images brought, keeps deadlines, and sees to it that each
sequence that was submitted ends in exactly one event, whatever breaks.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.channel import ChannelClosed
from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.decoder.embedding_fetch import EncoderFailed
from services.decoder.embedding_source import EmbeddingSource
from services.decoder.engine.messages import (
    AbortSequence,
    AddSequence,
    EndOfSequence,
    EngineInfo,
    EngineMessage,
    SequenceEvent,
    StartOfSequence,
    StepDone,
)
from services.decoder.metrics import DecoderMetrics
from services.decoder.outbox import Outbox
from services.decoder.sequence_images import Outgoing, SequenceImages
from services.decoder.submission import ImageRequest, read_submit

log = logging.getLogger(__name__)

# Sequences accepted beyond those that can run at once, as a multiple of these.
QUEUE_FACTOR = 3
_REASONS = {"stop": pb.Finished.REASON_STOP, "length": pb.Finished.REASON_LENGTH}


class Channel(Outgoing, Protocol):
    """The engine, as `FrontChannel` speaks to it."""

    async def receive(self) -> EngineMessage:
        """The next message; raises ChannelClosed."""
        ...


@dataclass(slots=True, eq=False)
class Stream:
    """One gateway: what waits for it, and its sequences that have not been reported as ended."""

    outbox: Outbox = field(default_factory=Outbox)
    live: "dict[int, _Live]" = field(default_factory=dict[int, "_Live"])
    half_closed: bool = False


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence, from its submission to the engine's last word on it."""

    number: int  # the engine's
    sequence_id: int  # the gateway's
    stream: Stream
    request_id: str
    deadline: asyncio.TimerHandle | None = None
    reported: bool = False


class DecoderFront:
    """Owner of all sequences in the front process. Made and used in one event loop.

    Args:
        engine: what the engine said when it was ready.
        channel: the way to it.
        source: brings embeddings.
        metrics: records.
    """

    def __init__(
        self,
        engine: EngineInfo,
        channel: Channel,
        source: EmbeddingSource,
        metrics: DecoderMetrics,
    ) -> None:
        self.engine = engine
        self._channel = channel
        self._images = SequenceImages(source, channel, self._no_image)
        self._metrics = metrics
        self._max_live = (1 + QUEUE_FACTOR) * engine.max_num_sequences
        self._numbers = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._streams: set[Stream] = set()
        self._refusal = ""
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.kv_blocks.set(engine.num_blocks)
        metrics.kv_free.set(engine.num_blocks)
        metrics.cache_bytes.set_function(lambda: source.arena.used_bytes)

    # Streams.

    def open_stream(self) -> Stream:
        """A gateway has come."""
        stream = Stream()
        self._streams.add(stream)
        return stream

    def half_close(self, stream: Stream) -> None:
        """The gateway will submit no more; the stream ends with its last sequence."""
        stream.half_closed = True
        if not stream.live:
            stream.outbox.close()

    def close_stream(self, stream: Stream) -> None:
        """The gateway is gone: its sequences end, and nobody is told."""
        self._streams.discard(stream)
        for live in list(stream.live.values()):
            self._fail(live, Cancelled("the gateway is gone"))
        stream.outbox.close()

    def submit(self, stream: Stream, submit: pb.Submit) -> None:
        """Starts a sequence. Whatever is wrong with it is an event, never an exception."""
        live = _Live(
            number=next(self._numbers),
            sequence_id=submit.sequence_id,
            stream=stream,
            request_id=submit.request_id[:256],
        )
        # An id in use: which of the two an event means, nobody could tell. Both end, in one event.
        if (namesake := stream.live.pop(submit.sequence_id, None)) is not None:
            self._let_go(namesake)
        stream.live[live.sequence_id] = live
        try:
            if namesake is not None:
                raise InvalidRequest(f"sequence_id {submit.sequence_id} is in use")
            if self._refusal:
                raise Overloaded(self._refusal)
            if len(self._live) >= self._max_live:
                raise Overloaded(f"{len(self._live)} sequences run or wait here already")
            message, images = read_submit(submit, live.number, self.engine)
        except TriptychError as error:
            self._report(live, _failed(error), error.code)
        except Exception:
            log.exception("a submission failed", extra=_fields(live))
            self._report(live, _failed(InternalError("the submission failed")), "internal_error")
        else:
            self._start(live, message, images, submit.timeout_s)
        stream.outbox.flush()

    def cancel(self, stream: Stream, sequence_id: int) -> None:
        """Ends a sequence; one that has ended already is no error."""
        if (live := stream.live.get(sequence_id)) is not None:
            self._fail(live, Cancelled("cancelled by the gateway"))

    # Life of the process.

    async def run(self) -> None:
        """Hands the engine's events to the gateways.

        Raises:
            ChannelClosed: the engine is gone; all sequences have failed.
        """
        try:
            while True:
                message = await self._channel.receive()
                if isinstance(message, StepDone):
                    self._dispatch(message)
        except ChannelClosed:
            self.refuse("the engine is gone")
            self._fail_all(Unavailable("the decoder's engine is gone"))
            for live in list(self._live.values()):
                self._forget(live)
            raise

    def refuse(self, reason: str) -> None:
        """Submissions fail as overloaded from now on."""
        self._refusal = reason

    async def drain(self, grace_s: float) -> None:
        """Refuses new sequences, waits for the running ones, fails those that take too long, and
        ends all streams once their last events are taken.
        """
        self.refuse("the decoder is shutting down")
        try:
            await asyncio.wait_for(self._empty.wait(), grace_s)
        except TimeoutError:
            self._fail_all(Unavailable("the decoder is shutting down"))
        for stream in self._streams:
            stream.outbox.close()

    async def close(self) -> None:
        """Ends the background work."""
        await self._images.close()

    # Events.

    def _dispatch(self, done: StepDone) -> None:
        num_generated = 0
        touched: set[Stream] = set()
        for event in done.events:
            live = self._live.get(event.sequence_id)
            if live is None:
                continue
            num_generated += len(event.token_ids)
            if not live.reported:
                touched.add(live.stream)
                if event.token_ids:
                    outbox = live.stream.outbox
                    outbox.add_tokens(live.sequence_id, event.token_ids, event.logprobs)
                    if event.start is not None:
                        outbox.add_start(live.sequence_id, self._started(live, event.start))
            if event.end is not None:
                self._ended(live, event, event.end)
        for images in done.images_read:
            self._images.were_read(images)
        for images in done.images_wanted:
            self._images.are_wanted(images)
        self._metrics.engine_step(done.stats, num_generated)
        for stream in touched:
            if stream.outbox.is_full:
                self._give_up(stream)
            stream.outbox.flush()

    def _ended(self, live: _Live, event: SequenceEvent, end: EndOfSequence) -> None:
        if not live.reported:
            if end.reason in _REASONS:
                finished = pb.Finished(
                    reason=_REASONS[end.reason], num_preemptions=end.num_preemptions
                )
                self._report(live, finished, end.reason)
            else:
                # An abort of ours has been reported already, so this one is the engine's failure.
                error = InternalError(end.message or "the engine gave the sequence up")
                log.error("a sequence failed: %s", end.message, extra=_fields(live))
                self._report(live, _failed(error), error.code)
        self._forget(live)

    def _started(self, live: _Live, start: StartOfSequence) -> pb.Started:
        """Records and tells how the sequence came to its first token."""
        metrics, prefill_s = self._metrics, start.first_token_s - start.first_scheduled_s
        metrics.queue.observe(start.first_scheduled_s)
        metrics.ttft.observe(start.first_token_s)
        metrics.prefill.observe(prefill_s)
        transfer_s = self._images.transfer_s(live.number)
        if transfer_s:
            metrics.transfer.observe(transfer_s)
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
        self._let_go(live)

    def _fail_all(self, error: TriptychError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)

    def _give_up(self, stream: Stream) -> None:
        log.warning("a gateway reads too slowly: its %d sequences end", len(stream.live))
        stream.outbox.discard_tokens()
        for live in list(stream.live.values()):
            self._fail(live, Cancelled("the gateway reads too slowly"))

    def _report(self, live: _Live, end: pb.Finished | pb.Failed, outcome: str) -> None:
        """Puts the last event of a sequence into its stream."""
        live.reported = True
        stream = live.stream
        if stream.live.get(live.sequence_id) is live:
            del stream.live[live.sequence_id]
        stream.outbox.add_end(live.sequence_id, end)
        self._metrics.outcomes.labels(outcome).inc()
        if stream.half_closed and not stream.live:
            stream.outbox.close()

    def _let_go(self, live: _Live) -> None:
        """Ends a sequence that is reported on: its fetches now, its engine work by a message. Its
        images stay until the engine has answered, because a step in flight may read them.
        """
        live.reported = True
        if live.deadline is not None:
            live.deadline.cancel()
        self._images.stop_bringing(live.number)
        if live.number in self._live:
            self._channel.send(AbortSequence(live.number))

    def _forget(self, live: _Live) -> None:
        """The engine has ended the sequence."""
        if live.deadline is not None:
            live.deadline.cancel()
        del self._live[live.number]
        self._images.forget(live.number)
        if not self._live:
            self._empty.set()

    def _start(
        self, live: _Live, message: AddSequence, images: list[ImageRequest], timeout_s: float
    ) -> None:
        self._live[live.number] = live
        self._empty.clear()
        self._images.add(message, images)
        if timeout_s:
            live.deadline = asyncio.get_running_loop().call_later(
                timeout_s, self._fail, live, DeadlineExceeded("the time is over")
            )

    def _no_image(self, number: int, error: TriptychError) -> None:
        if (live := self._live.get(number)) is not None:
            log.warning("an image is not to be had: %s", error, extra=_fields(live))
            self._fail(live, error)


def _failed(error: TriptychError) -> pb.Failed:
    address = error.encoder_address if isinstance(error, EncoderFailed) else ""
    return pb.Failed(code=error.code, message=error.message, encoder_address=address)


def _fields(live: _Live) -> dict[str, Any]:
    return {"fields": {"request_id": live.request_id, "sequence_id": live.sequence_id}}


__all__ = ["DecoderFront", "Stream"]
