"""The encoder's gRPC methods: they make, send and store embeddings, videos and files.

Gateways call `Encode` for images, pairs of video frames and clients' embeddings, `Probe` for a
video, and `Upload` and `Download` for files that clients refer to later. Decoders call `Fetch`.
Every failure ends its call with an error of `services.common.errors`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from traceback import clear_frames
from typing import Any, ClassVar, NoReturn, cast

import grpc
import grpc.aio
import msgspec

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.fetch_wire import DTYPES, WireChunk, serialize
from services.common.embeddings.shared_memory import host_identity
from services.common.errors import (
    InternalError,
    InvalidRequest,
    InvalidVideo,
    NotFound,
    TriptychError,
    WrongImageKey,
)
from services.common.pb import encoder_pb2 as pb
from services.common.spans import span
from services.common.transport.rpc import Servicer, abort, adopt_metadata
from services.encoder.front.client_embeddings import ClientEmbeddings
from services.encoder.front.embeddings import Embeddings, Encoded, Work
from services.encoder.front.encode_inputs import InputReader, checked_key, share_of
from services.encoder.front.memory_tier import Reading
from services.encoder.front.message_reader import MessageReader
from services.encoder.front.uploaded_files import TTL_S, UploadedFiles
from services.encoder.front.video_store import StoredVideo, VideoStore
from services.encoder.metrics import EncoderMetrics

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
# A reader that does not end its call holds its entry in shared memory for at most this long.
_MAX_READ_S = 10.0
# A draining encoder stops after this long without a call. Gateways need up to a second to notice
# the drain, and decoders then still fetch the embeddings that were encoded here.
_QUIET_S = 2.0
_POLL_S = 0.05


class EncoderServicer(Servicer):
    """The encoder's gRPC methods.

    Args:
        description: what this encoder serves.
        embeddings: embeddings that are stored or computed now.
        metrics: the encoder's metrics.
        videos: files of videos that clients have sent.
        client_embeddings: the writer of embeddings that clients have computed.
        files: files that clients have uploaded.
        takes_videos: whether the model takes videos.
        max_read_bytes: the most bytes of messages and files in transit; see `MessageReader`.

    Attributes:
        messages: reader of the calls' messages.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]
    # The methods that read their message themselves, from a stream; see `Servicer`.
    READING = "Encode", "Probe", "Upload"
    SERIALIZERS: ClassVar = {"Fetch": serialize}

    def __init__(
        self,
        description: pb.DescribeEncoderResponse,
        embeddings: Embeddings,
        metrics: EncoderMetrics,
        videos: VideoStore,
        client_embeddings: ClientEmbeddings,
        files: UploadedFiles,
        *,
        takes_videos: bool,
        max_read_bytes: int,
    ) -> None:
        self.messages = MessageReader(max_read_bytes)
        self._description = description
        self._embeddings = embeddings
        self._metrics = metrics
        self._videos = videos
        self._client_embeddings = client_embeddings
        self._files = files
        self._takes_videos = takes_videos
        self._inputs = InputReader(description, embeddings, videos, takes_videos=takes_videos)
        self._host = host_identity()
        self._num_calls = 0
        self._last_call_at = -math.inf
        self._has_warned_of_keys = False

    async def drain(self, grace_s: float) -> None:
        """Waits until calls have ended and no more come, at most `grace_s`.

        All calls are served meanwhile, because decoders still fetch what was encoded here.
        """
        deadline = time.monotonic() + grace_s
        while (now := time.monotonic()) < deadline:
            quiet_at = self._last_call_at + _QUIET_S
            if not self._num_calls and now >= quiet_at:
                return
            await asyncio.sleep(min(deadline, max(quiet_at, now + _POLL_S)) - now)

    async def Describe(
        self, request: pb.DescribeEncoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEncoderResponse:
        return self._description

    async def Encode(self, request: object, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        """Makes an embedding available here or in Redis.

        On the wire, the call is a stream with one message (`READING`), so that the bytes of the
        message are counted before it is read.
        """
        async with self._call("encode", context) as parent:
            with span("encode", parent) as current:
                encoded, num_tokens = await self._encode(context)
                current.set(source=encoded.origin.value, num_tokens=num_tokens)
                current.set(lookup_s=encoded.lookup_s, **msgspec.structs.asdict(encoded.times))
            fields = {"source": encoded.origin.value, "tokens": num_tokens}
            log.info("encoded", extra={"fields": fields})
            self._metrics.requests.labels(encoded.origin.value).inc()
            origin = f"SOURCE_{encoded.origin.name}"
            return pb.EncodeResponse(source=origin, num_tokens=num_tokens)

    async def _encode(self, context: grpc.aio.ServicerContext) -> tuple[Encoded, int]:
        """Encodes a call's image, and returns the result and the number of tokens.

        The message is dropped before the call waits. `Embeddings` counts the bytes of one file for
        each encode. A call that joins an encode brings a second copy of the file, which nobody
        counts, so no call may hold its copy while it waits.
        """
        async with self.messages.read(context, pb.EncodeRequest) as message:
            share = share_of(message)
            inputs, key = await self._inputs.read(message)
            spec = self._embeddings.spec_of(inputs.unit)
            if inputs.is_embedding:
                encoded = await self._client_embeddings.store(key, message.image, spec)
                return encoded, spec.num_tokens
        encoding = self._embeddings.encode(key, Work(inputs.source, inputs.unit, share))
        del message, inputs
        return await encoding, spec.num_tokens

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends an embedding while it is being written, and its digest at the end."""
        async with self._call("fetch", context) as parent:
            key = checked_key(request.image_key)
            progress = FetchProgress(context) if request.tell_waiting else None
            timeout_s = context.time_remaining()
            async with self._embeddings.reading(key, timeout_s, progress) as reading:
                shared = bool(self._host) and request.reader_host == self._host
                size_bytes = reading.entry.spec.size_bytes
                with span("send embedding", parent, size_bytes=size_bytes, shared=shared):
                    await context.write(_header(reading.entry))
                    await self._send(reading, progress, context, shared=shared)
                if shared:  # the reader ends the call when it has copied the bytes, or dies
                    await asyncio.sleep(_MAX_READ_S)

    async def _send(
        self,
        reading: Reading,
        progress: "FetchProgress | None",
        context: grpc.aio.ServicerContext,
        *,
        shared: bool,
    ) -> None:
        """Sends the bytes of an embedding and its digest.

        A reader on this host gets the place in shared memory, and which ranges are written. The
        digest may be known only after all bytes have been sent.
        """
        entry, arena = reading.entry, reading.memory.arena
        if shared:
            place = pb.FetchShared(**asdict(arena.address), offset=entry.offset)
            await context.write(pb.FetchResponse(shared=place))
        view = arena.view(entry)
        async with aclosing(reading.ranges(progress)) as ranges:
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

    async def Probe(self, request: object, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        """Reads the container of a video, and holds the file for the encodes of its frames."""
        async with self._call("probe", context) as parent:
            with span("probe", parent) as current:
                held = await self._probe(context)
                current.set(num_frames=held.facts.num_frames, size_bytes=held.file.size_bytes)
            return pb.ProbeResponse(video_digest=held.digest, **asdict(held.facts))

    async def _probe(self, context: grpc.aio.ServicerContext) -> StoredVideo:
        """Returns the video of a call, once its container was read.

        The message is dropped while the file waits to be read: `VideoStore` has a copy, which it
        counts.
        """
        async with self.messages.read(context, pb.ProbeRequest) as message:
            if not self._takes_videos:
                raise InvalidVideo("this model takes no videos")
            if bool(message.video) == bool(message.video_digest):
                raise InvalidRequest("a probe has either a video or a video_digest")
            if message.video_digest:
                return self._videos.get(message.video_digest)
            taken = await self._videos.take(message.video, share_of(message))
        del message
        return await taken

    async def Upload(self, request: object, context: grpc.aio.ServicerContext) -> pb.UploadResponse:
        """Stores a file of a tenant, and returns its digest and how long it is stored."""
        async with self._call("upload", context):
            digest = await self._upload(context)
            return pb.UploadResponse(digest=digest, kept_s=TTL_S)

    async def _upload(self, context: grpc.aio.ServicerContext) -> bytes:
        """Stores the file of a call, and returns its digest.

        `_fail` clears the frames of functions that have ended with the error. `Upload` itself still
        runs then, so the message is a local variable of this function.
        """
        async with self.messages.read(context, pb.UploadRequest) as message:
            return await self._files.put(message.tenant, message.file)

    async def Download(
        self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext
    ) -> pb.DownloadResponse:
        """Returns a stored file of a tenant, or deletes it."""
        async with self._call("download", context):
            if request.forget:
                if not await self._files.delete(request.tenant, request.digest):
                    raise NotFound("no such file is kept")
                return pb.DownloadResponse()
            file = await self._files.get(request.tenant, request.digest)
            self.messages.count(len(file))
            cast("Any", context).add_done_callback(lambda _: self.messages.uncount(len(file)))
            return pb.DownloadResponse(file=file)

    @asynccontextmanager
    async def _call(self, method: str, context: grpc.aio.ServicerContext) -> AsyncGenerator[str]:
        """Runs a call, and ends it with an error of our tree if it fails.

        Yields the caller's `traceparent`.
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

    async def _fail(
        self, method: str, error: Exception, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        """Ends the call with an error of our tree."""
        # gRPC keeps the error in a reference cycle, and with it the frames and their message.
        clear_frames(error.__traceback__)
        if isinstance(error, TriptychError):
            level = logging.INFO
            if isinstance(error, WrongImageKey):
                # A caller that forges keys must not fill the log, so the warning is logged once.
                # The metric counts all of them.
                level = logging.DEBUG if self._has_warned_of_keys else logging.WARNING
                self._has_warned_of_keys = True
            fields = {"code": error.code, "peer": context.peer()}
            log.log(level, "%s failed: %s", method, error.message, extra={"fields": fields})
        else:
            log.error("%s failed", method, exc_info=error)
            error = InternalError("the encoder failed")
        self._metrics.failures.labels(method, error.code).inc()
        await abort(context, error)


class FetchProgress:
    """Tells the reader of a `Fetch` call, while it waits, whether an encode is under way."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def report(self, *, in_work: bool) -> None:
        """Writes one progress message to the call's stream."""
        waiting = pb.FetchWaiting(in_work=in_work)
        await self._context.write(pb.FetchResponse(waiting=waiting))


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
