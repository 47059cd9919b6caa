"""Videos in requests: the content parts, and the fields that choose frames and their pixels.

The fields of `VideoFields` may be in `video_url`, beside it in the part, and for all videos of a
request in `mm_processor_kwargs` (`MultimodalOptions`) or `media_io_kwargs.video` (vLLM's names);
the innermost applies. A list of frames in place of a URL is taken as it is; `Taken` says when its
frames were taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from services.common.errors import InvalidRequest
from services.common.frame_pairs import PixelLimits, Sampling

# Of one video; what a request may have is in `bounds`.
MAX_LISTED_FRAMES = 1 << 16
_STILLS = "data:video/jpeg;"  # what the URL of a list of frames begins with
_ALL = -1  # as `num_frames`
_PROCESSOR = "mm_processor_kwargs"
_VLLMS_RATE = 1.0  # frames per second of frames with `frames_indices`, unless the request says it

Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]
_MAX_FPS = 1000
_Fps = Annotated[float, Meta(gt=0, le=_MAX_FPS)]
_FpsText = Annotated[str, Meta(pattern=r"^(?=.*[1-9])[0-9]{1,3}(\.[0-9]{1,9})?$")]
_Frames = Annotated[int, Meta(ge=2, le=MAX_LISTED_FRAMES)]
_FramesOrAll = Annotated[int, Meta(ge=_ALL, le=MAX_LISTED_FRAMES)]
_FpsOfEach = Annotated[list[_Fps], Meta(max_length=1024)]
_FramesOfEach = Annotated[list[_FramesOrAll], Meta(max_length=1024)]
_Place = Annotated[int, Meta(ge=0, le=1 << 31)]
_Places = Annotated[list[_Place], Meta(min_length=1, max_length=MAX_LISTED_FRAMES)]
_TotalFrames = Annotated[int, Meta(ge=1, le=1 << 31)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class VideoFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The choice of a video's frames and of their pixels. Null stands for the choice of the model's
    video processor.

    `min_pixels` and `max_pixels` are of each frame, as in qwen-vl-utils.
    """

    fps: _Fps | None = None
    num_frames: _FramesOrAll | None = None
    max_frames: _Frames | None = None
    do_sample_frames: bool | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    total_pixels: Pixels | None = None
    cap_pixels_per_frame: bool | None = None
    frames_indices: _Places | None = None
    total_num_frames: _TotalFrames | None = None
    duration: _Seconds | None = None


class VideoUrl(VideoFields):
    """A URL, and what of the video is looked at."""

    url: str


class VideoPart(VideoFields):
    """A video, in one of its spellings; `urls` of each are the file's, or those of frames."""

    @property
    def scopes(self) -> tuple[tuple[str, VideoFields], ...]:
        """The part's own fields with their places in it, the innermost first."""
        return (("", self),)

    @property
    def rate(self) -> float | None:
        """Frames per second of frames that the part lists. None if the part does not say it."""
        return next((scope.fps for _, scope in self.scopes if scope.fps is not None), None)


class VideoUrlPart(VideoPart, tag_field="type", tag="video_url"):
    """vLLM's part."""

    video_url: VideoUrl | str

    @property
    def urls(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url

    @property
    def scopes(self) -> tuple[tuple[str, VideoFields], ...]:
        whole = super().scopes
        return (
            whole if isinstance(self.video_url, str) else ((".video_url", self.video_url), *whole)
        )


class InputVideoPart(VideoUrlPart, tag="input_video"):
    """A video as the Responses API would spell it."""


class NamedVideoPart(VideoPart, tag_field="type", tag="video"):
    """A video as model cards spell it: a URL, or the URLs of frames that the client has chosen.

    `sample_fps` is Qwen's name for the `fps` of such frames; its guide writes the number as text.
    """

    video: str | Annotated[list[str], Meta(max_length=MAX_LISTED_FRAMES)]
    sample_fps: _Fps | _FpsText | None = None

    @property
    def urls(self) -> str | list[str]:
        return self.video

    @property
    def rate(self) -> float | None:
        named = None if self.sample_fps is None else float(self.sample_fps)
        return named if self.fps is None else self.fps


AnyVideo = VideoUrlPart | NamedVideoPart


class MultimodalOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's options of all images and videos of a request; a list has a value for each video, in
    order.

    `min_pixels` and `max_pixels` are of an image, and of all frames of a video together.
    """

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    total_pixels: Pixels | None = None
    fps: _Fps | _FpsOfEach | None = None
    num_frames: _FramesOrAll | _FramesOfEach | None = None
    max_frames: _Frames | None = None
    do_sample_frames: bool | None = None
    cap_pixels_per_frame: bool | None = None

    def of(self, index: int) -> VideoFields:
        """The fields of one video, without the pixels of all its frames; `check` has seen the
        number of videos.
        """
        fps, num_frames = self.fps, self.num_frames
        return VideoFields(
            fps=fps[index] if isinstance(fps, list) else fps,
            num_frames=num_frames[index] if isinstance(num_frames, list) else num_frames,
            max_frames=self.max_frames,
            do_sample_frames=self.do_sample_frames,
            total_pixels=self.total_pixels,
            cap_pixels_per_frame=self.cap_pixels_per_frame,
        )

    def check(self, num_videos: int, place: str) -> None:
        """Raises InvalidRequest: a list has not a value for each of that many videos."""
        for name, value in (("fps", self.fps), ("num_frames", self.num_frames)):
            if isinstance(value, list) and len(value) != num_videos:
                raise InvalidRequest(
                    f"a list has a value for each video of the request, not {len(value)}",
                    param=f"{place}.{name}",
                )


class MediaOptions(Struct, forbid_unknown_fields=True):
    """vLLM's spelling of options of all videos of a request."""

    video: VideoFields | None = None


def lists_frames(urls: str | Sequence[str]) -> bool:
    """Returns whether the URLs of a video are those of its frames."""
    return not isinstance(urls, str) or urls[: len(_STILLS)].lower() == _STILLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The times of the frames that a client sends in place of a file.

    Attributes:
        rate: frames per second of their video. None if the request does not say it.
        indices: place of each frame in their video. None if the video has no other frames.
        num_frames: frames of their video. None if the request does not say it.
        is_sampled: true if the request asks the model's video processor to sample among the frames.
    """

    rate: float | None = None
    indices: Sequence[int] | None = None
    num_frames: int | None = None
    is_sampled: bool = False


@dataclass(frozen=True, slots=True)
class VideoChoice:
    """The fields of one video, from all places of the request that have them.

    Attributes:
        place: place of the part in the request.
        options: the request's `mm_processor_kwargs`.
        media: the request's `media_io_kwargs.video`.
        index: place of the video among those of the request.
    """

    part: AnyVideo
    place: str
    options: MultimodalOptions | None = None
    media: VideoFields | None = None
    index: int = 0

    def sampling(self) -> Sampling:
        """Returns the choice of the video's frames.

        Raises:
            InvalidRequest: a scope has both `fps` and `num_frames`, or `num_frames` is 0, 1 or over
                `max_frames`.
        """
        scopes = list(self._scopes())
        for place, scope in scopes:
            if scope.num_frames in (0, 1):
                raise InvalidRequest(
                    f"num_frames is >= 2, or {_ALL} for all frames", param=f"{place}.num_frames"
                )
            if scope.fps is not None and scope.num_frames not in (None, _ALL):
                raise InvalidRequest("fps and num_frames exclude each other", param=f"{place}.fps")
        if lists_frames(self.part.urls):  # `fps` beside frames is the rate at which they were taken
            scopes = [
                (p, s if p == _PROCESSOR else structs.replace(s, fps=None)) for p, s in scopes
            ]
        found = (s for _, s in scopes if s.fps is not None or s.num_frames is not None)
        chosen = next(found, VideoFields())
        _, most = self._first("max_frames")
        _, is_sampled = self._first("do_sample_frames")
        if chosen.fps is not None:
            return Sampling(fps=chosen.fps, max_frames=most)
        if chosen.num_frames is None:
            return Sampling(all_frames=is_sampled is False, max_frames=most)
        if chosen.num_frames == _ALL:
            return Sampling(all_frames=is_sampled is not True, max_frames=most)
        if most is not None and chosen.num_frames > most:
            raise InvalidRequest(
                f"num_frames {chosen.num_frames} is above max_frames {most}", param=self.place
            )
        return Sampling(num_frames=chosen.num_frames, max_frames=most)

    def limits(self) -> PixelLimits:
        """Returns the limits on the pixels of the video's frames.

        Raises:
            InvalidRequest: `min_pixels` is above `max_pixels`.
        """
        place, least = self._first("min_pixels")
        _, most = self._first("max_pixels")
        _, total = self._first("total_pixels")
        _, cap = self._first("cap_pixels_per_frame")
        if least is not None and most is not None and least > most:
            raise InvalidRequest(
                f"min_pixels {least} is above max_pixels {most}", param=f"{place}.min_pixels"
            )
        options = self.options or MultimodalOptions()
        return PixelLimits(
            min_per_frame=least,
            max_per_frame=most,
            total=total,
            min_of_all=options.min_pixels if least is None else None,
            max_of_all=options.max_pixels if most is None and total is None else None,
            cap_per_frame=cap,
        )

    def taken(self) -> Taken:
        """Returns the times of the frames that the client sends in place of a file.

        Raises:
            InvalidRequest: a file has a field of such frames, `frames_indices` are not as many as
                the frames or go beyond `total_num_frames`, or the frames are sampled again.
        """
        urls = self.part.urls
        if not lists_frames(urls):
            self._refuse_of_file()
            return Taken()
        place, indices = self._first("frames_indices")
        total_place, total = self._first("total_num_frames")
        sampled_place, is_sampled = self._first("do_sample_frames")
        rate = self._rate(total, indices is not None)
        if indices is None and total is None:
            return Taken(rate=rate, is_sampled=is_sampled is True)
        count = urls.count(",") if isinstance(urls, str) else len(urls)
        if indices is not None and len(indices) != count:
            raise InvalidRequest(
                f"frames_indices has {len(indices)} places for {count} frames",
                param=f"{place}.frames_indices",
            )
        if indices is not None and is_sampled:
            raise InvalidRequest(
                "do_sample_frames would leave out frames that frames_indices has chosen",
                param=f"{sampled_place}.do_sample_frames",
            )
        least = max(count, max(indices) + 1) if indices else count
        if total is not None and total < least:
            raise InvalidRequest(
                f"total_num_frames {total} is below {least}, which the {count} frames and their "
                "frames_indices need",
                param=f"{total_place}.total_num_frames",
            )
        return Taken(
            rate=rate, indices=indices, num_frames=total or least, is_sampled=is_sampled is True
        )

    def _rate(self, total: int | None, is_uneven: bool) -> float | None:
        """Frames per second of the video that listed frames were taken of, if the request says it.

        In vLLM, the rate in `mm_processor_kwargs` is the rate to sample at. Here it is also the
        frames' rate if no other place of the request has a rate.

        Raises:
            InvalidRequest: `duration` is too short for `total_num_frames`.
        """
        of_media = self.media.fps if self.media else None
        _, of_options = self._first("fps")
        for rate in (self.part.rate, of_media, of_options):
            if rate is not None:
                return rate
        place, duration = self._first("duration")
        if total and duration:
            if total > duration * _MAX_FPS:
                raise InvalidRequest(
                    f"total_num_frames {total} in {duration} s are over {_MAX_FPS} per second",
                    param=f"{place}.duration",
                )
            return total / duration
        return _VLLMS_RATE if is_uneven else None

    def _refuse_of_file(self) -> None:
        named = isinstance(self.part, NamedVideoPart) and self.part.sample_fps is not None
        found = [f"{self.place}.sample_fps"] if named else []
        for name in ("frames_indices", "total_num_frames", "duration"):
            place, value = self._first(name)
            found += [f"{place}.{name}"] if value is not None else []
        if found:
            raise InvalidRequest(
                "the field is of frames that are sent in place of a file; if the request has such "
                "frames and files, it belongs into the part of the frames",
                param=found[0],
            )

    def _scopes(self) -> Iterator[tuple[str, VideoFields]]:
        """The fields of each place that has some, the innermost first."""
        for suffix, scope in self.part.scopes:
            yield self.place + suffix, scope
        if self.options is not None:
            yield _PROCESSOR, self.options.of(self.index)
        if self.media is not None:
            yield "media_io_kwargs.video", self.media

    def _first(self, name: str) -> tuple[str, Any]:
        """The innermost value of a field, and its place. The value is None if no place has one."""
        for place, scope in self._scopes():
            if (value := getattr(scope, name)) is not None:
                return place, value
        return self.place, None
