"""proto ↔ embeddings. The only file of the encoder that knows gRPC; no torch."""

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass

import grpc
import grpc.aio

from services.common.arena import ArenaEntry
from services.common.embedding import EmbeddingSpec
from services.common.errors import InternalError, InvalidImage, InvalidRequest, TriptychError
from services.common.fetch_wire import WireChunk, serialize
from services.common.image_key import KEY_BYTES
from services.common.pb import encoder_pb2 as pb
from services.common.pb import encoder_pb2_grpc as pb_grpc
from services.common.rpc import abort
from services.common.shared_memory import host_identity
from services.encoder.embeddings import Embeddings
from services.encoder.encoded import Encoded, Origin
from services.encoder.metrics import EncoderMetrics
from services.encoder.reading import Reading

SERVICE = "triptych.v1.Encoder"
_CHUNK_BYTES = 1 << 20
# A Fetch waits this long for work on its key, whatever its own deadline.
_MAX_FETCH_WAIT_S = 30.0
# An entry in shared memory is kept this long for a reader that does not say that it is done.
_MAX_READ_S = 10.0
_DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}
_SOURCES = {
    Origin.COMPUTED: pb.EncodeResponse.SOURCE_COMPUTED,
    Origin.MEMORY: pb.EncodeResponse.SOURCE_MEMORY,
    Origin.REDIS: pb.EncodeResponse.SOURCE_REDIS,
    Origin.JOINED: pb.EncodeResponse.SOURCE_JOINED,
}


@dataclass(frozen=True, slots=True)
class Description:
    """What this encoder serves; see DescribeEncoderResponse."""

    model_name: str
    key_prefix: bytes
    like: EmbeddingSpec
    merge_size: int
    max_image_patches: int


class EncoderServicer(pb_grpc.EncoderServicer):
    """Translates and delegates."""

    def __init__(
        self, description: Description, embeddings: Embeddings, metrics: EncoderMetrics
    ) -> None:
        self._description = description
        self._embeddings = embeddings
        self._metrics = metrics
        self._host = host_identity()

    async def Describe(
        self, request: pb.DescribeEncoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEncoderResponse:
        """See the proto."""
        known = self._description
        return pb.DescribeEncoderResponse(
            model_name=known.model_name,
            key_prefix=known.key_prefix,
            dtype=_DTYPES[known.like.dtype],
            num_features=known.like.num_features,
            hidden=known.like.hidden,
            max_image_patches=known.max_image_patches,
        )

    async def Encode(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EncodeResponse:
        """See the proto."""
        try:
            key = _checked_key(request.image_key)
            grid = self._checked_grid(request.grid)
            encoded = await self._embeddings.encode(key, request.image, grid)
            return self._answer(encoded, self._embeddings.spec_of(grid).num_tokens)
        except Exception as error:
            return await self._fail("encode", error, context)

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """See the proto."""
        try:
            key = _checked_key(request.image_key)
            left_s = context.time_remaining()
            wait_s = _MAX_FETCH_WAIT_S if left_s is None else min(left_s, _MAX_FETCH_WAIT_S)
            async with self._embeddings.reading(key, wait_s) as reading:
                await context.write(_header(reading.entry))
                if self._host and request.reader_host == self._host:
                    await self._share(reading, context)
                else:
                    await self._stream(reading, context)
        except Exception as error:
            await self._fail("fetch", error, context)

    async def _stream(self, reading: Reading, context: grpc.aio.ServicerContext) -> None:
        view = self._embeddings.view(reading.entry)
        async with aclosing(reading.ranges()) as ranges:
            async for start, stop in ranges:
                for first in range(start, stop, _CHUNK_BYTES):
                    last = min(first + _CHUNK_BYTES, stop)
                    await context.write(WireChunk(first, view[first:last]))
        await self._finish(reading.entry, context)

    async def _share(self, reading: Reading, context: grpc.aio.ServicerContext) -> None:
        """Says where the bytes are, and keeps them there until the reader ends the call, which
        cancels this; so does the reader's death.
        """
        memory, entry = self._embeddings.address, reading.entry
        shared = pb.FetchShared(
            pid=memory.pid, fd=memory.fd, name=memory.name, size_bytes=memory.size_bytes,
            offset=entry.offset,
        )  # fmt: skip
        await context.write(pb.FetchResponse(shared=shared))
        async with aclosing(reading.ranges()) as ranges:
            async for start, stop in ranges:
                ready = pb.FetchReady(offset=start, size_bytes=stop - start)
                await context.write(pb.FetchResponse(ready=ready))
        await self._finish(entry, context)
        self._metrics.shared_fetches.inc()
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_READ_S):
                await asyncio.Event().wait()

    async def _finish(self, entry: ArenaEntry, context: grpc.aio.ServicerContext) -> None:
        """The digest may be known only after the bytes are on their way."""
        digest = await self._embeddings.digest_of(entry)
        await context.write(pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest)))
        self._metrics.fetches.inc()
        self._metrics.fetched_bytes.inc(entry.spec.size_bytes)

    def _answer(self, encoded: Encoded, num_tokens: int) -> pb.EncodeResponse:
        self._metrics.requests.labels(encoded.origin.value).inc()
        return pb.EncodeResponse(
            source=_SOURCES[encoded.origin],
            num_tokens=num_tokens,
            lookup_s=encoded.lookup_s,
            queue_s=encoded.times.queue_s,
            preprocess_s=encoded.times.preprocess_s,
            forward_s=encoded.times.forward_s,
        )

    def _checked_grid(self, grid: pb.Grid) -> tuple[int, int, int]:
        merge = self._description.merge_size
        if grid.t != 1 or not grid.h or not grid.w or grid.h % merge or grid.w % merge:
            raise InvalidRequest(f"no image has a grid of {grid.t}x{grid.h}x{grid.w} patches")
        if grid.h * grid.w > self._description.max_image_patches:
            raise InvalidImage(
                f"the image has {grid.h * grid.w} patches; "
                f"at most {self._description.max_image_patches} are encoded here"
            )
        return grid.t, grid.h, grid.w

    async def _fail(
        self, method: str, error: Exception, context: grpc.aio.ServicerContext
    ) -> pb.EncodeResponse:
        """Ends the call with our error; never returns."""
        if not isinstance(error, TriptychError):
            logging.error("%s failed", method, exc_info=error)
            error = InternalError("the encoder failed")
        self._metrics.failures.labels(method, error.code).inc()
        return await abort(context, error)


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"an image key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _header(entry: ArenaEntry) -> pb.FetchResponse:
    spec = entry.spec
    return pb.FetchResponse(
        header=pb.FetchHeader(
            image_key=entry.key,
            dtype=_DTYPES[spec.dtype],
            num_features=spec.num_features,
            num_tokens=spec.num_tokens,
            hidden=spec.hidden,
        )
    )


def add_to_server(servicer: EncoderServicer, server: grpc.aio.Server) -> None:
    """As the generated function, but with our own serializer for Fetch."""
    handlers = {
        "Fetch": grpc.unary_stream_rpc_method_handler(
            servicer.Fetch,
            request_deserializer=pb.FetchRequest.FromString,
            response_serializer=serialize,
        )
    }
    pb_grpc.add_EncoderServicer_to_server(servicer, server)
    # The last registered wins.
    server.add_registered_method_handlers(SERVICE, handlers)  # pyright: ignore[reportAttributeAccessIssue]
