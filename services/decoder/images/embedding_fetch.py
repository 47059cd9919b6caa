"""Fetches embeddings from encoders into the arena.

An embedding is copied from shared memory if the encoder runs on the same machine, and is received
over gRPC otherwise. Everything that an encoder sends is checked.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError, Message

from services.common.embeddings.embedding import (
    ITEM_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    TensorDigest,
    all_finite,
    split_blocks,
    split_evenly,
)
from services.common.embeddings.fetch_wire import DTYPES, WireChunk, parse
from services.common.embeddings.shared_memory import (
    ForeignMemory,
    MemoryAddress,
    NotReadable,
    host_identity,
)
from services.common.errors import EmbeddingUnavailable, InvalidRequest, Unavailable
from services.common.pb import encoder_pb2 as pb
from services.common.security.credentials import NO_CREDENTIALS, Credentials
from services.common.spans import span
from services.common.threads import finished, num_threads
from services.common.transport.rpc import create_channel, error_from_rpc, outgoing_metadata
from services.decoder.images.known_encoders import KnownEncoders

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=Message)

_METHOD = "/triptych.v1.Encoder/Fetch"
_TIMEOUT_S = 3600.0  # time limit of a call; callers end their calls much earlier
_IDLE_S = 60.0


class WrongContent(ValueError):
    """The bytes that an encoder sent are not the embedding."""


@dataclass(slots=True)
class FetchProgress:
    """Times of an encoder's messages about one embedding, by the event loop's clock.

    Attributes:
        started_at: start of the fetch.
        last_message_at: arrival of the last message. The start of the fetch before the first one.
        last_work_at: arrival of the last message that reported work on the image. 0 before.
    """

    started_at: float = 0.0
    last_message_at: float = 0.0
    last_work_at: float = 0.0

    def start(self) -> None:
        """Records the start of a fetch."""
        self.started_at = self.last_message_at = asyncio.get_running_loop().time()

    def report(self, *, in_work: bool) -> None:
        """Records a message.

        Args:
            in_work: True if the encoder works on the image, or sends its embedding.
        """
        self.last_message_at = asyncio.get_running_loop().time()
        if in_work:
            self.last_work_at = self.last_message_at


class Receiver:
    """Receives the embedding of one Fetch stream, and checks all messages and bytes.

    `accept` runs in the event loop. `store` and `copy` run in threads.

    Args:
        key: image key of the embedding.
        spec: shape and dtype of the embedding.
        into: memory for the bytes of the embedding.

    Attributes:
        digest: digest of the bytes in `into`.
    """

    def __init__(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> None:
        self.key, self.spec, self.into = key, spec, into
        self.digest = TensorDigest(into)
        self._header_seen = self._shared = False
        self._trailer: bytes | None = None
        self._num_accepted = 0

    @property
    def is_complete(self) -> bool:
        """Returns whether all bytes have been announced in shared memory and their digest is known.
        Always False for a stream of chunks, which is read to its end.
        """
        return self._shared and self._trailer is not None

    def accept(
        self, message: bytes
    ) -> WireChunk | pb.FetchShared | pb.FetchReady | pb.FetchWaiting | None:
        """Checks one message.

        Returns:
            The part of the message that the caller handles: a chunk to store, shared memory to
            open, a range to copy, or a report that the encoder is not ready. None if the message
            needs no action.

        Raises:
            WrongContent: the message does not belong to the requested embedding.
        """
        if self._trailer is not None:
            raise WrongContent("a message follows the trailer")
        try:
            part = parse(message)
        except DecodeError:
            raise WrongContent("a message cannot be parsed") from None
        if isinstance(part, WireChunk):
            if self._shared:
                raise WrongContent("its bytes are sent twice")
            self._check_range(part.offset, len(part.data))
            return part
        match part.WhichOneof("part"):
            case "header":
                self._check_header(part.header)
                return None
            case "shared" if self._header_seen:
                self._check_shared(part.shared)
                return part.shared
            case "ready" if self._shared:
                self._check_range(part.ready.offset, part.ready.size_bytes)
                return part.ready
            case "trailer" if self._header_seen:
                self._trailer = part.trailer.digest
                return None
            case "waiting":
                return part.waiting
            case kind:
                raise WrongContent(f"the part {kind} precedes the header")

    def store(self, chunk: WireChunk) -> None:
        """Writes an accepted chunk.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        start, end = chunk.offset, chunk.offset + len(chunk.data)
        self.into[start:end] = chunk.data
        self._check_values(start, end)

    def copy(self, shared: memoryview, ranges: list[tuple[int, int]]) -> None:
        """Copies accepted ranges from the encoder's memory and checks the copies, because the
        encoder may change its memory at any time. Each block is checked while it is in the cache of
        the CPU core.

        Args:
            shared: the embedding in the encoder's memory.
            ranges: pairs (start, stop) of byte offsets in the embedding.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        for start, stop in ranges:
            # An assignment of a memoryview would hold the interpreter lock, which numpy releases.
            np.copyto(
                np.frombuffer(self.into[start:stop], np.uint8),
                np.frombuffer(shared[start:stop], np.uint8),
            )
            self._check_values(start, stop)

    def _check_values(self, start: int, stop: int) -> None:
        if not all_finite(self.into[start:stop], self.spec.dtype):
            raise WrongContent("it has values that are not finite")
        self.digest.add(start, stop)

    def finish(self) -> bytes:
        """Returns the digest. It is called after the end of the stream, once all bytes are written.

        Raises:
            WrongContent: ranges are missing, or the digest differs from the encoder's.
        """
        size = self.spec.size_bytes
        if self._trailer is None or self._num_accepted != size:
            raise WrongContent(f"it ended after {self._num_accepted} of {size} bytes")
        try:
            digest = self.digest.finish()
        except CorruptEmbedding as error:
            raise WrongContent(str(error)) from None
        if digest != self._trailer:
            raise WrongContent("its digest does not match")
        return digest

    def _check_header(self, header: pb.FetchHeader) -> None:
        spec = self.spec
        if self._header_seen:
            raise WrongContent("it has two headers")
        if header.image_key != self.key:
            raise WrongContent(f"it is of image {header.image_key.hex()[:16]}")
        if header.dtype != DTYPES[spec.dtype]:
            raise WrongContent(f"its dtype is {header.dtype}, not {spec.dtype}")
        shape = (header.num_features, header.num_tokens, header.hidden)
        if shape != spec.shape:
            raise WrongContent(f"its shape is {shape}, not {spec.shape}")
        self._header_seen = True

    def _check_shared(self, shared: pb.FetchShared) -> None:
        if self._shared or self._num_accepted:
            raise WrongContent("its bytes are sent twice")
        if shared.offset + self.spec.size_bytes > shared.size_bytes:
            raise WrongContent("it lies outside of the shared memory")
        self._shared = True

    def _check_range(self, offset: int, length: int) -> None:
        # If ranges overlap, other ranges are missing, which `finish` detects.
        item = ITEM_BYTES[self.spec.dtype]
        if not self._header_seen:
            raise WrongContent("a chunk precedes the header")
        if length == 0 or offset % item or length % item:
            raise WrongContent("a range is empty or cuts a value in two")
        self._num_accepted += length
        if max(offset + length, self._num_accepted) > self.spec.size_bytes:
            raise WrongContent("ranges overlap or lie outside of the embedding")


class EncoderFailed(EmbeddingUnavailable):
    """An encoder did not deliver an embedding.

    Attributes:
        encoder_address: address of the encoder.
        kind: `unavailable`, `corrupt` if the delivered bytes are not the embedding, or `foreign` if
            the encoder was not dialled because this decoder does not know its address.
    """

    def __init__(self, message: str, encoder_address: str, kind: str = "unavailable") -> None:
        super().__init__(message)
        self.encoder_address = encoder_address
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch.

    Attributes:
        digest: digest of the embedding.
        path: `shm` if the bytes came through shared memory, `grpc` otherwise.
        fell_back: True if they came over gRPC because the encoder's memory could not be opened.
    """

    digest: bytes
    path: str
    fell_back: bool = False


@dataclass(slots=True)
class _Channel:
    """The connection to one encoder.

    Attributes:
        users: number of running fetches.
        closing: timer that closes the channel. None while fetches use the channel.
        memory: the encoder's memory. None if it is not mapped.
        not_readable: True if the memory could not be opened, which is not tried again.
    """

    channel: grpc.aio.Channel
    fetch: grpc.aio.UnaryStreamMultiCallable
    users: int = 0
    closing: asyncio.TimerHandle | None = None
    memory: ForeignMemory | None = None
    not_readable: bool = False


@dataclass(slots=True)
class EncoderFetcher:
    """Fetches embeddings. It has one channel per encoder and, where possible, a mapping of the
    encoder's memory. Both are closed when the encoder has been idle for a while.

    Attributes:
        shared_memory: False if all embeddings are to be sent over gRPC.
        credentials: credentials for the encoders.
        known: encoders that may be dialled.
        host: identity of this machine. Encoders on the same machine offer shared memory.
        idle_s: seconds after which an unused channel is closed.
    """

    shared_memory: bool = True
    credentials: Credentials = NO_CREDENTIALS
    known: KnownEncoders = field(default_factory=KnownEncoders)
    host: bytes = field(default_factory=host_identity)
    idle_s: float = _IDLE_S
    _channels: dict[str, _Channel] = field(default_factory=dict[str, _Channel])
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(num_threads(), "embedding-check")
    )

    @property
    def num_channels(self) -> int:
        """Number of open channels."""
        return len(self._channels)

    def memory_of(self, address: str) -> MemoryAddress | None:
        """Returns the address of an encoder's mapped memory. None if no memory is mapped."""
        channel = self._channels.get(address)
        return channel.memory.address if channel and channel.memory else None

    async def fetch(
        self,
        address: str,
        key: bytes,
        spec: EmbeddingSpec,
        into: memoryview,
        progress: FetchProgress | None = None,
    ) -> Fetched:
        """Fetches an embedding. Once the call has returned or raised, no thread writes to `into`.

        Args:
            address: address of the encoder.
            key: image key of the embedding.
            spec: shape and dtype that the embedding must have.
            into: memory for the bytes of the embedding.
            progress: record of the encoder's messages. None if the caller does not need it.

        Raises:
            EncoderFailed: this encoder did not deliver the embedding. Another encoder may.
            InvalidRequest: the encoder has found that the image cannot be encoded.
        """
        progress = progress or FetchProgress()
        if not address:
            raise EncoderFailed("the embedding is not cached and no encoder is named", address)
        if not await self.known.admits(address):
            message = f"DECODER_ENCODER_ADDRESSES does not list the encoder {address[:256]}"
            raise EncoderFailed(message, address, "foreign")
        try:
            with span("fetch embedding", size_bytes=spec.size_bytes) as current:
                async with self._use(address) as channel:
                    try:
                        fetched = await self._call(channel, Receiver(key, spec, into), progress)
                    except NotReadable as why:
                        channel.not_readable = True
                        log.warning(
                            "encoder %s sends embeddings over gRPC from now on, because its memory "
                            "cannot be read: %s",
                            address,
                            why,
                        )
                        fetched = await self._call(channel, Receiver(key, spec, into), progress)
                    fell_back = channel.not_readable
                current.set(path=fetched.path)
                return replace(fetched, fell_back=True) if fell_back else fetched
        except WrongContent as error:
            message = f"encoder {address} sent a wrong embedding: {error}"
            raise EncoderFailed(message, address, "corrupt") from None
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure, f"encoder {address}")
            if isinstance(error, InvalidRequest):
                raise error from None
            if isinstance(error, Unavailable) and address in self._channels:
                self._channels[address].memory = None  # unmap the memory of an encoder that died
            raise EncoderFailed(error.message, address) from None

    async def call(
        self, address: str, method: str, request: Message, answer: type[AnswerT], timeout_s: float
    ) -> AnswerT:
        """Makes a call with one message in each direction.

        Args:
            address: address of the encoder.
            method: name of the method.
            answer: type of the encoder's message.
            timeout_s: seconds that the call may take.

        Raises:
            EncoderFailed: the encoder has refused the call, or could not be reached.
        """
        try:
            async with self._use(address) as channel:
                rpc = channel.channel.unary_unary(
                    f"/triptych.v1.Encoder/{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=answer.FromString,
                )
                metadata = outgoing_metadata(request.ByteSize())
                return await rpc(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            message = error_from_rpc(failure, f"encoder {address}").message
            if failure.code() is grpc.StatusCode.UNAVAILABLE:  # gRPC says why, for people
                message += f": {(failure.details() or '').rpartition('last error: ')[2][:300]}"
            raise EncoderFailed(message, address) from None

    async def close(self) -> None:
        """Closes all channels."""
        self._threads.shutdown(wait=False)
        for address in list(self._channels):
            self._close(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _call(
        self, channel: _Channel, receiver: Receiver, progress: FetchProgress
    ) -> Fetched:
        """Runs one Fetch call. A thread stores and checks a chunk while the next chunk arrives, or
        copies ranges from shared memory while the encoder computes the following ranges.

        Raises:
            WrongContent: the received bytes are not the embedding.
            NotReadable: the encoder's memory cannot be opened. `into` is unchanged.
            grpc.aio.AioRpcError: the encoder failed.
        """
        host = self.host if self.shared_memory and not channel.not_readable else b""
        request = pb.FetchRequest(image_key=receiver.key, reader_host=host, tell_waiting=True)
        call = channel.fetch(request, timeout=_TIMEOUT_S, metadata=outgoing_metadata())
        loop = asyncio.get_running_loop()
        jobs: list[asyncio.Future[None]] = []
        shared: memoryview | None = None
        try:
            async for message in call:
                part = receiver.accept(message)
                progress.report(in_work=not isinstance(part, pb.FetchWaiting) or part.in_work)
                match part:
                    case WireChunk():
                        await finished(jobs)
                        jobs = [loop.run_in_executor(self._threads, receiver.store, part)]
                    case pb.FetchShared():
                        shared = self._open(part, receiver, channel)
                    case pb.FetchReady():
                        assert shared is not None
                        stop = part.offset + part.size_bytes
                        blocks = split_evenly(split_blocks(part.offset, stop), num_threads())
                        jobs += [
                            loop.run_in_executor(self._threads, receiver.copy, shared, ranges)
                            for ranges in blocks
                        ]
                    case _:
                        pass
                if receiver.is_complete:
                    break
            await finished(jobs)
            return Fetched(receiver.finish(), "grpc" if shared is None else "shm")
        except BaseException:
            with contextlib.suppress(WrongContent):
                await finished(jobs)
            raise
        finally:
            call.cancel()  # tells the encoder that its memory has been read

    def _open(self, shared: pb.FetchShared, receiver: Receiver, channel: _Channel) -> memoryview:
        """Returns a view of the embedding in the encoder's memory.

        Raises:
            NotReadable: the encoder's memory cannot be opened.
        """
        memory = channel.memory
        address = MemoryAddress(shared.pid, shared.fd, shared.name, shared.size_bytes)
        if memory is None or memory.address != address:
            # The memory of a restarted encoder has another address.
            memory = channel.memory = ForeignMemory(address)
            asyncio.get_running_loop().run_in_executor(None, memory.prefault)
        return memory.view(shared.offset, len(receiver.into))

    @contextlib.asynccontextmanager
    async def _use(self, address: str) -> AsyncIterator[_Channel]:
        entry = self._channels.get(address)
        if entry is None:
            channel = create_channel(address, self.credentials, peer="encoder")
            fetch = channel.unary_stream(
                _METHOD, request_serializer=pb.FetchRequest.SerializeToString
            )
            entry = self._channels[address] = _Channel(channel, fetch)
        if entry.closing is not None:
            entry.closing.cancel()
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            if not entry.users:
                loop = asyncio.get_running_loop()
                entry.closing = loop.call_later(self.idle_s, self._close, address)

    def _close(self, address: str) -> None:
        entry = self._channels.pop(address)
        if entry.closing is not None:
            entry.closing.cancel()
        task = asyncio.create_task(entry.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
