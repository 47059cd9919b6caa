"""The encoder's gRPC methods of an image, proto ↔ embeddings, until they are drained.

Gateways call `Encode`, decoders `Fetch`; `media_service` has what else there is. Requests are
checked here; every failure ends its call with an error of `services.common.errors`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from traceback import clear_frames
from typing import ClassVar, NoReturn, TypeVar, cast

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.fetch_wire import DTYPES, WireChunk, serialize
from services.common.embeddings.shared_memory import host_identity
from services.common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidImage,
    InvalidRequest,
    Overloaded,
    TriptychError,
    WrongImageKey,
)
from services.common.geometry import Unit
from services.common.images.image_key import KEY_BYTES, MAX_SALT_BYTES, image_key
from services.common.pb import encoder_pb2 as pb
from services.common.spans import span
from services.common.threads import INLINE_BYTES
from services.common.transport.rpc import Servicer, abort, adopt_metadata, message_bytes
from services.encoder.engine.messages import Source
from services.encoder.front.admission import Share
from services.encoder.front.embeddings import Embeddings, Encoded, Work
from services.encoder.front.memory_tier import Reading, Word
from services.encoder.metrics import EncoderMetrics

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)

_CHUNK_BYTES = 1 << 20
# An entry in shared memory is held at most this long for a reader that does not end its call.
_MAX_READ_S = 10.0
# A draining encoder stops when it has had no call for this long: gateways find out within a second
# that it drains, and decoders fetch what was encoded.
_QUIET_S = 2.0
_POLL_S = 0.05
_MESSAGE_TIMEOUT_S = 30.0


class EncoderServicer(Servicer):
    """Translates and delegates.

    Args:
        max_read_bytes: of messages that arrive, and of files that leave, at a time.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]
    READING = "Encode", "Probe", "Upload"
    SERIALIZERS: ClassVar = {"Fetch": serialize}

    def __init__(
        self,
        description: pb.DescribeEncoderResponse,
        embeddings: Embeddings,
        metrics: EncoderMetrics,
        max_read_bytes: int,
    ) -> None:
        self._max_read_bytes = max_read_bytes
        self._bytes_under_way = 0
        self._description = description
        self._embeddings = embeddings
        self._metrics = metrics
        self._host = host_identity()
        self._num_calls = 0
        self._last_call_at = -math.inf
        self._has_warned_of_keys = False

    async def drain(self, grace_s: float) -> None:
        """Waits until calls have ended and no more come, at most `grace_s`. All are served
        meanwhile: what was encoded here has yet to be fetched.
        """
        deadline = time.monotonic() + grace_s
        while (now := time.monotonic()) < deadline:
            quiet_at = self._last_call_at + _QUIET_S
            if not self._num_calls and now >= quiet_at:
                return
            await asyncio.sleep(min(deadline, max(quiet_at, now + _POLL_S)) - now)

    @asynccontextmanager
    async def _message(
        self, context: grpc.aio.ServicerContext, kind: type[Request]
    ) -> AsyncGenerator[Request]:
        """A call's message, counted while it is read and hashed; then the embeddings' queue counts
        it.

        Raises:
            Overloaded: calls under way have too many bytes.
            DeadlineExceeded: it does not arrive.
            InvalidRequest: there is none, or it is longer than its caller said.
        """
        num_bytes = message_bytes(context)
        self._count(num_bytes)
        try:
            yield await _read(context, num_bytes, kind)
        finally:
            self._bytes_under_way -= num_bytes

    def _count(self, num_bytes: int) -> None:
        """Raises Overloaded: calls under way have too many bytes."""
        if self._bytes_under_way and self._bytes_under_way + num_bytes > self._max_read_bytes:
            raise Overloaded("calls under way have too many bytes", retry_after_s=1)
        self._bytes_under_way += num_bytes

    @asynccontextmanager
    async def _call(self, method: str, context: grpc.aio.ServicerContext) -> AsyncGenerator[str]:
        """A call, whose failure ends it with an error of our tree; gives the caller's
        `traceparent`.
        """
        parent = adopt_metadata(context)
        self._num_calls += 1
        try:
            yield parent
        except Exception as error:
            await self._fail(method, error, context)
        finally:
            self._num_calls -= 1
            self._last_call_at = time.monotonic()

    async def Describe(
        self, request: pb.DescribeEncoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEncoderResponse:
        return self._description

    async def Encode(self, request: object, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        """On the wire a call with one message, see `READING`."""
        async with self._call("encode", context) as parent:
            with span("encode", parent) as current:
                encoded, num_tokens = await self._encoded(context)
                current.set(source=encoded.origin.value, num_tokens=num_tokens)
                current.set(lookup_s=encoded.lookup_s, **msgspec.structs.asdict(encoded.times))
            fields = {"source": encoded.origin.value, "tokens": num_tokens}
            log.info("encoded", extra={"fields": fields})
            self._metrics.requests.labels(encoded.origin.value).inc()
            origin = f"SOURCE_{encoded.origin.name}"
            return pb.EncodeResponse(source=origin, num_tokens=num_tokens)

    async def _encoded(self, context: grpc.aio.ServicerContext) -> tuple[Encoded, int]:
        """What became of a call's image, and its tokens. While the call waits, only what is queued
        keeps the file: nothing counts the copies of calls that join.
        """
        async with self._message(context, pb.EncodeRequest) as message:
            unit, share = self._checked_unit(message), share_of(message)
            source, key = await self._source(message, unit)
            spec = self._embeddings.spec_of(unit)
            if (brought := await self._bring(message, key, spec)) is not None:
                return brought, spec.num_tokens
        encoding = self._embeddings.encode(key, Work(source, unit, share))
        del message, source
        return await encoding, spec.num_tokens

    async def _bring(
        self, request: pb.EncodeRequest, key: bytes, spec: EmbeddingSpec
    ) -> Encoded | None:
        """What became of a call that brings its embedding, which no queue counts; None: it does
        not.
        """
        return None

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._call("fetch", context) as parent:
            key = _checked_key(request.image_key)
            word = partial(_tell_waiting, context) if request.tell_waiting else None
            async with self._embeddings.reading(key, context.time_remaining(), word) as reading:
                shared = bool(self._host) and request.reader_host == self._host
                size_bytes = reading.entry.spec.size_bytes
                with span("send embedding", parent, size_bytes=size_bytes, shared=shared):
                    await context.write(_header(reading.entry))
                    await self._send(reading, word, context, shared=shared)
                if shared:  # the reader ends the call when it has copied the bytes, or dies
                    await asyncio.sleep(_MAX_READ_S)

    async def _send(
        self,
        reading: Reading,
        word: Word | None,
        context: grpc.aio.ServicerContext,
        *,
        shared: bool,
    ) -> None:
        """The bytes as they are written, or where they are and which of them are written; and the
        digest, which may be known only after all bytes have been sent.
        """
        entry, arena = reading.entry, reading.memory.arena
        if shared:
            place = pb.FetchShared(**asdict(arena.address), offset=entry.offset)
            await context.write(pb.FetchResponse(shared=place))
        view = arena.view(entry)
        async with aclosing(reading.ranges(word)) as ranges:
            async for start, stop in ranges:
                if shared:
                    ready = pb.FetchReady(offset=start, size_bytes=stop - start)
                    await context.write(pb.FetchResponse(ready=ready))
                    continue
                for first in range(start, stop, _CHUNK_BYTES):
                    last = min(first + _CHUNK_BYTES, stop)
                    await context.write(WireChunk(first, view[first:last]))
        digest = await reading.memory.digest_of(entry)
        await context.write(pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest)))
        self._metrics.fetches.inc()
        self._metrics.shared_fetches.inc(shared)
        self._metrics.fetched_bytes.inc(entry.spec.size_bytes)

    async def _source(self, request: pb.EncodeRequest, unit: Unit) -> tuple[Source, bytes]:
        """What the unit is made from, and its key, which the caller's must be: 0.15 ms per MiB of
        an image.
        """
        given = _checked_key(request.image_key)
        if len(request.cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
        source, key_of = self._made_from(request, unit)
        key = key_of() if source.num_bytes <= INLINE_BYTES else await asyncio.to_thread(key_of)
        if key != given:
            raise WrongImageKey("the image key is not that of this image")
        return source, key

    def _made_from(
        self, request: pb.EncodeRequest, unit: Unit
    ) -> tuple[Source, Callable[[], bytes]]:
        """What the unit is made from, and what computes its key: those of a still image."""
        source, salt = Source(request.image), request.cache_salt
        prefix = self._description.key_prefix
        return source, partial(image_key, prefix, source.image, unit=unit, salt=salt)

    def _checked_unit(self, request: pb.EncodeRequest) -> Unit:
        grid, most = request.grid, self._description.max_image_patches
        unit = Unit((grid.t, grid.h, grid.w))
        self._embeddings.geometry.check(unit)
        if unit.num_patches > most:
            raise InvalidImage(
                f"the image has {unit.num_patches} patches; at most {most} are encoded here"
            )
        return unit

    async def _fail(
        self, method: str, error: Exception, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        """Ends the call with an error of our tree."""
        # gRPC keeps it in a cycle, and with it what the call's functions had: its message.
        clear_frames(error.__traceback__)
        if isinstance(error, TriptychError):
            level = logging.INFO
            if isinstance(error, WrongImageKey):
                # Once: a caller that forges keys must not fill the log. The metric counts all.
                level = logging.DEBUG if self._has_warned_of_keys else logging.WARNING
                self._has_warned_of_keys = True
            fields = {"code": error.code, "peer": context.peer()}
            log.log(level, "%s failed: %s", method, error.message, extra={"fields": fields})
        else:
            log.error("%s failed", method, exc_info=error)
            error = InternalError("the encoder failed")
        self._metrics.failures.labels(method, error.code).inc()
        await abort(context, error)


async def _read(context: grpc.aio.ServicerContext, max_bytes: int, kind: type[Request]) -> Request:
    try:
        async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
            request = cast("object", await context.read())
    except TimeoutError:
        raise DeadlineExceeded("the call's message did not arrive in time") from None
    if not isinstance(request, kind):  # the end of the caller's messages
        raise InvalidRequest("the call has no message")
    if request.ByteSize() > max_bytes:
        raise InvalidRequest("the message is longer than its caller said")
    return request


def share_of(request: pb.EncodeRequest | pb.ProbeRequest) -> Share:
    """The tenant of a call, with the weight of its share.

    Raises:
        InvalidRequest: the weight is not a positive number.
    """
    weight = request.tenant_weight or 1.0
    if not 0.0 < weight < math.inf:
        raise InvalidRequest(f"a tenant's weight is positive, not {weight}")
    return Share(request.tenant, weight)


async def _tell_waiting(context: grpc.aio.ServicerContext, in_work: bool) -> None:
    await context.write(pb.FetchResponse(waiting=pb.FetchWaiting(in_work=in_work)))


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"an image key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _header(entry: ArenaEntry) -> pb.FetchResponse:
    spec = entry.spec
    return pb.FetchResponse(
        header=pb.FetchHeader(
            image_key=entry.key,
            dtype=DTYPES[spec.dtype],
            num_features=spec.num_features,
            num_tokens=spec.num_tokens,
            hidden=spec.hidden,
        )
    )
