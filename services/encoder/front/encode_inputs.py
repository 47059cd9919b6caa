"""The inputs of one `Encode` call, checked: what the unit is made from, and its key."""

import asyncio
import math
from dataclasses import dataclass, replace

from services.common.errors import (
    InvalidImage,
    InvalidRequest,
    InvalidVideo,
    Unavailable,
    WrongImageKey,
)
from services.common.geometry import Unit
from services.common.images.image_key import (
    KEY_BYTES,
    MAX_SALT_BYTES,
    adapted_salt,
    embedding_key,
    frames_key,
    image_key,
    still_digest,
)
from services.common.pb import encoder_pb2 as pb
from services.common.threads import INLINE_BYTES
from services.encoder.engine.messages import Source
from services.encoder.front.admission import Share
from services.encoder.front.embeddings import Embeddings
from services.encoder.front.source_store import Work
from services.encoder.front.video_store import StoredVideo, VideoStore


@dataclass(frozen=True, slots=True)
class EncodeInputs:
    """A unit and the bytes that its embedding is made from.

    Attributes:
        source: the file of an image, the files of two frames, a video, or a client's embedding.
        unit: the grid of patches, with the frames of the video if the unit is a pair of frames.
        salt: the salt of the tenant's cache and of the adapter, part of the key.
        is_embedding: whether the file is an embedding that the client has computed.
        video: the video of the frames. None if the unit is made from image files.
        tower: index of the tower that encodes the unit, see `EncodeImage.tower`.
    """

    source: Source
    unit: Unit
    salt: bytes
    is_embedding: bool
    video: StoredVideo | None
    tower: int = 0

    def work(self, share: Share) -> Work:
        """Returns the work of encoding the unit for a tenant."""
        return Work(self.source, self.unit, share, self.tower)

    def key(self, prefix: bytes) -> bytes:
        """Returns the image key, in 0.15 ms per MiB of the files.

        Args:
            prefix: digest of everything else that decides the embedding, as the encoder describes.

        Raises:
            InvalidRequest: the video has no such frames.
        """
        source, unit, salt = self.source, self.unit, self.salt
        if self.is_embedding:
            return embedding_key(prefix, source.image, unit=unit, salt=salt)
        if unit.frames is None:
            return image_key(prefix, source.image, unit=unit, salt=salt)
        if self.video is None:
            first = still_digest(source.image)
            second = still_digest(source.second) if source.second else first
        else:
            first, second = map(self.video.frame_digest, unit.frames)
        return frames_key(prefix, first, second, grid=unit.grid, salt=salt)


class InputReader:
    """Checks the messages of `Encode` calls.

    Args:
        description: what this encoder serves: the key prefix and the largest image.
        embeddings: the owner of the geometry that a unit has to fit.
        videos: files of videos that clients have sent.
        takes_videos: whether the model takes videos.
    """

    def __init__(
        self,
        description: pb.DescribeEncoderResponse,
        embeddings: Embeddings,
        videos: VideoStore,
        *,
        takes_videos: bool,
    ) -> None:
        self._description = description
        self._geometry = embeddings.geometry
        self._videos = videos
        self._takes_videos = takes_videos

    async def read(self, request: pb.EncodeRequest) -> tuple[EncodeInputs, bytes]:
        """Returns the inputs of a call and the unit's key.

        Raises:
            InvalidRequest, InvalidImage, InvalidVideo, VideoNotHeld: the inputs cannot be encoded.
            Unavailable: this encoder has no tower of the adapter. Another encoder may have it.
            WrongImageKey: the caller's key is not the key of these inputs.
        """
        unit = self._unit(request)
        wanted = checked_key(request.image_key)
        if len(request.cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
        inputs = self._inputs(request, unit)
        prefix = self._description.key_prefix
        if inputs.source.num_bytes <= INLINE_BYTES:
            key = inputs.key(prefix)
        else:
            key = await asyncio.to_thread(inputs.key, prefix)
        if key != wanted:
            raise WrongImageKey("the image key is not that of this image")
        return inputs, key

    def _unit(self, request: pb.EncodeRequest) -> Unit:
        grid, most = request.grid, self._description.max_image_patches
        unit = Unit((grid.t, grid.h, grid.w))
        self._geometry.check(unit)
        if unit.num_patches > most:
            raise InvalidImage(
                f"the image has {unit.num_patches} patches; at most {most} are encoded here"
            )
        if not request.HasField("frames"):
            return unit
        if not self._takes_videos:
            raise InvalidVideo("this model takes no videos")
        return replace(unit, frames=(request.frames.first, request.frames.second))

    def _inputs(self, request: pb.EncodeRequest, unit: Unit) -> EncodeInputs:
        video = self._videos.get(request.video_digest) if request.video_digest else None
        frame = unit.frames[0] if unit.frames else 0
        source = Source(request.image, request.second_image, video.video(frame) if video else None)
        if unit.frames is None and (video or source.second):
            raise InvalidRequest("a still image must have neither a video nor a second image")
        if video and source.num_bytes:
            raise InvalidRequest("frames come from a video or as images, not both")
        if request.is_embedding and unit.frames is not None:
            raise InvalidRequest("an embedding cannot be a pair of frames")
        salt = adapted_salt(request.cache_salt, request.adapter)
        tower = self._tower(request.adapter)
        return EncodeInputs(source, unit, salt, request.is_embedding, video, tower)

    def _tower(self, adapter: bytes) -> int:
        towers = b"", *self._description.adapters
        if adapter not in towers:
            raise Unavailable("the adapter is not loaded on this encoder (ENCODER_ADAPTERS)")
        return towers.index(adapter)


def checked_key(key: bytes) -> bytes:
    """Returns an image key of the right length. Raises InvalidRequest for any other."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"an image key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def share_of(request: pb.EncodeRequest | pb.ProbeRequest) -> Share:
    """Returns the tenant of a request and its share.

    Raises:
        InvalidRequest: the weight is not a positive number.
    """
    weight = request.tenant_weight or 1.0
    if not 0.0 < weight < math.inf:
        raise InvalidRequest(f"a tenant's weight is positive, not {weight}")
    background = isinstance(request, pb.EncodeRequest) and request.background
    return Share(request.tenant, weight, background)
