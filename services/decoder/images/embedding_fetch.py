"""Fetches one embedding from an encoder into the arena: from shared memory if both services run on
one machine, else over gRPC. Whatever the encoder sends is checked.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError

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

_METHOD = "/triptych.v1.Encoder/Fetch"
_TIMEOUT_S = 3600.0  # of a call, which its caller ends before
_IDLE_S = 60.0  # an unused channel stays open

Heard = Callable[[bool], None]  # whether the embedding is in work, or comes


class WrongContent(ValueError):
    """What the encoder sent is not the embedding."""


class Receiver:
    """Fills `into` from one Fetch stream; trusts nothing that it receives.

    `accept` runs in the event loop; `store` and `copy` run in threads.
    """

    def __init__(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> None:
        self.key, self.spec, self.into = key, spec, into
        self.digest = TensorDigest(into)  # of the bytes as they lie in `into`
        self._header_seen = self._shared = False
        self._trailer: bytes | None = None
        self._num_accepted = 0

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are announced in shared memory, and their digest is known. A stream of
        chunks is read to its end instead.
        """
        return self._shared and self._trailer is not None

    def accept(
        self, message: bytes
    ) -> WireChunk | pb.FetchShared | pb.FetchReady | pb.FetchWaiting | None:
        """Checks one message. Returns what is to be stored, opened, copied or told; None: nothing.

        Raises:
            WrongContent: it does not belong to the embedding requested.
        """
        if self._trailer is not None:
            raise WrongContent("there is more after the trailer")
        try:
            part = parse(message)
        except DecodeError:
            raise WrongContent("a message cannot be read") from None
        if isinstance(part, WireChunk):
            if self._shared:
                raise WrongContent("its bytes come twice")
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
                raise WrongContent(f"{kind} before the header")

    def store(self, chunk: WireChunk) -> None:
        """Writes an accepted chunk.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        start, end = chunk.offset, chunk.offset + len(chunk.data)
        self.into[start:end] = chunk.data
        self._check_values(start, end)

    def copy(self, shared: memoryview, ranges: list[tuple[int, int]]) -> None:
        """Copies accepted ranges from the encoder's memory, block by block, while a block is in the
        core's own cache. The copy is checked, because the encoder may change its memory any time.

        Raises:
            WrongContent: a value is infinite or not a number.
        """
        for start, stop in ranges:
            # numpy, because a memoryview's assignment would hold the interpreter lock.
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
        """The digest, after the stream's end, once all bytes are written.

        Raises:
            WrongContent: ranges are missing, or the digest differs.
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
            raise WrongContent("its bytes come twice")
        if shared.offset + self.spec.size_bytes > shared.size_bytes:
            raise WrongContent("it lies outside of the shared memory")
        self._shared = True

    def _check_range(self, offset: int, length: int) -> None:
        # If ranges overlap, others are missing, which `finish` finds.
        item = ITEM_BYTES[self.spec.dtype]
        if not self._header_seen:
            raise WrongContent("chunk before the header")
        if length == 0 or offset % item or length % item:
            raise WrongContent("a range is empty or cuts a value in two")
        self._num_accepted += length
        if max(offset + length, self._num_accepted) > self.spec.size_bytes:
            raise WrongContent("ranges overlap or lie outside of the embedding")


class EncoderFailed(EmbeddingUnavailable):
    """An encoder did not deliver an embedding.

    Attributes:
        encoder_address: which one.
        kind: `unavailable`; `corrupt`: what it delivered is not the embedding; `foreign`: not
            dialled, because this decoder does not know it.
    """

    def __init__(self, message: str, encoder_address: str, kind: str = "unavailable") -> None:
        super().__init__(message)
        self.encoder_address = encoder_address
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Fetched:
    """An embedding has been fetched, by `path` "shm" or "grpc"."""

    digest: bytes
    path: str


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    fetch: Callable[..., Any]
    users: int = 0
    closing: asyncio.TimerHandle | None = None  # where it has none
    memory: ForeignMemory | None = None
    not_readable: bool = False  # its memory could not be opened; it is not tried again


@dataclass(slots=True)
class EncoderFetcher:
    """Fetches embeddings. Keeps a channel per encoder and, where possible, the encoder's memory
    mapped, until the encoder has been idle for a minute.

    Attributes:
        shared_memory: False: all embeddings come over gRPC.
        credentials: that encoders ask for.
        known: the encoders that may be dialled.
    """

    shared_memory: bool = True
    credentials: Credentials = NO_CREDENTIALS
    known: KnownEncoders = field(default_factory=KnownEncoders)
    _host: bytes = field(default_factory=host_identity)
    _channels: dict[str, _Channel] = field(default_factory=dict[str, _Channel])
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(num_threads(), "embedding-check")
    )

    async def fetch(
        self,
        address: str,
        key: bytes,
        spec: EmbeddingSpec,
        into: memoryview,
        heard: Heard = lambda in_work: None,
    ) -> Fetched:
        """Fills `into` with the embedding. Calls `heard` with each message that comes.

        When this returns or raises, no thread writes to `into` any more.

        Raises:
            EncoderFailed: another encoder may have it.
            InvalidRequest: the encoder says that the image cannot be encoded at all.
        """
        if not address:
            raise EncoderFailed("the embedding is not cached and no encoder is named", address)
        if not await self.known.admits(address):
            message = f"{address[:256]} is no encoder that this decoder knows"
            raise EncoderFailed(message, address, "foreign")
        try:
            with span("fetch embedding", size_bytes=spec.size_bytes) as current:
                async with self._use(address) as channel:
                    try:
                        fetched = await self._call(channel, Receiver(key, spec, into), heard)
                    except NotReadable as why:
                        channel.not_readable = True
                        log.warning("encoder %s sends over gRPC from now on: %s", address, why)
                        fetched = await self._call(channel, Receiver(key, spec, into), heard)
                current.set(path=fetched.path)
                return fetched
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

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
        for address in list(self._channels):
            self._close(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _call(self, channel: _Channel, receiver: Receiver, heard: Heard) -> Fetched:
        """One Fetch: stores and checks a chunk in a thread while the next one arrives, or copies
        ranges from shared memory while the encoder computes and digests the others.

        Raises:
            WrongContent: what came is not the embedding.
            NotReadable: the encoder's memory cannot be opened; `into` is untouched.
            grpc.aio.AioRpcError: the encoder failed.
        """
        host = self._host if self.shared_memory and not channel.not_readable else b""
        request = pb.FetchRequest(image_key=receiver.key, reader_host=host, tell_waiting=True)
        call = channel.fetch(request, timeout=_TIMEOUT_S, metadata=outgoing_metadata())
        loop = asyncio.get_running_loop()
        jobs: list[asyncio.Future[None]] = []
        shared: memoryview | None = None
        try:
            async for message in call:
                part = receiver.accept(message)
                heard(not isinstance(part, pb.FetchWaiting) or part.in_work)
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
        """The embedding in the encoder's memory; raises NotReadable."""
        memory = channel.memory
        address = MemoryAddress(shared.pid, shared.fd, shared.name, shared.size_bytes)
        if memory is None or memory.address != address:
            # A restarted encoder has another one.
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
                entry.closing = loop.call_later(_IDLE_S, self._close, address)

    def _close(self, address: str) -> None:
        entry = self._channels.pop(address)
        if entry.closing is not None:
            entry.closing.cancel()
        task = asyncio.create_task(entry.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
