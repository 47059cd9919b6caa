"""The videos of a request: from URLs to frames, units and image keys. Nothing is decoded here.

A video is a file behind a URL, or frames that the client has chosen: a list of URLs of images, or
`data:video/jpeg;base64,F1,F2,…`. An encoder probes a file: the encoder reports the file's frames
and keeps the file, so that the encode calls for pairs of frames only carry its digest.
`ChatService` reads a request's videos with `VideoReader`. An error's `param` names the video that
caused the error.
"""

import asyncio
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from services.common.pb.encoder_pb2 import (
    DescribeEncoderResponse,
    EncodeRequest,
    FramePair,
    ProbeResponse,
)
from services.gateway.bounds import MEMORY_PER_CALLED_BYTE, Bounds
from services.gateway.clients.encoders import EncoderPod, EncoderPool, for_file
from services.gateway.clients.pods import rank
from services.gateway.forms.responses import VideoUsage
from services.gateway.forms.video import Taken, lists_frames
from services.gateway.gather import gather
from services.gateway.media.clip_ranges import ClipRanges
from services.gateway.media.images import header_within
from services.gateway.media.kinds import IMAGE, VIDEO, Kind
from services.gateway.media.media_loader import MAX_CONCURRENT_LOADS, MediaLoader, decode_base64
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import Tenant

# Number of encoders lost while they had a file, at which the request fails.
_MAX_LOST = 2
# Size of a file that is sent to a second idle encoder before the length of the video is known: some
# ten seconds of 1080p.
_AHEAD_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video as a request names it.

    Attributes:
        urls: URL of the file, or URLs of the frames.
        param: place of the video in the request.
        sampling: number or rate of the frames that are chosen of the video.
        limits: limits on the pixels of the resized frames.
        taken: times of the frames, if the client has sent frames instead of a file.
    """

    urls: str | Sequence[str]
    param: str
    sampling: Sampling
    limits: PixelLimits
    taken: Taken

    @property
    def key(self) -> Hashable:
        """Everything that decides what is loaded: all fields but the place in the request."""
        urls = self.urls if isinstance(self.urls, str) else tuple(self.urls)
        indices = None if self.taken.indices is None else tuple(self.taken.indices)
        return urls, self.sampling, self.limits, replace(self.taken, indices=indices)


def _has_failed(call: "asyncio.Task[ProbeResponse]") -> bool:
    return call.cancelled() or (call.done() and call.exception() is not None)


@dataclass(slots=True)
class VideoFile:
    """A video file of a tenant. Each encoder is sent the file only once.

    Attributes:
        data: bytes of the file.
        digest: digest of the file, by which encode calls name it.
        tenant: tenant that the request belongs to.
    """

    data: bytes
    digest: bytes
    tenant: Tenant
    _sent: dict[str, "asyncio.Task[ProbeResponse]"] = field(
        default_factory=dict[str, "asyncio.Task[ProbeResponse]"]
    )

    async def send_to(
        self,
        encoder: EncoderPod,
        timeout_s: float,
        again: "asyncio.Task[ProbeResponse] | None" = None,
    ) -> "asyncio.Task[ProbeResponse]":
        """Sends the file to an encoder, unless the encoder has been sent the file before.

        Args:
            timeout_s: timeout of the call in seconds.
            again: earlier call whose file the encoder no longer has. None if there is none.

        Returns:
            The call that has sent the file.

        Raises:
            TriptychError: the call failed.
        """
        call = self.begin(encoder, timeout_s, again)
        await asyncio.shield(call)
        return call

    def begin(
        self,
        encoder: EncoderPod,
        timeout_s: float,
        again: "asyncio.Task[ProbeResponse] | None" = None,
    ) -> "asyncio.Task[ProbeResponse]":
        """Begins to send the file, and returns the call. See `send_to` for the arguments."""
        call = self._sent.get(encoder.address)
        if call is None or call is again or _has_failed(call):
            call = asyncio.create_task(encoder.probe(self.data, self.tenant, timeout_s))
            # Marks an error as retrieved, because nothing may wait for the call.
            call.add_done_callback(_has_failed)
            self._sent[encoder.address] = call
        return call

    def has_sent(self, address: str) -> bool:
        """Returns whether an encoder has the file or is being sent it."""
        call = self._sent.get(address)
        return call is not None and not _has_failed(call)

    def num_in_flight(self, address: str) -> int:
        """Returns the number of calls that are sending the file to an encoder: 1 or 0."""
        call = self._sent.get(address)
        return int(call is not None and not call.done())

    def close(self) -> None:
        """Cancels the calls that still send the file."""
        for call in self._sent.values():
            call.cancel()


@dataclass(slots=True)
class Video:
    """A video whose frames are chosen.

    Attributes:
        param: place of the video in the request.
        units: pairs of frames, which are encoded together.
        times: time of each unit in the video, in seconds.
        steps: time of each unit in the video, in positions. See `FramePairs.steps`.
        usage: frames, rate and tokens of the video, for the answer's usage.
        digests: digest of each chosen frame, by index of the frame.
        file: file of the video. None if the client has sent frames.
        address: address of the encoder that has probed the file. Empty if there is no file.
        ranges: division of the file's units among encoders. None if there is no file.
        stills: encoded images of the frames. Empty if there is a file.
        kind: kind of media, for errors.
    """

    param: str
    units: Sequence[Unit]
    times: Sequence[float]
    steps: Sequence[int]
    usage: VideoUsage
    digests: Mapping[int, bytes]
    file: VideoFile | None = None
    address: str = ""
    ranges: ClipRanges | None = None
    stills: Sequence[bytes] = ()
    kind: ClassVar[Kind] = VIDEO

    async def key(self, prefix: bytes, unit: Unit, salt: bytes) -> bytes:
        """Returns the image key of a unit.

        Args:
            prefix: key prefix of the encoders.
            salt: salt of the tenant.
        """
        first, second = unit.frames or (0, 0)
        pair = self.digests[first], self.digests[second]
        return frames_key(prefix, *pair, grid=unit.grid, salt=salt)

    def clip_s(self, unit: Unit) -> float:
        """Returns the seconds in which a unit's frames are decoded. 0 if the frames are images."""
        return self.ranges.unit_s[unit.frames or (0, 0)] if self.ranges else 0.0

    def num_bytes(self, unit: Unit) -> int:
        """Returns the number of bytes that the encode call of a unit carries."""
        return sum(len(self.stills[frame]) for frame in {*(unit.frames or ())} if self.stills)

    def encode_request(self, unit: Unit) -> EncodeRequest:
        """Returns an encode request with the pixels of a unit, and no other field."""
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
        pairs: video processor of the model.
        encoders: encoders that probe files.
    """

    loader: MediaLoader
    pairs: FramePairs
    bounds: Bounds
    encoders: EncoderPool

    async def read(
        self,
        sources: Sequence[VideoSource],
        slot: Slot,
        encoder: DescribeEncoderResponse,
        timeout_s: float,
    ) -> list[Video]:
        """Loads all videos, in order.

        Args:
            slot: admission slot of the request. Its memory counts the loaded bytes, and its usage
                counts the bytes of files.
            encoder: description of the encoders that probe files.
            timeout_s: timeout in seconds of a call that probes a file.

        Raises:
            TriptychError: the error of the first video that fails. Its `param` names the video.
        """
        videos: list[Video] = []
        for source in sources:
            try:
                if isinstance(source.urls, str) and not lists_frames(source.urls):
                    most = self.bounds.max_video_bytes
                    data = await self.loader.load(source.urls, most, VIDEO, slot)
                    video = await self._of_file(source, data, slot, encoder, timeout_s)
                else:
                    stills = await self._stills(source, slot)
                    video = await asyncio.to_thread(self._of_stills, source, stills)
                self._check(videos, video, encoder.max_image_patches)
            except TriptychError as error:
                error.param = error.param or source.param
                raise
            videos.append(video)
        return videos

    def check_together(self, videos: Sequence[Video]) -> None:
        """Checks the number of frames of a prompt whose videos were not loaded by one `read`.

        Raises:
            InvalidRequest: all videos together have too many frames. Its `param` names the video
                with which they exceed the limit.
        """
        num_frames = 0
        for video in videos:
            num_frames += video.usage.frames
            try:
                self._check_number(num_frames)
            except InvalidRequest as error:
                error.param = video.param
                raise

    async def _of_file(
        self,
        source: VideoSource,
        data: bytes,
        slot: Slot,
        encoder: DescribeEncoderResponse,
        timeout_s: float,
    ) -> Video:
        await slot.usage.charge_file(len(data))
        file = VideoFile(data, await asyncio.to_thread(still_digest, data), slot.tenant)
        try:
            probed, address = await self._probe(file, slot, encoder, timeout_s)
        except BaseException:
            file.close()  # A call that continues after the request would keep the file in memory.
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
        video.ranges = ClipRanges.of(
            video.units,
            probed.key_frames,
            clip.num_frames,
            math.prod(clip.size),
            len(file.data),
        )
        return video

    async def _probe(
        self, file: VideoFile, slot: Slot, encoder: DescribeEncoderResponse, timeout_s: float
    ) -> tuple[ProbeResponse, str]:
        """Sends a file to an encoder, or to a second encoder if the first is lost or too slow.

        Returns:
            The frames of the file, and the address of the encoder that has the file.

        Raises:
            InvalidVideo: the file is no video, or cannot be served.
            TriptychError: no encoder takes the file.
        """
        lost: set[str] = set()
        cause: Unavailable | None = None
        while len(lost) < _MAX_LOST:
            try:
                pods = self.encoders.available(encoder, lost)
            except Unavailable as none_left:
                raise cause or none_left from None
            pod = for_file(pods, file.digest, len(file.data))
            file.begin(pod, timeout_s)  # the probing encoder gets the file first
            if not lost:
                self._send_ahead(file, slot, [each for each in pods if each is not pod], timeout_s)
            try:
                call = await file.send_to(pod, timeout_s)
            except (Unavailable, DeadlineExceeded) as error:
                lost.add(pod.address)
                late = ProcessLost("the encoder did not answer in time")
                cause = late if isinstance(error, DeadlineExceeded) else error
                continue
            return call.result(), pod.address
        if isinstance(cause, Overloaded):
            raise cause
        raise Unavailable("two encoders were lost while they had the video", retry_after_s=1)

    def _send_ahead(
        self, file: VideoFile, slot: Slot, others: Sequence[EncoderPod], timeout_s: float
    ) -> None:
        """Sends a large file to an idle encoder that will probably decode a range of the video, so
        that the range does not wait until the first encoder has probed the file.
        """
        idle = [pod for pod in others if not pod.num_in_flight]
        if not idle or len(file.data) < _AHEAD_BYTES:
            return
        try:
            slot.memory.add(len(file.data) * MEMORY_PER_CALLED_BYTE)
        except Overloaded:  # There is no memory for the call.
            return
        file.begin(min(idle, key=lambda pod: rank(pod.address, file.digest)), timeout_s)

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
                data = await self.loader.load(url, most, IMAGE, slot)
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
            raise InvalidRequest(
                f"the video is given as {count} frames, and given frames are never left out"
            )
        sizes: set[Size] = set()
        for still in stills:
            sizes.add(header_within(still, self.bounds).upright_size)
        if len(sizes) > 1:
            raise InvalidVideo("all frames of a video must have the same size")
        taken = source.taken
        rate = taken.rate or self.pairs.fps or 2.0
        is_less = wanted.fps != rate and len(self.pairs.indices(count, rate, wanted)) < count
        if taken.is_sampled and is_less:
            raise InvalidRequest(
                f"the video is given as {count} frames, and given frames are never left out: send "
                "fewer frames, or leave out do_sample_frames"
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
        rate = pairs.rate_of(indices, clip)
        usage = VideoUsage(
            len(indices),
            round(rate, 3),
            sum(pairs.num_tokens(unit) for unit in units),
            pairs.size_of(units[0]),
            [round(time, 1) for time in times],
            pairs.caps(limits),
        )
        steps = pairs.steps(len(units), rate)
        return Video(source.param, units, times, steps, usage, digests)

    def _check_number(self, num_frames: int) -> None:
        most = self.bounds.max_video_frames
        if num_frames > most:
            raise InvalidRequest(
                f"{num_frames} frames would be sampled; all videos of a request may have at most "
                f"{most}: lower fps, num_frames or max_frames"
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
            num_pixels = math.prod(self.pairs.size_of(unit))
            raise InvalidVideo(
                f"a frame has {num_pixels} pixels after resizing, which is too many: set "
                "cap_pixels_per_frame, or sample more frames"
            )


def split_stills(url: str, max_stills: int, max_bytes: int) -> list[bytes]:
    """Returns the frames of `data:video/jpeg;base64,F1,F2,…`.

    Args:
        max_stills: most frames.
        max_bytes: most bytes of each frame.

    Raises:
        InvalidRequest: the URL is malformed, or there are too many frames.
        InvalidImage: a frame is too large or empty.
    """
    head, _, payload = url.partition(",")
    if not head.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest("a data: URL must be base64-encoded")
    if payload.count(",") >= max_stills:
        raise InvalidRequest(f"the video has more than {max_stills} frames")
    return [decode_base64(each, max_bytes) for each in payload.split(",")]
