"""One embedding from an encoder, straight into its place; nothing received is trusted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
from blake3 import blake3

from services.common.embedding import DIGEST_BYTES, ITEM_BYTES, EmbeddingSpec, all_finite
from services.common.errors import EmbeddingUnavailable, InvalidRequest
from services.common.pb import encoder_pb2 as pb
from services.common.rpc import create_channel, error_from_rpc

_METHOD = "/triptych.v1.Encoder/Fetch"
# More threads would only wait for memory.
_CHECKING_THREADS = 2
Result = TypeVar("Result")

DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}


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


class _WrongContent(ValueError):
    """What the encoder sent is not the embedding."""


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    fetch: Callable[..., Any]
    users: int = 0
    idle_since: float = 0.0


@dataclass(slots=True)
class EncoderFetcher:
    """Fetches embeddings; keeps a channel per encoder and closes it when it is not used for long.

    Attributes:
        timeout_s: for one embedding, the time the encoder needs to compute it included.
        idle_s: how long an unused channel stays open.
    """

    timeout_s: float = 30.0
    idle_s: float = 60.0
    _channels: dict[str, _Channel] = field(default_factory=dict[str, _Channel])
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_CHECKING_THREADS, "embedding-check")
    )

    async def fetch(self, address: str, key: bytes, spec: EmbeddingSpec, into: memoryview) -> bytes:
        """Fills `into` with the embedding; its digest.

        When this returns or raises, nobody writes to `into` any more.

        Raises:
            EncoderFailed: another encoder may have it.
            InvalidRequest: the encoder says that the image cannot be encoded at all.
        """
        if not address:
            raise EncoderFailed("the embedding is not cached and no encoder is named", address)
        receiver = _Receiver(key, spec, into)
        try:
            async with self._use(address) as channel:
                call = channel.fetch(pb.FetchRequest(image_key=key), timeout=self.timeout_s)
                try:
                    await self._receive(call, receiver)
                finally:
                    call.cancel()
            return receiver.finish()
        except _WrongContent as error:
            message = f"encoder {address} sent a wrong embedding: {error}"
            raise EncoderFailed(message, address, corrupt=True) from None
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure, f"encoder {address}")
            if isinstance(error, InvalidRequest):
                raise error from None
            raise EncoderFailed(error.message, address) from None

    async def close(self) -> None:
        """Closes all channels."""
        self._threads.shutdown(wait=False)
        for address in list(self._channels):
            self._close(address)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _receive(self, call: Any, receiver: "_Receiver") -> None:  # noqa: ANN401 - a call
        """Checks a chunk in a thread while the next one arrives."""
        loop = asyncio.get_running_loop()
        job: asyncio.Future[None] | None = None
        try:
            async for response in call:
                chunk = receiver.accept(response)
                if job is not None:
                    await finished(job)
                    job = None
                if chunk is not None:
                    job = loop.run_in_executor(self._threads, receiver.store, chunk)
        finally:
            if job is not None:
                await finished(job)

    @contextlib.asynccontextmanager
    async def _use(self, address: str) -> AsyncIterator[_Channel]:
        entry = self._channels.get(address)
        if entry is None:
            channel = create_channel(address)
            fetch = channel.unary_stream(
                _METHOD,
                request_serializer=pb.FetchRequest.SerializeToString,
                response_deserializer=pb.FetchResponse.FromString,
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


async def finished(job: "asyncio.Future[Result]") -> Result:
    """The result of a job in a thread. A cancelled caller still waits until the thread is done,
    because the thread uses what the caller would give away.
    """
    try:
        await asyncio.wait({job})
    except asyncio.CancelledError:
        while not job.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({job})
        raise
    return job.result()


class _Receiver:
    """Puts one Fetch stream's parts in their places and checks them.

    `accept` runs in the event loop, `store` in a thread, one chunk at a time.
    """

    def __init__(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> None:
        self._key = key
        self._spec = spec
        self._into = into
        self._header_seen = False
        self._trailer: bytes | None = None
        self._ranges: dict[int, int] = {}  # start → end, received, beyond what is hashed
        self._num_accepted = 0
        self._hashed = 0
        self._hasher = blake3()

    def accept(self, response: pb.FetchResponse) -> pb.FetchChunk | None:
        """Takes one message; a chunk that must be stored, or None.

        Raises:
            _WrongContent: not what was asked for.
        """
        if self._trailer is not None:
            raise _WrongContent("there is more after the trailer")
        match response.WhichOneof("part"):
            case "header":
                self._check_header(response.header)
                return None
            case "chunk" if self._header_seen:
                self._check_place(response.chunk)
                return response.chunk
            case "trailer" if self._header_seen:
                self._trailer = response.trailer.digest
                return None
            case part:
                raise _WrongContent(f"{part} before the header")

    def store(self, chunk: pb.FetchChunk) -> None:
        """Copies an accepted chunk to its place, hashes as far as there is no gap.

        Raises:
            _WrongContent: a value is infinite or not a number.
        """
        start, end = chunk.offset, chunk.offset + len(chunk.data)
        if not all_finite(chunk.data, self._spec.dtype):
            raise _WrongContent("it has values that are not finite")
        self._into[start:end] = chunk.data
        self._ranges[start] = end
        while (end := self._ranges.pop(self._hashed, -1)) >= 0:
            self._hasher.update(self._into[self._hashed : end])
            self._hashed = end

    def finish(self) -> bytes:
        """The digest, after the stream's end.

        Raises:
            _WrongContent: parts are missing, or the digest is another's.
        """
        size = self._spec.size_bytes
        if self._trailer is None or self._hashed != size:
            raise _WrongContent(f"it ended after {self._num_accepted} of {size} bytes")
        digest = self._hasher.digest(DIGEST_BYTES)
        if digest != self._trailer:
            raise _WrongContent("its digest does not match")
        return digest

    def _check_header(self, header: pb.FetchHeader) -> None:
        spec = self._spec
        if self._header_seen:
            raise _WrongContent("it has two headers")
        if header.image_key != self._key:
            raise _WrongContent(f"it is of image {header.image_key.hex()[:16]}")
        if header.dtype != DTYPES[spec.dtype]:
            raise _WrongContent(f"its dtype is {header.dtype}, not {spec.dtype}")
        shape = (header.levels, header.num_tokens, header.hidden)
        if shape != spec.shape:
            raise _WrongContent(f"its shape is {shape}, not {spec.shape}")
        self._header_seen = True

    def _check_place(self, chunk: pb.FetchChunk) -> None:
        # Chunks that overlap cannot end without a gap when all of them have just the right size
        # together; `finish` looks for the gap.
        item = ITEM_BYTES[self._spec.dtype]
        length = len(chunk.data)
        if length == 0 or chunk.offset % item or length % item:
            raise _WrongContent("a chunk is empty or cuts a value in two")
        self._num_accepted += length
        if max(chunk.offset + length, self._num_accepted) > self._spec.size_bytes:
            raise _WrongContent("chunks overlap or lie outside of the embedding")


__all__ = ["DTYPES", "EncoderFailed", "EncoderFetcher", "finished"]
