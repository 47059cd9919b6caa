"""Videos in requests: the content parts, and what of a video is looked at.

`fps`, `num_frames`, `max_frames` and `cap_pixels_per_frame` may be in `video_url`, beside it in the
part, and for all videos of a request in `mm_processor_kwargs` or `media_io_kwargs.video` (vLLM's
names); the innermost applies. A list of frames in place of a URL is taken as it is: `fps` says at
which rate its frames were taken.
"""

from typing import Annotated

from msgspec import Meta, Struct

from services.common.errors import InvalidRequest
from services.common.frame_pairs import Sampling

# Of one video; what a request may have is in `bounds`.
MAX_LISTED_FRAMES = 1 << 16

Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]
_Fps = Annotated[float, Meta(gt=0, le=1000)]
_Frames = Annotated[int, Meta(ge=2, le=MAX_LISTED_FRAMES)]
_FpsOfEach = Annotated[list[_Fps], Meta(max_length=1024)]
_FramesOfEach = Annotated[list[_Frames], Meta(max_length=1024)]


class VideoFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What of a video is looked at; null: as the model's video processor says."""

    fps: _Fps | None = None
    num_frames: _Frames | None = None
    max_frames: _Frames | None = None
    cap_pixels_per_frame: bool | None = None


class VideoUrl(VideoFields):
    """A URL, and what of the video is looked at."""

    url: str


class VideoPart(VideoFields):
    """A video, in one of its spellings; `urls` of each are the file's, or those of frames."""

    @property
    def scopes(self) -> tuple[VideoFields, ...]:
        """The part's own options, the innermost first."""
        return (self,)


class VideoUrlPart(VideoPart, tag_field="type", tag="video_url"):
    """vLLM's part."""

    video_url: VideoUrl | str

    @property
    def urls(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url

    @property
    def scopes(self) -> tuple[VideoFields, ...]:
        return (self,) if isinstance(self.video_url, str) else (self.video_url, self)


class InputVideoPart(VideoUrlPart, tag="input_video"):
    """A video as the Responses API would spell it."""


class NamedVideoPart(VideoPart, tag_field="type", tag="video"):
    """A video as model cards spell it: a URL, or the URLs of frames that the client has chosen."""

    video: str | Annotated[list[str], Meta(max_length=MAX_LISTED_FRAMES)]

    @property
    def urls(self) -> str | list[str]:
        return self.video


AnyVideo = VideoUrlPart | NamedVideoPart


class MultimodalOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling of the limits of all images' pixels, and of `VideoFields` of all videos of a
    request; a list has a value for each, in order.
    """

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    fps: _Fps | _FpsOfEach | None = None
    num_frames: _Frames | _FramesOfEach | None = None
    max_frames: _Frames | None = None
    cap_pixels_per_frame: bool | None = None

    def of(self, index: int) -> VideoFields:
        """Of one video; `check` has seen their number."""
        fps, num_frames = self.fps, self.num_frames
        return VideoFields(
            fps=fps[index] if isinstance(fps, list) else fps,
            num_frames=num_frames[index] if isinstance(num_frames, list) else num_frames,
            max_frames=self.max_frames,
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


def sampling_of(scopes: list[tuple[str, VideoFields]]) -> Sampling:
    """What is wanted of a video, by the innermost scope that says it.

    Args:
        scopes: with their places in the request; the innermost first.

    Raises:
        InvalidRequest: a scope has both `fps` and `num_frames`, or `num_frames` is over
            `max_frames`.
    """
    for place, scope in scopes:
        if scope.fps is not None and scope.num_frames is not None:
            raise InvalidRequest("fps and num_frames exclude each other", param=f"{place}.fps")
    found = [scope for _, scope in scopes]
    chosen = next((s for s in found if s.fps is not None or s.num_frames is not None), None)
    most = next((s.max_frames for s in found if s.max_frames is not None), None)
    caps = (s.cap_pixels_per_frame for s in found)
    cap = next((cap for cap in caps if cap is not None), None)
    fps, count = (chosen.fps, chosen.num_frames) if chosen else (None, None)
    if count is not None and most is not None and count > most:
        raise InvalidRequest(f"num_frames {count} is above max_frames {most}", param=scopes[0][0])
    return Sampling(fps=fps, num_frames=count, max_frames=most, cap_pixels_per_frame=cap)
