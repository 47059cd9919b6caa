"""The encoder's gRPC methods beside those of an image: videos, and what clients bring.

Gateways call `Probe` for a video, `Upload` and `Download` for files that clients name again, and
`Encode` also for pairs of frames and for embeddings that clients have.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import grpc.aio

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.errors import InvalidRequest, InvalidVideo, NotFound
from services.common.geometry import Unit
from services.common.images.image_key import embedding_key, frames_key, still_digest
from services.common.pb import encoder_pb2 as pb
from services.common.spans import span
from services.encoder.engine.messages import Source
from services.encoder.front.brought import BroughtEmbeddings
from services.encoder.front.embeddings import Embeddings, Encoded
from services.encoder.front.held_videos import HeldVideo, HeldVideos
from services.encoder.front.kept_files import KEPT_S, KeptFiles
from services.encoder.front.service import EncoderServicer, share_of
from services.encoder.metrics import EncoderMetrics


class MediaServicer(EncoderServicer):
    """All calls of the encoder; for the arguments see `EncoderServicer`."""

    def __init__(
        self,
        description: pb.DescribeEncoderResponse,
        embeddings: Embeddings,
        metrics: EncoderMetrics,
        videos: HeldVideos,
        brought: BroughtEmbeddings,
        files: KeptFiles,
        *,
        takes_videos: bool,
        max_read_bytes: int,
    ) -> None:
        super().__init__(description, embeddings, metrics, max_read_bytes)
        self._videos = videos
        self._brought = brought
        self._files = files
        self._takes_videos = takes_videos

    async def Probe(self, request: object, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        async with self._call("probe", context) as parent:
            with span("probe", parent) as current:
                held = await self._probed(context)
                current.set(num_frames=held.facts.num_frames, size_bytes=held.file.size_bytes)
            return pb.ProbeResponse(video_digest=held.digest, **asdict(held.facts))

    async def _probed(self, context: grpc.aio.ServicerContext) -> HeldVideo:
        """The video of a call. While it waits to be read, `HeldVideos` has the only copy, and
        counts it.
        """
        async with self._message(context, pb.ProbeRequest) as message:
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
        async with self._call("upload", context):
            digest = await self._uploaded(context)
            return pb.UploadResponse(digest=digest, kept_s=KEPT_S)

    async def _uploaded(self, context: grpc.aio.ServicerContext) -> bytes:
        async with self._message(context, pb.UploadRequest) as message:
            return await self._files.put(message.tenant, message.file)

    async def Download(
        self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext
    ) -> pb.DownloadResponse:
        async with self._call("download", context):
            if request.forget:
                if not await self._files.delete(request.tenant, request.digest):
                    raise NotFound("no such file is kept")
                return pb.DownloadResponse()
            file = await self._files.get(request.tenant, request.digest)
            self._count(len(file))
            cast("Any", context).add_done_callback(lambda _: self._sent(len(file)))
            return pb.DownloadResponse(file=file)

    def _sent(self, num_bytes: int) -> None:
        self._bytes_under_way -= num_bytes

    # What `Encode` takes beside still images.

    def _checked_unit(self, request: pb.EncodeRequest) -> Unit:
        unit = super()._checked_unit(request)
        if not request.HasField("frames"):
            return unit
        if not self._takes_videos:
            raise InvalidVideo("this model takes no videos")
        return replace(unit, frames=(request.frames.first, request.frames.second))

    def _made_from(
        self, request: pb.EncodeRequest, unit: Unit
    ) -> tuple[Source, Callable[[], bytes]]:
        """As `EncoderServicer` has it; of pairs of frames and embeddings, too."""
        held = self._videos.get(request.video_digest) if request.video_digest else None
        source = Source(request.image, request.second_image, held.video if held else None)
        if unit.frames is None and (held or source.second):
            raise InvalidRequest("an image has neither a video nor a second image")
        if held and source.num_bytes:
            raise InvalidRequest("frames are of a video or images, not both")
        prefix, salt = self._description.key_prefix, request.cache_salt
        if request.is_embedding:
            if unit.frames is not None:
                raise InvalidRequest("an embedding is no pair of frames")
            return source, partial(embedding_key, prefix, source.image, unit=unit, salt=salt)
        if unit.frames is None:
            return super()._made_from(request, unit)
        return source, partial(_frames_key, prefix, salt, unit, source, held)

    async def _bring(
        self, request: pb.EncodeRequest, key: bytes, spec: EmbeddingSpec
    ) -> Encoded | None:
        if not request.is_embedding:
            return None
        return await self._brought.bring(key, request.image, spec)


def _frames_key(
    prefix: bytes, salt: bytes, unit: Unit, source: Source, held: HeldVideo | None
) -> bytes:
    """The key of a pair of frames, of a video or of images.

    Raises:
        InvalidRequest: the video has no such frames.
    """
    if held is None:
        first = still_digest(source.image)
        second = still_digest(source.second) if source.second else first
    else:
        assert unit.frames is not None
        first, second = map(held.frame_digest, unit.frames)
    return frames_key(prefix, first, second, grid=unit.grid, salt=salt)
