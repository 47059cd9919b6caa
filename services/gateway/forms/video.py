"""Videos in requests: the content parts, and the fields that choose frames and their pixels.

The fields of `VideoFields` may be in `video_url`, beside `video_url` in the part, and for all
videos of a request in `mm_processor_kwargs` (`MultimodalOptions`) or `media_io_kwargs.video`
(vLLM's names). The innermost field applies. A client may send a list of frames in place of a URL;
the frames are not sampled again unless the client asks for it, and `Taken` has their times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from services.common.errors import InvalidRequest
from services.common.frame_pairs import PixelLimits, Sampling
from services.gateway.forms.json_body import TEXT_END

# Most frames that a client may list for a video. The limits of a whole request are in `bounds`.
MAX_LISTED_FRAMES = 1 << 16
_STILLS = "data:video/jpeg;"  # the beginning of a URL that contains a list of frames
_ALL = -1  # value of `num_frames` that stands for all frames
_PROCESSOR = "mm_processor_kwargs"
_VLLMS_RATE = 1.0  # default frames per second of frames with `frames_indices`

Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]
_MAX_FPS = 1000
_Fps = Annotated[float, Meta(gt=0, le=_MAX_FPS)]
_FpsText = Annotated[str, Meta(pattern=rf"^(?=.*[1-9])[0-9]{{1,3}}(\.[0-9]{{1,9}})?{TEXT_END}")]
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

    `min_pixels` and `max_pixels` limit the pixels of each frame, as in qwen-vl-utils.
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
    """The URL of a video, with the choice of its frames and of their pixels."""

    url: str


class VideoPart(VideoFields):
    """The base of the content parts for videos. Each subclass has its own spelling of the URL and a
    property `urls`, which is the URL of a file or the URLs of frames.
    """

    @property
    def scopes(self) -> tuple[tuple[str, VideoFields], ...]:
        """The part's own fields with the places of the fields in the part, the innermost first."""
        return (("", self),)

    @property
    def rate(self) -> float | None:
        """Frames per second of frames that the part lists. None if the part does not say it."""
        return next((scope.fps for _, scope in self.scopes if scope.fps is not None), None)


class VideoUrlPart(VideoPart, tag_field="type", tag="video_url"):
    """vLLM's content part for a video."""

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
    """vLLM's options for all images and videos of a request. A list has a value for each video, in
    order.

    `min_pixels` and `max_pixels` limit the pixels of an image, and of all frames of a video
    together.
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
        """Returns the options of one video, except for the limits on the pixels of all its frames.

        Args:
            index: place of the video among those of the request, below the `num_videos` of `check`.
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
        """Checks that each list has a value for each video.

        Args:
            num_videos: number of videos of the request.
            place: path of these options in the request, for the error.

        Raises:
            InvalidRequest: a list has more or fewer values.
        """
        for name, value in (("fps", self.fps), ("num_frames", self.num_frames)):
            if isinstance(value, list) and len(value) != num_videos:
                raise InvalidRequest(
                    f"a list needs one value for each video of the request; it has {len(value)}",
                    param=f"{place}.{name}",
                )


class MediaOptions(Struct, forbid_unknown_fields=True):
    """vLLM's `media_io_kwargs`: options for all videos of a request."""

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
    """The fields of a video, collected from all places of the request that may have such fields.

    Attributes:
        part: content part of the video.
        place: path of the part in the request.
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
                    f"num_frames must be at least 2, or {_ALL} for all frames",
                    param=f"{place}.num_frames",
                )
            if scope.fps is not None and scope.num_frames not in (None, _ALL):
                raise InvalidRequest("fps and num_frames exclude each other", param=f"{place}.fps")
        if lists_frames(self.part.urls):  # `fps` beside frames is the rate of the frames
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
        """Returns the frames per second of the video from which the listed frames were taken. None
        if the request does not say the rate.

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
                "the field applies to frames that are sent in place of a file; if the request has "
                "both frames and files, put the field into the part of the frames",
                param=found[0],
            )

    def _scopes(self) -> Iterator[tuple[str, VideoFields]]:
        """Yields the path and the fields of each place that has fields, the innermost first."""
        for suffix, scope in self.part.scopes:
            yield self.place + suffix, scope
        if self.options is not None:
            yield _PROCESSOR, self.options.of(self.index)
        if self.media is not None:
            yield "media_io_kwargs.video", self.media

    def _first(self, name: str) -> tuple[str, Any]:
        """Returns the path and the value of the innermost field with the name. The value is None if
        no place has the field.
        """
        for place, scope in self._scopes():
            if (value := getattr(scope, name)) is not None:
                return place, value
        return self.place, None
