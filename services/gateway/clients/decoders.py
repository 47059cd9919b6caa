"""The decoders: one stream of commands and events to each, shared by all its sequences."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.common.errors import EmbeddingUnavailable, TriptychError, Unavailable, from_code
from services.common.pb import decoder_pb2 as pb
from services.common.rpc import error_from_rpc
from services.gateway.clients.affinity import pick
from services.gateway.clients.pods import Pod, Pool
from services.gateway.generation import (
    Finished,
    Generation,
    Sampling,
    Started,
    TokenEvent,
    TokenLogprobs,
)

log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
Sink = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """What a decoder serves."""

    dtype: int
    num_features: int
    hidden: int
    vocab_size: int
    max_model_len: int


class EmbeddingLost(EmbeddingUnavailable):
    """A decoder could not get an image's embedding from `encoder_address`."""

    def __init__(self, message: str, encoder_address: str) -> None:
        super().__init__(message)
        self.encoder_address = encoder_address


class DecoderPod(Pod):
    """One decoder and its stream."""

    description: DecoderDescription | None = None

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._describe = self.channel.unary_unary(
            "/triptych.v1.Decoder/Describe",
            request_serializer=pb.DescribeDecoderRequest.SerializeToString,
            response_deserializer=pb.DescribeDecoderResponse.FromString,
        )
        self._generate = self.channel.stream_stream(
            "/triptych.v1.Decoder/Generate",
            request_serializer=pb.GenerateCommand.SerializeToString,
            response_deserializer=pb.GenerateEvents.FromString,
        )
        self._ids = itertools.count(1)
        self._sinks: dict[int, tuple[int, Sink]] = {}
        self._commands: asyncio.Queue[pb.GenerateCommand] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """As `Pod`."""
        return bool(self._tasks)

    async def connect(self) -> None:
        """As `Pod`."""
        try:
            answer = await self._describe(pb.DescribeDecoderRequest(), timeout=_DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, self._name) from None
        self.description = DecoderDescription(
            answer.dtype,
            answer.num_features,
            answer.hidden,
            answer.vocab_size,
            answer.max_model_len,
        )
        self._commands = asyncio.Queue()
        call = self._generate()
        self._tasks = [
            asyncio.create_task(self._write(call, self._commands)),
            asyncio.create_task(self._read(call)),
        ]

    async def lose(self, reason: str) -> None:
        """As `Pod`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(Unavailable(f"{self._name} was lost: {reason}"))

    def submit(self, generation: Generation, choice: int, sink: Sink) -> int:
        """Starts a sequence; its events go to `sink` until the one with an end.

        Returns:
            The sequence's id, for `cancel`.
        """
        sequence_id = next(self._ids)
        self._sinks[sequence_id] = (choice, sink)
        self.num_in_flight = len(self._sinks)
        self._commands.put_nowait(
            pb.GenerateCommand(submit=submit_message(generation, sequence_id))
        )
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence that may still run; no more events come. Never fails."""
        if self._sinks.pop(sequence_id, None) is not None:
            self.num_in_flight = len(self._sinks)
            self._commands.put_nowait(pb.GenerateCommand(cancel=pb.Cancel(sequence_id=sequence_id)))

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[pb.GenerateCommand, pb.GenerateEvents]",
        commands: asyncio.Queue[pb.GenerateCommand],
    ) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader says why
            while True:
                await call.write(await commands.get())

    async def _read(
        self, call: "grpc.aio.StreamStreamCall[pb.GenerateCommand, pb.GenerateEvents]"
    ) -> None:
        error: TriptychError = Unavailable(f"{self._name} ended its stream")
        try:
            async for message in call:
                for event in message.events:
                    self._dispatch(event)
        except grpc.aio.AioRpcError as failure:
            found = error_from_rpc(failure, self._name)
            error = found if found.retryable else Unavailable(f"{self._name} broke its stream")
        finally:
            call.cancel()
            # Not `lose`, which waits for this task.
            if self._tasks and self._tasks[1] is asyncio.current_task():
                self._tasks[0].cancel()
                self._tasks = []
                self.healthy = False
                log.warning("%s: %s", self.address, error.message)
            self._fail_all(error)

    def _dispatch(self, event: pb.SequenceEvent) -> None:
        entry = self._sinks.get(event.sequence_id)
        if entry is None:
            return  # cancelled
        end = _end_of(event)
        if end is not None:
            del self._sinks[event.sequence_id]
            self.num_in_flight = len(self._sinks)
        choice, sink = entry
        logprobs = [
            TokenLogprobs(found.logprob, tuple(found.top_token_ids), tuple(found.top_logprobs))
            for found in event.logprobs
        ]
        start = _start_of(event.started) if event.HasField("started") else None
        sink(TokenEvent(choice, list(event.token_ids), logprobs, end, start))

    def _fail_all(self, error: TriptychError) -> None:
        sinks, self._sinks = self._sinks, {}
        self.num_in_flight = 0
        for choice, sink in sinks.values():
            sink(TokenEvent(choice, [], [], error))

    @property
    def _name(self) -> str:
        return "the decoder"


def _start_of(started: pb.Started) -> Started:
    return Started(
        started.num_cached_tokens, started.queue_s, started.transfer_s, started.prefill_s
    )


def _end_of(event: pb.SequenceEvent) -> Finished | TriptychError | None:
    match event.WhichOneof("end"):
        case "finished":
            stopped = event.finished.reason == pb.Finished.REASON_STOP
            return Finished("stop" if stopped else "length")
        case "failed":
            failed = event.failed
            if failed.code == EmbeddingUnavailable.code:
                return EmbeddingLost(failed.message, failed.encoder_address)
            return from_code(failed.code, failed.message)
        case _:
            return None


def submit_message(generation: Generation, sequence_id: int) -> pb.Submit:
    """A sequence as it goes over the wire."""
    return pb.Submit(
        sequence_id=sequence_id,
        request_id=generation.request_id,
        prompt_token_ids=generation.token_ids.astype("<i4", copy=False).tobytes(),
        positions=b""
        if generation.positions is None
        else generation.positions.astype("<i4", copy=False).tobytes(),
        position_delta=generation.position_delta,
        images=[
            pb.ImageRef(
                image_key=image.key,
                offset=image.offset,
                num_tokens=image.num_tokens,
                encoder_address=image.encoder_address,
            )
            for image in generation.images
        ],
        sampling=_sampling_message(generation.sampling),
        cache_salt=generation.cache_salt,
        timeout_s=generation.timeout_s,
    )


def _sampling_message(sampling: Sampling) -> pb.SamplingParams:
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in Sampling.__slots__}
    return pb.SamplingParams(**fields)


class DecoderPool(Pool[DecoderPod]):
    """All decoders."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(addresses, DecoderPod)

    def description(self) -> DecoderDescription | None:
        """What the healthy decoders serve, with the least context of them; None without one."""
        found = [d for pod in self._pods.healthy() if (d := pod.description)]
        return min(found, key=lambda d: d.max_model_len) if found else None

    def choose(self, key: bytes, exclude: Collection[str]) -> DecoderPod:
        """The decoder for a prompt that begins as `key` says.

        Raises:
            Unavailable: none is left.
        """
        pods = [pod for pod in self._pods.healthy() if pod.address not in exclude]
        if not pods:
            raise Unavailable("no decoder is available")
        return pick(pods, key)
