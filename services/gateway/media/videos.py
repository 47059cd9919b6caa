"""A request's videos: from URLs to frames, units and image keys. Nothing is decoded here.

A video is a file behind a URL, or frames that the client has chosen: a list of URLs of images, or
`data:video/jpeg;base64,F1,F2,…`. Of a file an encoder says what is in it (`Probe`) and keeps it, so
that the calls for its pairs of frames only name it. `ChatService` reads a request's videos here; an
error's `param` names the video that caused it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from services.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidVideo,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.frame_pairs import Clip, FramePairs, PixelLimits, Sampling
from services.common.geometry import Size, Unit
from services.common.images.image_key import FRAME_DIGEST_BYTES, frames_key, still_digest
from services.common.pb.encoder_pb2 import EncodeRequest, FramePair, ProbeResponse
from services.gateway.bounds import Bounds
from services.gateway.clients.encoders import EncoderPod
from services.gateway.forms.responses import VideoUsage
from services.gateway.forms.video import Taken, lists_frames
from services.gateway.gather import gather
from services.gateway.media.images import (
    MAX_CONCURRENT_LOADS,
    MediaLoader,
    decode_base64,
    header_within,
)
from services.gateway.media.kinds import IMAGE, VIDEO, Kind
from services.gateway.slot import Slot, Tenant

_MAX_LOST = 2  # encoders that may be lost over a file


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video as a request names it.

    Attributes:
        urls: URL of the file, or URLs of the frames.
        param: place of the video in the request.
        limits: limits on the pixels of the resized frames.
        taken: times of the frames that stand in place of a file.
    """

    urls: str | Sequence[str]
    param: str
    sampling: Sampling
    limits: PixelLimits
    taken: Taken


def _has_failed(call: "asyncio.Task[ProbeResponse]") -> bool:
    return call.cancelled() or (call.done() and call.exception() is not None)


@dataclass(slots=True)
class VideoFile:
    """A tenant's file that encoders are sent once each."""

    data: bytes
    digest: bytes
    tenant: Tenant
    _sent: dict[str, "asyncio.Task[ProbeResponse]"] = field(
        default_factory=dict[str, "asyncio.Task[ProbeResponse]"]
    )

    async def leave_at(
        self,
        encoder: EncoderPod,
        timeout_s: float,
        again: "asyncio.Task[ProbeResponse] | None" = None,
    ) -> "asyncio.Task[ProbeResponse]":
        """Sends the file to an encoder, unless it was.

        Args:
            again: the encoder has forgotten what that call has sent.

        Returns:
            The call that has sent it.

        Raises:
            TriptychError: the call's.
        """
        call = self._sent.get(encoder.address)
        if call is None or call is again or _has_failed(call):
            call = asyncio.create_task(encoder.probe(self.data, self.tenant, timeout_s))
            self._sent[encoder.address] = call
        await asyncio.shield(call)
        return call

    def close(self) -> None:
        for call in self._sent.values():
            call.cancel()


# Leaves a file at an encoder; also gives its address.
Probe = Callable[[VideoFile], Awaitable[tuple[ProbeResponse, str]]]


@dataclass(slots=True)
class Video:
    """A video whose frames are chosen.

    Attributes:
        units: pairs of frames.
        times: seconds of each unit.
        digests: of the frames that are chosen.
        file: None: the frames are images.
        address: of the encoder that the file was left at.
        stills: the frames' files.
    """

    param: str
    units: Sequence[Unit]
    times: Sequence[float]
    usage: VideoUsage
    digests: Mapping[int, bytes]
    file: VideoFile | None = None
    address: str = ""
    stills: Sequence[bytes] = ()
    kind: ClassVar[Kind] = VIDEO

    async def key(self, prefix: bytes, unit: Unit, salt: bytes) -> bytes:
        """A unit's image key for encoders of that prefix and a tenant's salt."""
        first, second = unit.frames or (0, 0)
        pair = self.digests[first], self.digests[second]
        return frames_key(prefix, *pair, grid=unit.grid, salt=salt)

    def sent(self, unit: Unit) -> EncodeRequest:
        """What an encode call says of a unit's pixels."""
        first, second = unit.frames or (0, 0)
        if self.file is not None:
            frames = FramePair(first=first, second=second)
            return EncodeRequest(frames=frames, video_digest=self.file.digest)
        request = EncodeRequest(image=self.stills[first], frames=FramePair(first=0, second=0))
        if first != second:
            request.second_image, request.frames.second = self.stills[second], 1
        return request


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Loads videos and chooses their frames.

    Attributes:
        pairs: the model's video processor.
    """

    loader: MediaLoader
    pairs: FramePairs
    bounds: Bounds

    async def read(
        self,
        sources: Sequence[VideoSource],
        slot: Slot,
        max_patches: int,
        probe: Probe,
    ) -> list[Video]:
        """All videos, in order.

        Args:
            slot: the request's. It counts the bytes that are held, and may refuse them.
            max_patches: the most patches of one unit, before merging.

        Raises:
            TriptychError: of the first video that fails; its `param` names the video.
        """
        videos: list[Video] = []
        for source in sources:
            try:
                if isinstance(source.urls, str) and not lists_frames(source.urls):
                    most = self.bounds.max_video_bytes
                    name = slot.tenant.name
                    data = await self.loader.load(source.urls, most, VIDEO, slot.hold, name)
                    video = await self._of_file(source, data, slot, probe)
                else:
                    stills = await self._stills(source, slot)
                    video = await asyncio.to_thread(self._of_stills, source, stills)
                self._check(videos, video, max_patches)
            except TriptychError as error:
                error.param = error.param or source.param
                raise
            videos.append(video)
        return videos

    async def _of_file(self, source: VideoSource, data: bytes, slot: Slot, probe: Probe) -> Video:
        await slot.charge_file(len(data))
        file = VideoFile(data, await asyncio.to_thread(still_digest, data), slot.tenant)
        try:
            probed, address = await probe(file)
        except BaseException:
            file.close()  # a call that goes on without the request would keep the file
            raise
        clip = Clip(probed.num_frames, probed.rate, (probed.height, probed.width))
        if probed.duration_s > self.bounds.max_video_seconds:
            raise InvalidVideo(
                f"the video lasts {probed.duration_s:.0f} s; at most "
                f"{self.bounds.max_video_seconds:.0f} s are served"
            )
        indices = self.pairs.indices(clip.num_frames, clip.rate, source.sampling)
        self._check_number(len(indices))
        data, size = probed.frame_digests, FRAME_DIGEST_BYTES
        digests = {frame: data[frame * size : (frame + 1) * size] for frame in indices}
        video = self._video(source, indices, clip, digests)
        video.file, video.address = file, address
        return video

    async def _stills(self, source: VideoSource, slot: Slot) -> list[bytes]:
        if isinstance(source.urls, str):
            self._check_number(source.urls.count(",", 0, 1 << 20))
            most = (self.bounds.max_video_frames, self.bounds.max_image_bytes)
            stills = await asyncio.to_thread(split_stills, source.urls, *most)
            self._check_bytes(sum(map(len, stills)))
            return stills
        self._check_number(len(source.urls))
        num_bytes = 0

        async def load(place: tuple[int, str]) -> bytes:
            nonlocal num_bytes
            index, url = place
            try:
                most = self.bounds.max_image_bytes
                data = await self.loader.load(url, most, IMAGE, slot.hold, slot.tenant.name)
            except TriptychError as error:
                error.param = f"{source.param}.video[{index}]"
                raise
            num_bytes += len(data)
            self._check_bytes(num_bytes)
            return data

        return await gather(load, enumerate(source.urls), MAX_CONCURRENT_LOADS)

    def _of_stills(self, source: VideoSource, stills: Sequence[bytes]) -> Video:
        wanted, count = source.sampling, len(stills)
        if wanted.num_frames not in (None, count) or (wanted.max_frames or count) < count:
            raise InvalidRequest(f"the video is given as {count} frames, of which none is left out")
        sizes: set[Size] = set()
        for still in stills:
            sizes.add(header_within(still, self.bounds).upright_size)
        if len(sizes) > 1:
            raise InvalidVideo("the frames of a video are of one size")
        taken = source.taken
        rate = taken.rate or self.pairs.fps or 2.0
        is_less = wanted.fps != rate and len(self.pairs.indices(count, rate, wanted)) < count
        if taken.is_sampled and is_less:
            raise InvalidRequest(
                f"the video is given as {count} frames, of which none is left out: send fewer of "
                "them, or leave out do_sample_frames"
            )
        clip = Clip(taken.num_frames or count, rate, sizes.pop() if sizes else (1, 1))
        digests = dict(enumerate(map(still_digest, stills)))
        video = self._video(source, range(count), clip, digests)
        video.stills = stills
        return video

    def _video(
        self,
        source: VideoSource,
        indices: Sequence[int],
        clip: Clip,
        digests: Mapping[int, bytes],
    ) -> Video:
        pairs, limits = self.pairs, source.limits
        units = pairs.units(indices, clip.size, limits)
        times = pairs.times(source.taken.indices or indices, clip.rate)
        usage = VideoUsage(
            len(indices),
            round(pairs.rate_of(indices, clip), 3),
            sum(pairs.num_tokens(unit) for unit in units),
            pairs.size_of(units[0]),
            [round(time, 1) for time in times],
            pairs.caps(limits),
        )
        return Video(source.param, units, times, usage, digests)

    def _check_number(self, num_frames: int) -> None:
        most = self.bounds.max_video_frames
        if num_frames > most:
            raise InvalidRequest(
                f"{num_frames} frames are wanted; at most {most} of all videos of a request are "
                "served: lower fps, num_frames or max_frames"
            )

    def _check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.bounds.max_video_bytes:
            raise InvalidVideo(
                f"the frames of the video have more than {self.bounds.max_video_bytes} bytes"
            )

    def _check(self, others: Sequence[Video], video: Video, max_patches: int) -> None:
        self._check_number(sum(each.usage.frames for each in (*others, video)))
        unit = video.units[0]
        if unit.num_patches > max_patches:
            raise InvalidVideo(
                f"a frame has {math.prod(self.pairs.size_of(unit))} pixels after resizing, more "
                "than are served: set cap_pixels_per_frame, or take more frames"
            )


def split_stills(url: str, max_stills: int, max_bytes: int) -> list[bytes]:
    """The frames of `data:video/jpeg;base64,F1,F2,…`.

    Args:
        max_stills: number of frames.
        max_bytes: of each.

    Raises:
        InvalidRequest: malformed, or too many.
        InvalidImage: a frame is too large or empty.
    """
    head, _, payload = url.partition(",")
    if not head.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest("a data: URL must be base64-encoded")
    if payload.count(",") >= max_stills:
        raise InvalidRequest(f"the video has more than {max_stills} frames")
    return [decode_base64(each, max_bytes) for each in payload.split(",")]


async def probe_once(
    file: VideoFile, choose: Callable[[bytes, set[str]], EncoderPod], timeout_s: float
) -> tuple[ProbeResponse, str]:
    """Leaves a file at an encoder, or at another one if that is lost or late.

    Args:
        choose: an encoder for a digest, without those of some addresses.

    Raises:
        InvalidVideo: the file is none, or two encoders ended over it.
        TriptychError: no encoder takes it.
    """
    lost: set[str] = set()
    cause: Unavailable | None = None
    while len(lost) < _MAX_LOST:
        try:
            encoder = choose(file.digest, lost)
        except Unavailable as none_left:
            raise cause or none_left from None
        try:
            call = await file.leave_at(encoder, timeout_s)
        except (Unavailable, DeadlineExceeded) as error:
            lost.add(encoder.address)
            late = ProcessLost("the encoder did not answer in time")
            cause = late if isinstance(error, DeadlineExceeded) else error
            continue
        return call.result(), encoder.address
    if isinstance(cause, Overloaded):
        raise cause
    raise Unavailable("two encoders were lost while they had the video", retry_after_s=1)
