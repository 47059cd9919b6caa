"""One embedding from an encoder, straight into its place: out of shared memory where encoder and
decoder are on one machine, over gRPC everywhere else.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from services.common.embedding import EmbeddingSpec
from services.common.errors import EmbeddingUnavailable, InvalidRequest, Unavailable
from services.common.fetch_wire import WireChunk
from services.common.pb import encoder_pb2 as pb
from services.common.rpc import create_channel, error_from_rpc
from services.common.shared_memory import (
    ForeignMemory,
    MemoryAddress,
    NotReadable,
    host_identity,
)
from services.common.threads import finished, num_threads
from services.decoder.embedding_receiver import Receiver, WrongContent
from services.decoder.shared_reader import copy_range

log = logging.getLogger(__name__)

_METHOD = "/triptych.v1.Encoder/Fetch"


class EncoderFailed(EmbeddingUnavailable):
    """An encoder did not deliver.

    Attributes:
        encoder_address: which one.
        corrupt: it delivered something else than the embedding.
    """

    def __init__(self, message: str, encoder_address: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.encoder_address = encoder_address
        self.corrupt = corrupt


@dataclass(frozen=True, slots=True)
class Fetched:
    """How an embedding came.

    Attributes:
        digest: of its bytes.
        path: "shm" or "grpc".
    """

    digest: bytes
    path: str


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    fetch: Callable[..., Any]
    users: int = 0
    idle_since: float = 0.0
    memory: ForeignMemory | None = None
    not_readable: bool = False  # its memory, as was found out; it is not tried again


@dataclass(slots=True)
class EncoderFetcher:
    """Fetches embeddings; keeps a channel per encoder, and its memory mapped where that is
    possible, and lets go of both when the encoder is not asked for long.

    Attributes:
        timeout_s: for one embedding, the time the encoder needs to compute it included.
        idle_s: how long an unused channel stays open.
        shared_memory: False: all embeddings come over gRPC.
    """

    timeout_s: float = 30.0
    idle_s: float = 60.0
    shared_memory: bool = True
    _host: bytes = field(default_factory=host_identity)
    _channels: dict[str, _Channel] = field(default_factory=dict[str, _Channel])
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(num_threads(), "embedding-check")
    )

    async def fetch(
        self, address: str, key: bytes, spec: EmbeddingSpec, into: memoryview
    ) -> Fetched:
        """Fills `into` with the embedding.

        When this returns or raises, nobody writes to `into` any more.

        Raises:
            EncoderFailed: another encoder may have it.
            InvalidRequest: the encoder says that the image cannot be encoded at all.
        """
        if not address:
            raise EncoderFailed("the embedding is not cached and no encoder is named", address)
        try:
            async with self._use(address) as channel:
                return await self._fetch(channel, address, key, spec, into)
        except WrongContent as error:
            message = f"encoder {address} sent a wrong embedding: {error}"
            raise EncoderFailed(message, address, corrupt=True) from None
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure, f"encoder {address}")
            if isinstance(error, InvalidRequest):
                raise error from None
            if type(error) is Unavailable and address in self._channels:
                self._channels[address].memory = None  # it may be dead; its memory goes, too
            raise EncoderFailed(error.message, address) from None

    async def close(self) -> None:
        """Closes all channels."""
        self._threads.shutdown(wait=False)
        for address in list(self._channels):
            self._close(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _fetch(
        self, channel: _Channel, address: str, key: bytes, spec: EmbeddingSpec, into: memoryview
    ) -> Fetched:
        now = asyncio.get_running_loop().time
        deadline = now() + self.timeout_s
        if self.shared_memory and not channel.not_readable:
            try:
                receiver = Receiver(key, spec, into)
                return await self._call(channel, receiver, self._host, self.timeout_s)
            except NotReadable as why:
                channel.not_readable = True
                log.warning("encoder %s sends over gRPC from now on: %s", address, why)
        return await self._call(channel, Receiver(key, spec, into), b"", deadline - now())

    async def _call(
        self, channel: _Channel, receiver: Receiver, reader_host: bytes, timeout_s: float
    ) -> Fetched:
        """One Fetch.

        Raises:
            WrongContent: what came is not the embedding.
            NotReadable: the encoder's memory cannot be opened; `into` is untouched.
            grpc.aio.AioRpcError: the encoder failed.
        """
        request = pb.FetchRequest(image_key=receiver.key, reader_host=reader_host)
        call = channel.fetch(request, timeout=timeout_s)
        try:
            return await self._receive(call, receiver, channel)
        finally:
            call.cancel()  # tells the encoder that its memory has been read

    async def _receive(self, call: Any, receiver: Receiver, channel: _Channel) -> Fetched:  # noqa: ANN401 - a call
        """Checks a chunk in a thread while the next one arrives, or copies from shared memory what
        is there while the encoder makes or digests the rest.
        """
        loop = asyncio.get_running_loop()
        jobs: list[asyncio.Future[None]] = []
        shared: memoryview | None = None
        try:
            async for message in call:
                part = receiver.accept(message)
                match part:
                    case WireChunk():
                        await finished(jobs)
                        jobs = [loop.run_in_executor(self._threads, receiver.store, part)]
                    case pb.FetchShared():
                        shared = self._open(part, receiver, channel)
                    case pb.FetchReady():
                        assert shared is not None
                        jobs += copy_range(
                            shared, receiver.into, part.offset, part.offset + part.size_bytes,
                            receiver.spec.dtype, receiver.digest, self._threads,
                        )  # fmt: skip
                    case _:
                        pass
                if receiver.needs_nothing:
                    break
            await finished(jobs)
            return Fetched(receiver.finish(), "grpc" if shared is None else "shm")
        except BaseException:
            with contextlib.suppress(WrongContent):
                await finished(jobs)
            raise

    def _open(self, shared: pb.FetchShared, receiver: Receiver, channel: _Channel) -> memoryview:
        """The embedding's place in the encoder's memory; raises NotReadable."""
        memory = channel.memory
        address = MemoryAddress(shared.pid, shared.fd, shared.name, shared.size_bytes)
        if memory is None or memory.address != address:
            # A restarted encoder has another one.
            memory = channel.memory = ForeignMemory(address)
            asyncio.get_running_loop().run_in_executor(None, memory.map_resident)
        return memory.view(shared.offset, len(receiver.into))

    @contextlib.asynccontextmanager
    async def _use(self, address: str) -> AsyncIterator[_Channel]:
        entry = self._channels.get(address)
        if entry is None:
            channel = create_channel(address)
            fetch = channel.unary_stream(
                _METHOD,
                request_serializer=pb.FetchRequest.SerializeToString,
            )
            entry = self._channels[address] = _Channel(channel, fetch)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            loop = asyncio.get_running_loop()
            entry.idle_since = loop.time()
            loop.call_later(self.idle_s, self._close_if_idle, address, entry)

    def _close_if_idle(self, address: str, entry: _Channel) -> None:
        idle_for = asyncio.get_running_loop().time() - entry.idle_since
        known = self._channels.get(address) is entry
        if known and entry.users == 0 and idle_for >= 0.99 * self.idle_s:
            self._close(address)

    def _close(self, address: str) -> None:
        task = asyncio.create_task(self._channels.pop(address).channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


__all__ = ["EncoderFailed", "EncoderFetcher", "Fetched"]
