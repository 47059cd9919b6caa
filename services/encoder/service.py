"""proto ↔ embeddings. The only file of the encoder that knows gRPC; no torch."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio

from services.common.embedding import EmbeddingSpec
from services.common.errors import InternalError, InvalidImage, InvalidRequest, TriptychError
from services.common.image_key import KEY_BYTES
from services.common.pb import encoder_pb2 as pb
from services.common.pb import encoder_pb2_grpc as pb_grpc
from services.common.rpc import abort
from services.encoder.embeddings import Embeddings, Encoded, Origin
from services.encoder.metrics import EncoderMetrics

SERVICE = "triptych.v1.Encoder"
_CHUNK_BYTES = 1 << 20
# A Fetch waits this long for work on its key, whatever its own deadline.
_MAX_FETCH_WAIT_S = 30.0
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

    async def Describe(
        self, request: pb.DescribeEncoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEncoderResponse:
        """See the proto."""
        known = self._description
        return pb.DescribeEncoderResponse(
            model_name=known.model_name,
            key_prefix=known.key_prefix,
            dtype=_DTYPES[known.like.dtype],
            levels=known.like.levels,
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

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        """See the proto."""
        try:
            key = _checked_key(request.image_key)
            left_s = context.time_remaining()
            wait_s = _MAX_FETCH_WAIT_S if left_s is None else min(left_s, _MAX_FETCH_WAIT_S)
            async for part in self._parts(key, wait_s):
                yield part
        except Exception as error:
            await self._fail("fetch", error, context)

    async def _parts(self, key: bytes, wait_s: float) -> AsyncIterator[pb.FetchResponse]:
        async with self._embeddings.entry(key, wait_s) as entry:
            spec = entry.spec
            yield pb.FetchResponse(
                header=pb.FetchHeader(
                    image_key=key,
                    dtype=_DTYPES[spec.dtype],
                    levels=spec.levels,
                    num_tokens=spec.num_tokens,
                    hidden=spec.hidden,
                )
            )
            view = self._embeddings.view(entry)
            for start in range(0, len(view), _CHUNK_BYTES):
                data = bytes(view[start : start + _CHUNK_BYTES])
                yield pb.FetchResponse(chunk=pb.FetchChunk(offset=start, data=data))
            digest = await self._embeddings.digest_of(entry)
            yield pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest))
            self._metrics.fetches.inc()
            self._metrics.fetched_bytes.inc(len(view))

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
