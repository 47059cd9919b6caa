"""The encoder's gRPC methods.

Gateways call five of them. `Describe` returns what the encoder serves. `Encode` makes an embedding
available: it encodes an image or a pair of video frames, or stores an embedding that a client has
computed itself. `Probe` stores a video's file and returns how many frames the video has, their rate
and their size. `Upload` and `Download` store and return files that clients name in later requests.
Decoders call `Fetch`, which sends them an embedding. A call that fails ends with an error of
`services.common.errors`.
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

from services.common.embeddings.fetch_wire import WireChunk, serialize
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
from services.encoder.front.embeddings import Embeddings, Encoded
from services.encoder.front.encode_inputs import InputReader, checked_key, share_of
from services.encoder.front.fetch_messages import FetchProgress, header_of
from services.encoder.front.message_reader import MessageReader
from services.encoder.front.reading import Reading
from services.encoder.front.uploaded_files import TTL_S, UploadedFiles
from services.encoder.front.video_store import StoredVideo, VideoStore
from services.encoder.metrics import EncoderMetrics

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
# A decoder on the same host copies an embedding out of shared memory, and then ends its `Fetch`
# call. If it does not end the call, the call ends after this time, and the memory can be reused.
_MAX_READ_S = 10.0
# A draining encoder stops when it has had no call for this long. Gateways need up to a second to
# notice the drain. After that, decoders still fetch embeddings that were encoded here.
_QUIET_S = 2.0
_POLL_S = 0.05


class EncoderServicer(Servicer):
    """The encoder's gRPC methods.

    Args:
        description: answer to `Describe`: the model that this encoder serves, and its limits.
        embeddings: the embeddings, both stored ones and those in computation.
        metrics: the encoder's metrics.
        videos: the video files that gateways have sent.
        client_embeddings: the writer of embeddings that clients have computed themselves.
        files: the files that clients have uploaded.
        takes_videos: True if the model takes videos.
        max_read_bytes: the most bytes of messages and files in transit; see `MessageReader`.

    Attributes:
        messages: reader of the calls' messages.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]
    # The handlers of these methods call `MessageReader` for the request's message, so that its
    # bytes are counted before they are received. All other handlers get the message from gRPC.
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
        """Waits until no call has come for `_QUIET_S` seconds, but at most `grace_s` seconds.

        Calls are served meanwhile, because decoders still fetch embeddings that were encoded here.
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
        """Makes sure that decoders can get an embedding, from this encoder or from Redis."""
        async with self._call("encode", context) as parent:
            with span("encode", parent) as current:
                encoded, num_tokens = await self._encode(context)
                current.set(source=encoded.origin.value, num_tokens=num_tokens)
                current.set(**{f"{stage}_s": s for stage, s in encoded.seconds.items()})
            fields = {"source": encoded.origin.value, "tokens": num_tokens}
            log.info("encoded", extra={"fields": fields})
            self._metrics.requests.labels(encoded.origin.value).inc()
            origin, speed = f"SOURCE_{encoded.origin.name}", self._metrics.patch_s
            return pb.EncodeResponse(source=origin, num_tokens=num_tokens, patch_s=speed)

    async def _encode(self, context: grpc.aio.ServicerContext) -> tuple[Encoded, int]:
        """Encodes the image of a call. Returns the result, and the number of image tokens.

        The message with the image's file is dropped before the call waits for the result. Several
        calls may wait for the same image, each of which has sent a copy of the file. `TowerTier`
        holds one copy and counts its bytes; the other copies must not stay in memory uncounted.
        """
        async with self.messages.read(context, pb.EncodeRequest) as message:
            share = share_of(message)
            inputs, key = await self._inputs.read(message)
            spec = self._embeddings.spec_of(inputs.unit)
            if inputs.is_embedding:
                encoded = await self._client_embeddings.store(key, message.image, spec)
                return encoded, spec.num_tokens
        encoding = self._embeddings.encode(key, inputs.work(share))
        del message, inputs
        return await encoding, spec.num_tokens

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends an embedding. If the engine still computes it, each part is sent as soon as it is
        written. The embedding's digest comes last.
        """
        async with self._call("fetch", context) as parent:
            key = checked_key(request.image_key)
            progress = FetchProgress(context) if request.tell_waiting else None
            timeout_s = context.time_remaining()
            async with self._embeddings.reading(key, timeout_s, progress) as reading:
                shared = bool(self._host) and request.reader_host == self._host
                size_bytes = reading.entry.spec.size_bytes
                with span("send embedding", parent, size_bytes=size_bytes, shared=shared):
                    await context.write(header_of(reading.entry))
                    await self._send(reading, context, shared=shared)
                if shared:  # The reader ends the call when it has copied the bytes or died.
                    await asyncio.sleep(_MAX_READ_S)

    async def _send(
        self, reading: Reading, context: grpc.aio.ServicerContext, *, shared: bool
    ) -> None:
        """Sends the bytes of an embedding, and then its digest.

        A reader on this host gets no bytes. It gets the embedding's place in shared memory, and the
        byte ranges of the embedding as soon as they are written there.
        """
        entry, store = reading.entry, self._embeddings.store
        if shared:
            place = pb.FetchShared(**asdict(store.arena.address), offset=entry.offset)
            await context.write(pb.FetchResponse(shared=place))
        view = store.arena.view(entry)
        async with aclosing(reading.ranges()) as ranges:
            async for start, stop in ranges:
                if shared:
                    ready = pb.FetchReady(offset=start, size_bytes=stop - start)
                    await context.write(pb.FetchResponse(ready=ready))
                    continue
                for first in range(start, stop, _CHUNK_BYTES):
                    last = min(first + _CHUNK_BYTES, stop)
                    await context.write(WireChunk(first, view[first:last]))
        digest = await store.digests.of(entry)
        await context.write(pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest)))
        self._metrics.fetches.inc()
        self._metrics.shared_fetches.inc(shared)
        self._metrics.fetched_bytes.inc(entry.spec.size_bytes)

    async def Probe(self, request: object, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        """Reads how many frames a video has, their rate and their size, and stores the video's
        file, from which later `Encode` calls decode pairs of frames.
        """
        async with self._call("probe", context) as parent:
            with span("probe", parent) as current:
                held = await self._probe(context)
                current.set(num_frames=held.facts.num_frames, size_bytes=held.file.size_bytes)
            return pb.ProbeResponse(video_digest=held.digest, **held.facts.public)

    async def _probe(self, context: grpc.aio.ServicerContext) -> StoredVideo:
        """Returns the video of a call. `VideoStore` holds and counts its file, so the message,
        which has a second copy, is dropped before the call waits.
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

        This is a function of its own so that the message is freed if the call fails: an error
        refers to the variables of each function through which it was raised. `_fail` clears those
        of `_upload`, which has ended by then, but not those of `Upload`, which still runs.
        """
        async with self.messages.read(context, pb.UploadRequest) as message:
            return await self._files.put(message.tenant, message.file)

    async def Download(
        self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext
    ) -> pb.DownloadResponse:
        """Returns a stored file of a tenant. With `forget`, deletes it instead."""
        async with self._call("download", context):
            if request.forget:
                if not await self._files.delete(request.tenant, request.digest):
                    raise NotFound("no such file is stored")
                return pb.DownloadResponse()
            file = await self._files.get(request.tenant, request.digest)
            self.messages.count(len(file))
            cast("Any", context).add_done_callback(lambda _: self.messages.uncount(len(file)))
            return pb.DownloadResponse(file=file)

    @asynccontextmanager
    async def _call(self, method: str, context: grpc.aio.ServicerContext) -> AsyncGenerator[str]:
        """Wraps the handling of a call: counts it as running, and if its `with` block raises, ends
        the call with a `TriptychError`. Yields the caller's `traceparent`.
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
        """Ends a call with an error. Any error but a `TriptychError` becomes an `InternalError`."""
        # gRPC holds the error in a reference cycle. Without this call, the cycle would also hold
        # the local variables of all functions in the traceback, such as the call's message. The
        # variables of the gRPC method itself are not cleared, because it still runs.
        clear_frames(error.__traceback__)
        if isinstance(error, TriptychError):
            level = logging.INFO
            if isinstance(error, WrongImageKey):
                # The warning is logged once, so that a caller who forges keys cannot fill the log.
                # The metric `failures` counts every such call.
                level = logging.DEBUG if self._has_warned_of_keys else logging.WARNING
                self._has_warned_of_keys = True
            fields = {"code": error.code, "peer": context.peer()}
            log.log(level, "%s failed: %s", method, error.message, extra={"fields": fields})
        else:
            log.error("%s failed", method, exc_info=error)
            error = InternalError("the encoder failed")
        self._metrics.failures.labels(method, error.code).inc()
        await abort(context, error)
