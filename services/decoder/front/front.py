"""The decoder's front: it passes sequences of all gateways to the engine, and their tokens back.

The front also obtains the images of the sequences, and enforces their deadlines. When a sequence
ends, the front puts the final event, with a finish reason or an error, into the outbox of the
sequence's gateway; the sequence is then *reported*. The device may still be reading the sequence's
images, so the front keeps them, and the sequence, until the engine has ended the sequence, too. A
gateway gets exactly one final event for each sequence id, whichever part of the decoder fails.
"""

import asyncio
import itertools
import logging
import time
from array import array
from contextlib import suppress
from typing import Any

from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InternalError,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
    from_code,
)
from services.common.pb import decoder_pb2 as pb
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.spans import record_span, start_span
from services.common.telemetry import bound_request_id
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.common.transport.rpc import MAX_REQUEST_ID_CHARS
from services.decoder.engine.messages import (
    AbortSequence,
    AdapterLoaded,
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
from services.decoder.front.adapter_table import AdapterTable
from services.decoder.front.drain import Drain
from services.decoder.front.outbox import Outbox, usual_queued_bytes
from services.decoder.front.stream import FrontSequence, Stream
from services.decoder.front.submission import read_submit
from services.decoder.front.token_ids import INT_BYTES
from services.decoder.images.embedding_fetch import EncoderFailed
from services.decoder.images.embedding_source import EmbeddingSource, ImageRequest
from services.decoder.images.sequence_images import SequenceImages
from services.decoder.input_listener import InputListener
from services.decoder.masks.processes import MaskProcesses
from services.decoder.metrics import DecoderMetrics

log = logging.getLogger(__name__)

_REASONS = {"stop": pb.Finished.REASON_STOP, "length": pb.Finished.REASON_LENGTH}


class DecoderFront(InputListener):
    """Owner of all sequences in the front process. It is created and used in one event loop.

    Args:
        engine: description of the engine, which the engine sends when it is ready.
        channel: connection to the engine.
        source: source of the images' embeddings. The front closes it.
        masks: processes that compute token masks. The front starts and closes them.
        metrics: metrics of the decoder.
        capacity: counter of the sequences of each tenant. It limits their total number, and allows
            a single tenant at most three quarters of that number.
        adapters: adapters of the engine. Defaults to none.
        max_queued_bytes: estimated size of a stream's unread events above which its sequences are
            aborted, because the gateway reads too slowly. The default depends on the model's task.

    Attributes:
        images: images of the sequences.
        adapters: adapters of the engine.
    """

    def __init__(
        self,
        engine: EngineInfo,
        channel: FrontChannel[EngineMessage],
        source: EmbeddingSource,
        masks: MaskProcesses,
        metrics: DecoderMetrics,
        capacity: TenantCapacity,
        adapters: AdapterTable | None = None,
        *,
        max_queued_bytes: int | None = None,
    ) -> None:
        self.engine = engine
        self._channel = channel
        self.images = SequenceImages(source, channel, self)
        self._metrics = metrics
        self._capacity = capacity
        self._max_queued_bytes = max_queued_bytes or usual_queued_bytes(engine.task)
        self._masks = masks
        self.adapters = adapters or AdapterTable({}, 0, channel)
        self._numbers = itertools.count(1)
        self._sequences: dict[int, FrontSequence] = {}
        self._streams: set[Stream] = set()
        self._refusal = ""  # reason for refusing all submissions; empty while they are accepted
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.num_rows, metrics.model_name = engine.max_num_sequences, engine.model_name
        metrics.engine_step(EngineStats(0, 0, engine.num_blocks, engine.num_blocks, 0, 0, 0, 0), 0)
        metrics.cache_bytes.set_function(lambda: source.store.arena.used_bytes)
        masks.start(self)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the engine has not ended yet."""
        return len(self._sequences)

    @property
    def num_streams(self) -> int:
        """Number of streams of connected gateways."""
        return len(self._streams)

    def stats(self) -> EngineStats | None:
        """Returns the engine's last report. None if the last report is too old."""
        return self._metrics.stats()

    # Streams.

    def open_stream(self) -> Stream:
        """Opens a stream for a gateway."""
        stream = Stream(Outbox(self._max_queued_bytes))
        self._streams.add(stream)
        return stream

    def half_close(self, stream: Stream) -> None:
        """Records that a gateway submits no more sequences. The stream closes when its last
        sequence is reported.
        """
        stream.half_closed = True
        if not stream.sequences:
            stream.outbox.close()

    def close_stream(self, stream: Stream) -> None:
        """Cancels all sequences of a gateway that has disconnected, and closes its stream."""
        self._streams.discard(stream)
        for sequence in list(stream.sequences.values()):
            self._fail(sequence, Cancelled("the gateway has disconnected"))
        stream.outbox.close()

    def submit(self, stream: Stream, submit: pb.Submit) -> None:
        """Starts a sequence. No error is raised: an error becomes the sequence's only event."""
        request_id = submit.request_id[:MAX_REQUEST_ID_CHARS]
        span = start_span("sequence", submit.traceparent, request_id=request_id)
        with bound_request_id(request_id), span.as_current():
            sequence = FrontSequence(
                next(self._numbers), submit.sequence_id, stream, request_id, span, time.time()
            )
            sequence.background = submit.background
            self._submit(sequence, submit)
        stream.outbox.flush()

    def _submit(self, sequence: FrontSequence, submit: pb.Submit) -> None:
        stream = sequence.stream
        # If a gateway uses an id for a second sequence while the first one runs, it cannot tell
        # their events apart. The first sequence is aborted without an event, and the second one is
        # refused, so that the gateway gets a single error event for the id.
        if (duplicate := stream.sequences.pop(submit.sequence_id, None)) is not None:
            self._abort(duplicate)
            duplicate.span.end()
        stream.sequences[sequence.sequence_id] = sequence
        try:
            if duplicate is not None:
                raise InvalidRequest(f"sequence_id {submit.sequence_id} is in use")
            if self._refusal:
                raise Overloaded(self._refusal)
            if not self._capacity.allows(submit.tenant, 1):
                raise Overloaded(
                    f"{len(self._sequences)} sequences already run or wait on this decoder"
                )
            sequence.adapter = self.adapters.take(submit.adapter)
            message, images, constraints = read_submit(
                submit, sequence.number, self.engine, self._masks.end_ids, sequence.adapter
            )
        except TriptychError as error:
            self.adapters.release(sequence.adapter)
            self._report(sequence, _failed(error), error.code)
        except Exception:
            self.adapters.release(sequence.adapter)
            log.exception("the decoder failed to read a submission")
            error = InternalError("the decoder failed to read the submission")
            self._report(sequence, _failed(error), error.code)
        else:
            self._start(sequence, message, images, submit.timeout_s)
            if constraints is not None:
                generated = array("i", message.generated_token_ids).tolist()
                self._masks.add(
                    sequence.number,
                    constraints,
                    generated,
                    submit.tenant,
                    background=submit.background,
                )

    def cancel(self, stream: Stream, sequence_id: int) -> None:
        """Cancels a sequence. Does nothing if the sequence has ended already."""
        if (sequence := stream.sequences.get(sequence_id)) is not None:
            self._fail(sequence, Cancelled("cancelled by the gateway"))

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for all sequences that are submitted from now on."""
        self._channel.send(ResetPrefixCache())

    # Life of the process.

    async def run(self) -> None:
        """Forwards the engine's events to the gateways.

        Raises:
            ChannelClosed: the engine process has ended. All sequences have been reported as failed.
        """
        try:
            while True:
                message = await self._channel.receive()
                match message:
                    case StepDone():
                        self._dispatch(message)
                    case KernelCalls():
                        self._metrics.kernel_calls = message.calls
                    case AdapterLoaded():
                        self.adapters.answered(message)
                    case _:
                        pass
        except ChannelClosed:
            self._refusal = "the decoder's engine process has ended"
            self._fail_all(EngineLost("the decoder's engine process has ended"))
            self.adapters.close(EngineLost("the decoder's engine process has ended"))
            for sequence in list(self._sequences.values()):
                self._remove(sequence)
            raise

    @property
    def is_busy(self) -> bool:
        """Returns whether any sequence has not ended."""
        return bool(self._sequences)

    async def drain(self, grace_s: float) -> None:
        """Refuses new sequences and waits until the running sequences have ended.

        Gateways are asked to continue a sequence on another decoder if the sequence is expected to
        run longer than the grace period. Sequences that still run at the end of the period fail.
        Then all streams close.

        Args:
            grace_s: length of the grace period, in seconds.
        """
        self._refusal = "the decoder is shutting down"
        drain = Drain(time.monotonic(), grace_s)
        while self._sequences and (now := time.monotonic()) < drain.ends_at:
            for number in drain.due(now, self._seconds_left()):
                self._hand_over(self._sequences[number])
            with suppress(TimeoutError):
                async with asyncio.timeout(min(drain.period_s, drain.ends_at - now)):
                    await self._empty.wait()
        self._fail_all(Unavailable("the decoder is shutting down"))
        for stream in self._streams:
            stream.outbox.close()

    def _seconds_left(self) -> dict[int, float]:
        """Returns the estimated seconds that each sequence still needs, by number: its remaining
        tokens times its seconds per token. For a sequence with fewer than two tokens, the mean of
        the other sequences' seconds per token is used.
        """
        now = time.time()
        seconds_per_token = {
            number: (now - sequence.first_token_at) / (sequence.num_generated - 1)
            for number, sequence in self._sequences.items()
            if sequence.num_generated > 1
        }
        mean = sum(seconds_per_token.values()) / max(1, len(seconds_per_token))
        return {
            number: (sequence.max_generated - sequence.num_generated)
            * seconds_per_token.get(number, mean)
            for number, sequence in self._sequences.items()
        }

    def _hand_over(self, sequence: FrontSequence) -> None:
        if not sequence.reported:  # else the gateway has the last event already
            log.info(
                "a sequence may outlast the drain and is handed over to another decoder",
                extra=_fields(sequence),
            )
            sequence.send_kept()
            sequence.stream.outbox.add_hand_over(sequence.sequence_id)
            sequence.stream.outbox.flush()

    async def close(self) -> None:
        """Ends all fetches of images and all processes that compute token masks."""
        await self.images.close()
        await self._masks.close()

    # Events.

    def _dispatch(self, done: StepDone) -> None:
        """Handles the results of a step: sends tokens to gateways and mask processes, releases the
        memory of images that the engine has read, and updates the metrics.
        """
        self._masks.tokens_arrived(
            (event.sequence_id, event.token_ids)
            for event in done.events
            if event.token_ids and event.end is None
        )
        num_generated = 0
        touched: set[Stream] = set()
        for event in done.events:
            sequence = self._sequences.get(event.sequence_id)
            if sequence is None:
                continue
            token_ids = event.token_ids
            num_generated += len(token_ids)
            sequence.num_generated += len(token_ids)
            if not sequence.reported:
                stream = sequence.stream
                has_more = (
                    event.logprobs
                    or event.end
                    or event.start
                    or event.prompt_logprobs
                    or event.predicted
                )
                if sequence.background and not has_more:
                    if sequence.keep(token_ids):
                        continue
                    token_ids = []
                touched.add(stream)
                if len(token_ids) == 1 and not has_more:
                    stream.outbox.add_token(sequence.sequence_id, token_ids[0])
                    continue
                sequence.send_kept()
                if event.prompt_logprobs is not None:
                    stream.outbox.add_prompt_logprobs(sequence.sequence_id, event.prompt_logprobs)
                if event.vector:
                    stream.outbox.add_vector(sequence.sequence_id, event.vector)
                if token_ids:
                    stream.outbox.add_tokens(sequence.sequence_id, token_ids, event.logprobs)
                    if event.start is not None:
                        stream.outbox.add_start(
                            sequence.sequence_id, self._started(sequence, event.start)
                        )
                    if event.predicted is not None:
                        stream.outbox.add_predicted(sequence.sequence_id, *event.predicted)
            if event.end is not None:
                self._ended(sequence, event.end)
        for images in done.images_read:
            self.images.release_read(images)
        for images in done.images_wanted:
            self.images.obtain_again(images)
        self._metrics.engine_step(done.stats, num_generated)
        for stream in touched:
            if stream.outbox.is_full:
                self._drop_slow_reader(stream)
            stream.outbox.flush()

    def _ended(self, sequence: FrontSequence, end: EndOfSequence) -> None:
        if not sequence.reported:
            if end.reason in _REASONS:
                finished = pb.Finished(
                    reason=_REASONS[end.reason], num_preemptions=end.num_preemptions
                )
                self._report(sequence, finished, end.reason)
            elif end.reason == "refused":
                refusal = from_code(end.code, end.message)
                self._report(sequence, _failed(refusal), refusal.code)
            else:
                # The sequence has failed in the engine. (If it had been aborted by the front, the
                # front would have reported it before.)
                error = InternalError(end.message or "the engine aborted the sequence")
                log.error(
                    "a sequence failed in the engine: %s", end.message, extra=_fields(sequence)
                )
                self._report(sequence, _failed(error), error.code)
        self._remove(sequence)

    def _started(self, sequence: FrontSequence, start: StartOfSequence) -> pb.Started:
        """Records how long the stages before a sequence's first token took, in histograms unless
        the sequence is a line of a batch. Returns the durations for the gateway.
        """
        metrics, prefill_s = self._metrics, start.first_token_s - start.first_scheduled_s
        transfer_s = self.images.transfer_s(sequence.number)
        if not sequence.background:
            metrics.queue.observe(start.first_scheduled_s)
            metrics.ttft.observe(start.first_token_s)
            metrics.prefill.observe(prefill_s)
            if transfer_s:
                metrics.transfer.observe(transfer_s)
        sequence.first_token_at = sequence.submitted_at + start.first_token_s
        self.adapters.started(sequence.adapter)
        parent, submitted_at = sequence.span.traceparent, sequence.submitted_at
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

    def _fail(self, sequence: FrontSequence, error: TriptychError) -> None:
        """Reports a sequence as failed, and tells the engine to abort it."""
        if sequence.reported:
            return
        self._report(sequence, _failed(error), error.code)
        sequence.stream.outbox.flush()
        self._abort(sequence)

    def _fail_all(self, error: TriptychError) -> None:
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def _drop_slow_reader(self, stream: Stream) -> None:
        log.warning(
            "a gateway reads too slowly, so its %d sequences are aborted", len(stream.sequences)
        )
        reason = Cancelled("the gateway reads too slowly")
        # The tokens in the outbox are dropped. A finished sequence whose tokens were still in the
        # outbox has lost them, so its finish event is replaced by the error.
        stream.outbox.discard_tokens(_failed(reason))
        for sequence in list(stream.sequences.values()):
            sequence.kept_tokens = []
            self._fail(sequence, reason)

    def _report(self, sequence: FrontSequence, end: pb.Finished | pb.Failed, outcome: str) -> None:
        """Puts the last event of a sequence into the outbox of its stream."""
        sequence.reported = True
        stream = sequence.stream
        if stream.sequences.get(sequence.sequence_id) is sequence:
            del stream.sequences[sequence.sequence_id]
        sequence.send_kept()
        stream.outbox.add_end(sequence.sequence_id, end)
        self._metrics.outcomes.labels(outcome).inc()
        self._log_end(sequence, outcome)
        if stream.half_closed and not stream.sequences:
            stream.outbox.close()

    def _log_end(self, sequence: FrontSequence, outcome: str) -> None:
        now = time.time()
        fields = _fields(sequence, outcome=outcome, tokens=sequence.num_generated)
        log.info("sequence ended", extra=fields)
        if sequence.first_token_at and sequence.span.traceparent:
            duration_s = now - sequence.first_token_at
            record_span("decode", sequence.span.traceparent, sequence.first_token_at, duration_s)
        sequence.span.set(outcome=outcome, num_tokens=sequence.num_generated)
        sequence.span.end(now)

    def _abort(self, sequence: FrontSequence) -> None:
        """Cancels the fetches of a sequence's images, and tells the engine to abort the sequence.
        Images that are in the arena stay there until the engine has answered.
        """
        sequence.reported = True
        self.images.cancel_fetches(sequence.number)
        self._masks.remove(sequence.number)
        self._channel.send(AbortSequence(sequence.number))

    def _remove(self, sequence: FrontSequence) -> None:
        """Removes a sequence that the engine has ended."""
        if sequence.deadline is not None:
            sequence.deadline.cancel()
        del self._sequences[sequence.number]
        self.adapters.release(sequence.adapter, had_started=sequence.first_token_at > 0)
        self._capacity.release(sequence.tenant, 1)
        self.images.remove(sequence.number)
        self._masks.remove(sequence.number)
        if not self._sequences:
            self._empty.set()

    def _start(
        self,
        sequence: FrontSequence,
        message: AddSequence,
        images: list[ImageRequest],
        timeout_s: float,
    ) -> None:
        self._sequences[sequence.number] = sequence
        sequence.tenant = message.tenant
        self._capacity.take(sequence.tenant, 1)
        num_before = len(message.generated_token_ids) // INT_BYTES
        sequence.max_generated = message.sampling.max_tokens - num_before
        self._empty.clear()
        self.images.add(message, images)
        if timeout_s:
            sequence.deadline = asyncio.get_running_loop().call_later(
                timeout_s,
                self._fail,
                sequence,
                DeadlineExceeded("the request has reached its time limit"),
            )

    def input_failed(self, number: int, error: TriptychError) -> None:
        """Ends a sequence, because one of its images or token masks cannot be obtained."""
        if (sequence := self._sequences.get(number)) is not None:
            level = logging.INFO if isinstance(error, InvalidRequest) else logging.WARNING
            log.log(level, "a sequence cannot continue: %s", error, extra=_fields(sequence))
            self._fail(sequence, error)


def _failed(error: TriptychError) -> pb.Failed:
    address = error.encoder_address if isinstance(error, EncoderFailed) else ""
    return pb.Failed(code=error.code, message=error.message, encoder_address=address)


def _fields(sequence: FrontSequence, **others: object) -> dict[str, Any]:
    ids = {"request_id": sequence.request_id, "sequence_id": sequence.sequence_id}
    return {"fields": {**others, **ids}}
