"""The encoder's gRPC methods: proto ↔ embeddings. The only file of the encoder that knows gRPC.

Gateways call `Probe` and `Encode`, decoders `Fetch`. Requests are checked here; every failure ends
its call with an error of `services.common.errors`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
import msgspec

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.fetch_wire import DTYPES, WireChunk, serialize
from services.common.embeddings.shared_memory import host_identity
from services.common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidImage,
    InvalidRequest,
    InvalidVideo,
    NotFound,
    Overloaded,
    TriptychError,
    WrongImageKey,
)
from services.common.geometry import Geometry, Unit
from services.common.images.image_key import (
    KEY_BYTES,
    MAX_SALT_BYTES,
    embedding_key,
    frames_key,
    image_key,
    still_digest,
)
from services.common.pb import encoder_pb2 as pb
from services.common.pb import encoder_pb2_grpc as pb_grpc
from services.common.spans import span
from services.common.threads import INLINE_BYTES
from services.common.transport.rpc import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    abort,
    adopt_metadata,
    message_bytes,
)
from services.encoder.admission import Share
from services.encoder.brought import BroughtEmbeddings
from services.encoder.clips.held_videos import HeldVideo, HeldVideos
from services.encoder.embeddings import Embeddings, Encoded
from services.encoder.engine.messages import Source
from services.encoder.kept_files import KEPT_S, KeptFiles
from services.encoder.memory_tier import Reading, Word
from services.encoder.metrics import EncoderMetrics

log = logging.getLogger(__name__)

Request = TypeVar("Request", pb.EncodeRequest, pb.ProbeRequest, pb.UploadRequest)

SERVICE = "triptych.v1.Encoder"
_CHUNK_BYTES = 1 << 20
# Of a Fetch that has none: how long it waits for its embedding.
_FETCH_DEADLINE_S = 30.0
# An entry in shared memory is held at most this long for a reader that does not end its call.
_MAX_READ_S = 10.0
# A draining encoder stops when it has had no call for this long: gateways find out within a second
# that it drains, and decoders fetch what was encoded.
_QUIET_S = 2.0
_POLL_S = 0.05
_MESSAGE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Description:
    """What this encoder serves: the fields of DescribeEncoderResponse, before they are encoded."""

    model_name: str
    key_prefix: bytes
    like: EmbeddingSpec
    geometry: Geometry
    max_image_patches: int
    takes_videos: bool = False
    fingerprint: bytes = b""


class EncoderServicer(pb_grpc.EncoderServicer):
    """Translates and delegates."""

    def __init__(
        self,
        description: Description,
        embeddings: Embeddings,
        metrics: EncoderMetrics,
        videos: HeldVideos,
        brought: BroughtEmbeddings,
        files: KeptFiles,
        max_read_bytes: int = 4 * MAX_MESSAGE_BYTES,
    ) -> None:
        self._max_read_bytes = max_read_bytes
        self._bytes_under_way = 0  # of messages that arrive, and of files that leave
        self._description = description
        self._embeddings = embeddings
        self._metrics = metrics
        self._videos = videos
        self._brought = brought
        self._files = files
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

    @contextmanager
    def _reading(self, num_bytes: int) -> Generator[None]:
        """Counts a message while it is read and hashed; then the embeddings' queue counts it."""
        self._count(num_bytes)
        try:
            yield
        finally:
            self._bytes_under_way -= num_bytes

    def _count(self, num_bytes: int) -> None:
        """Raises Overloaded: calls under way have too many bytes."""
        if self._bytes_under_way and self._bytes_under_way + num_bytes > self._max_read_bytes:
            raise Overloaded("calls under way have too many bytes", retry_after_s=1)
        self._bytes_under_way += num_bytes

    @contextmanager
    def _call(self) -> Generator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._last_call_at = time.monotonic()

    async def Describe(
        self, request: pb.DescribeEncoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEncoderResponse:
        known = self._description
        return pb.DescribeEncoderResponse(
            model_name=known.model_name,
            key_prefix=known.key_prefix,
            dtype=DTYPES[known.like.dtype],
            num_features=known.like.num_features,
            hidden=known.like.hidden,
            max_image_patches=known.max_image_patches,
            fingerprint=known.fingerprint,
            protocol=PROTOCOL,
        )

    async def Probe(self, request: object, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        """Registered as `Encode` is."""
        parent = adopt_metadata(context)
        try:
            with self._call(), span("probe", parent) as current:
                num_bytes = message_bytes(context)
                with self._reading(num_bytes):
                    message = await _message(context, num_bytes, pb.ProbeRequest)
                    held = await self._probed(message)
                current.set(num_frames=held.facts.num_frames, size_bytes=held.file.size_bytes)
            return pb.ProbeResponse(video_digest=held.digest, **asdict(held.facts))
        except Exception as error:
            return await self._fail("probe", error, context)

    async def _probed(self, message: pb.ProbeRequest) -> HeldVideo:
        if not self._description.takes_videos:
            raise InvalidVideo("this model takes no videos")
        if bool(message.video) == bool(message.video_digest):
            raise InvalidRequest("a probe has either a video or a video_digest")
        if message.video:
            return await self._videos.probe(message.video)
        return self._videos.get(message.video_digest)

    async def Encode(self, request: object, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        """On the wire a call with one message; registered as one that reads its messages itself,
        so that the message's bytes are counted before gRPC takes them from the connection.
        """
        parent = adopt_metadata(context)
        try:
            with self._call(), span("encode", parent) as current:
                encoded, num_tokens = await self._encoded(context)
                current.set(source=encoded.origin.value, num_tokens=num_tokens, **_seconds(encoded))
            fields = {"source": encoded.origin.value, "tokens": num_tokens}
            log.info("encoded", extra={"fields": fields})
            self._metrics.requests.labels(encoded.origin.value).inc()
            origin = f"SOURCE_{encoded.origin.name}"
            return pb.EncodeResponse(source=origin, num_tokens=num_tokens, **_seconds(encoded))
        except Exception as error:
            return await self._fail("encode", error, context)

    async def _encoded(self, context: grpc.aio.ServicerContext) -> tuple[Encoded, int]:
        """What became of a call's image, and its tokens. While the call waits, only what is queued
        keeps the file: nothing counts the copies of calls that join.
        """
        num_bytes = message_bytes(context)
        with self._reading(num_bytes):
            message = await _message(context, num_bytes, pb.EncodeRequest)
            unit, share = self._checked_unit(message), _share(message)
            source, key = await self._source(message, unit)
            spec = self._embeddings.spec_of(unit)
            if message.is_embedding:  # no queue counts it
                return await self._brought.bring(key, source.image, spec), spec.num_tokens
        encoding = self._embeddings.encode(key, source, unit, share)
        del message, source
        return await encoding, spec.num_tokens

    async def Upload(self, request: object, context: grpc.aio.ServicerContext) -> pb.UploadResponse:
        """Registered as `Encode` is."""
        adopt_metadata(context)
        try:
            with self._call():
                num_bytes = message_bytes(context)
                with self._reading(num_bytes):
                    message = await _message(context, num_bytes, pb.UploadRequest)
                    digest = await self._files.put(message.tenant, message.file)
            return pb.UploadResponse(digest=digest, kept_s=KEPT_S)
        except Exception as error:
            return await self._fail("upload", error, context)

    async def Download(
        self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext
    ) -> pb.DownloadResponse:
        adopt_metadata(context)
        try:
            with self._call():
                if request.forget:
                    if not await self._files.delete(request.tenant, request.digest):
                        raise NotFound("no such file is kept")
                    return pb.DownloadResponse()
                file = await self._files.get(request.tenant, request.digest)
                self._count(len(file))
                cast("Any", context).add_done_callback(lambda _: self._sent(len(file)))
                return pb.DownloadResponse(file=file)
        except Exception as error:
            return await self._fail("download", error, context)

    def _sent(self, num_bytes: int) -> None:
        self._bytes_under_way -= num_bytes

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        parent = adopt_metadata(context)
        try:
            with self._call():
                await self._fetch(request, parent, context)
        except Exception as error:
            await self._fail("fetch", error, context)

    async def _fetch(
        self, request: pb.FetchRequest, parent: str, context: grpc.aio.ServicerContext
    ) -> None:
        key = _checked_key(request.image_key)
        left_s = context.time_remaining()
        wait_s = _FETCH_DEADLINE_S if left_s is None else left_s
        word = partial(_tell_waiting, context) if request.tell_waiting else None
        async with self._embeddings.reading(key, wait_s, word) as reading:
            shared = bool(self._host) and request.reader_host == self._host
            size_bytes = reading.entry.spec.size_bytes
            with span("send embedding", parent, size_bytes=size_bytes, shared=shared):
                await context.write(_header(reading.entry))
                await (self._share if shared else self._stream)(reading, word, context)
            if shared:  # the reader ends the call when it has copied the bytes, or dies
                await asyncio.sleep(_MAX_READ_S)

    async def _stream(
        self, reading: Reading, word: Word | None, context: grpc.aio.ServicerContext
    ) -> None:
        view = reading.memory.arena.view(reading.entry)
        async with aclosing(reading.ranges(word)) as ranges:
            async for start, stop in ranges:
                for first in range(start, stop, _CHUNK_BYTES):
                    last = min(first + _CHUNK_BYTES, stop)
                    await context.write(WireChunk(first, view[first:last]))
        await self._finish(reading, context)

    async def _share(
        self, reading: Reading, word: Word | None, context: grpc.aio.ServicerContext
    ) -> None:
        """Says where the bytes are and which of them are written."""
        memory = asdict(reading.memory.arena.address)
        shared = pb.FetchShared(**memory, offset=reading.entry.offset)
        await context.write(pb.FetchResponse(shared=shared))
        async with aclosing(reading.ranges(word)) as ranges:
            async for start, stop in ranges:
                ready = pb.FetchReady(offset=start, size_bytes=stop - start)
                await context.write(pb.FetchResponse(ready=ready))
        await self._finish(reading, context)
        self._metrics.shared_fetches.inc()

    async def _finish(self, reading: Reading, context: grpc.aio.ServicerContext) -> None:
        """Sends the digest, which may be known only after all bytes have been sent."""
        digest = await reading.memory.digest_of(reading.entry)
        await context.write(pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest)))
        self._metrics.fetches.inc()
        self._metrics.fetched_bytes.inc(reading.entry.spec.size_bytes)

    async def _source(self, request: pb.EncodeRequest, unit: Unit) -> tuple[Source, bytes]:
        """What the unit is made from, and its key, which the caller's must be: 0.15 ms per MiB of
        an image.
        """
        given = _checked_key(request.image_key)
        if len(request.cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
        held = self._videos.get(request.video_digest) if request.video_digest else None
        source = Source(request.image, request.second_image, held.video if held else None)
        if unit.frames is None and (held or source.second):
            raise InvalidRequest("an image has neither a video nor a second image")
        if held and source.num_bytes:
            raise InvalidRequest("frames are of a video or images, not both")
        prefix, salt = self._description.key_prefix, request.cache_salt
        key_of = partial(_key, prefix, salt, unit, source, held)
        if request.is_embedding:
            if unit.frames is not None:
                raise InvalidRequest("an embedding is no pair of frames")
            key_of = partial(embedding_key, prefix, source.image, unit=unit, salt=salt)
        key = key_of() if source.num_bytes <= INLINE_BYTES else await asyncio.to_thread(key_of)
        if key != given:
            raise WrongImageKey("the image key is not that of this image")
        return source, key

    def _checked_unit(self, request: pb.EncodeRequest) -> Unit:
        grid, most = request.grid, self._description.max_image_patches
        unit = Unit((grid.t, grid.h, grid.w))
        self._description.geometry.check(unit)
        if unit.num_patches > most:
            raise InvalidImage(
                f"the image has {unit.num_patches} patches; at most {most} are encoded here"
            )
        if not request.HasField("frames"):
            return unit
        if not self._description.takes_videos:
            raise InvalidVideo("this model takes no videos")
        return replace(unit, frames=(request.frames.first, request.frames.second))

    async def _fail(
        self, method: str, error: Exception, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        """Ends the call with an error of our tree."""
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


async def _message(
    context: grpc.aio.ServicerContext, max_bytes: int, kind: "type[Request]"
) -> "Request":
    """A call's message.

    Raises:
        DeadlineExceeded: it does not arrive.
        InvalidRequest: there is none, or it is longer than `max_bytes`.
    """
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


def _key(prefix: bytes, salt: bytes, unit: Unit, source: Source, held: HeldVideo | None) -> bytes:
    """The key of a unit.

    Raises:
        InvalidRequest: the video has no such frames.
    """
    if unit.frames is None:
        return image_key(prefix, source.image, unit=unit, salt=salt)
    if held is None:
        first = still_digest(source.image)
        second = still_digest(source.second) if source.second else first
    else:
        try:
            first, second = map(held.frame_digest, unit.frames)
        except IndexError:
            raise InvalidRequest(
                f"the video has {held.facts.num_frames} frames, not all of {unit.frames}"
            ) from None
    return frames_key(prefix, first, second, grid=unit.grid, salt=salt)


def _share(request: pb.EncodeRequest) -> Share:
    """For whom the image is.

    Raises:
        InvalidRequest: the weight is none.
    """
    weight = request.tenant_weight or 1.0
    if not 0.0 < weight < math.inf:
        raise InvalidRequest(f"a tenant's weight is positive, not {weight}")
    return Share(request.tenant, weight)


async def _tell_waiting(context: grpc.aio.ServicerContext, in_work: bool) -> None:
    await context.write(pb.FetchResponse(waiting=pb.FetchWaiting(in_work=in_work)))


def _seconds(encoded: Encoded) -> dict[str, float]:
    """Time per stage, under the names of EncodeResponse."""
    return {"lookup_s": encoded.lookup_s, **msgspec.structs.asdict(encoded.times)}


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


def add_to_server(servicer: EncoderServicer, server: grpc.aio.Server) -> None:
    """Registers the servicer as the generated function does, but Probe, Encode and Upload read
    their messages themselves, and Fetch has our serializer.
    """
    reading: list[tuple[Any, Any, Any]] = [
        (servicer.Encode, pb.EncodeRequest, pb.EncodeResponse),
        (servicer.Probe, pb.ProbeRequest, pb.ProbeResponse),
        (servicer.Upload, pb.UploadRequest, pb.UploadResponse),
    ]
    handlers: dict[str, Any] = {
        method.__name__: grpc.stream_unary_rpc_method_handler(
            method, request.FromString, response.SerializeToString
        )
        for method, request, response in reading
    }
    handlers["Fetch"] = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, pb.FetchRequest.FromString, serialize
    )
    pb_grpc.add_EncoderServicer_to_server(servicer, server)
    # The handler registered last takes precedence.
    server.add_registered_method_handlers(SERVICE, handlers)  # pyright: ignore[reportAttributeAccessIssue]
