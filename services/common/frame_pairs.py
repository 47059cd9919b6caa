"""Which frames of a video a model sees, at what size, and when each is: for models to which a video
is a list of images, each of which is a pair of sampled frames, with its time as text before it.

The formulas are those of transformers' video processor and processor (5.17) for them, with their
rounding: counts are truncated, indices and sizes rounded half to even.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.common.errors import InvalidVideo
from services.common.geometry import MAX_ASPECT_RATIO, Int32s, Patches, Size, Unit, fitted

_UNKNOWN_RATE = 24.0  # frames per second of a video that does not say


@dataclass(frozen=True, slots=True)
class Clip:
    """What is known of a video before it is decoded.

    Attributes:
        num_frames: that can be decoded.
        rate: frames per second on average; 0: unknown.
        size: of an upright frame.
    """

    num_frames: int
    rate: float
    size: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a request says of a video; None: as the model's video processor does.

    Attributes:
        fps: frames to sample per second; not with `num_frames`.
        num_frames: frames to sample of the whole video.
        max_frames: the most that `fps` samples.
        cap_pixels_per_frame: a short video's frames are no larger than a long one's.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    cap_pixels_per_frame: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePairs(Patches):
    """The video processor of a checkpoint.

    Attributes:
        video_token_id: the chat template writes it once per video; it also stands for each of a
            unit's tokens.
        start_token_id, end_token_id: before and behind a unit's tokens.
        min_pixels, max_pixels: of all frames of a video together, resized.
        fps: frames to sample per second; None: all.
        num_frames: to sample of each video, if `fps` is None.
        min_frames, max_frames: of what `fps` samples.
        max_frame_tokens: of a frame where its pixels are capped.
    """

    video_token_id: int
    start_token_id: int
    end_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    fps: float | None = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_frame_tokens: int = 768
    cap_pixels_per_frame: bool = False
    resample: Literal["bilinear", "bicubic"] = "bicubic"

    def indices(self, num_frames: int, rate: float, wanted: Sampling) -> tuple[int, ...]:
        """The frames of a video that are sampled, in order; some may come twice."""
        fps, count = wanted.fps, wanted.num_frames
        if fps is None and count is None:
            fps, count = self.fps, self.num_frames
        most = wanted.max_frames or self.max_frames
        if count is None and fps is None:
            count = min(max(num_frames, self.min_frames), most)
        elif count is None:
            count = int(num_frames / (rate or _UNKNOWN_RATE) * (fps or 0.0))
            count = min(max(count, self.min_frames), most, num_frames)
        places = np.linspace(0, num_frames - 1, count).round().astype(int)
        return tuple(places.tolist())

    def resized(self, num_sampled: int, size: Size, cap: bool | None = None) -> Size:
        """The size of each frame as the tower sees it.

        Raises:
            InvalidVideo: there is one frame alone, or one side is over 200 times the other.
        """
        if num_sampled < 2:
            raise InvalidVideo("a video needs two frames or more: send one as an image")
        height, width = size
        side = self.token_size
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise InvalidVideo(
                f"the video's aspect ratio is over {MAX_ASPECT_RATIO}: {size[0]}x{size[1]}"
            )
        return fitted(
            (height, width), side, self.min_pixels, self._max_pixels(num_sampled, cap),
            frames=num_sampled, counted=round(num_sampled / 2) * 2,  # 5 count as 4
        )  # fmt: skip

    def _max_pixels(self, num_sampled: int, cap: bool | None) -> int:
        if not (self.cap_pixels_per_frame if cap is None else cap):
            return self.max_pixels
        most = self.max_frame_tokens * self.token_size**2
        share = min(most, self.max_pixels // num_sampled)
        return max(share, int(self.min_pixels * 1.05)) * num_sampled

    def units(self, indices: Sequence[int], size: Size, cap: bool | None = None) -> list[Unit]:
        """Pairs of the sampled frames; an odd last one is paired with itself.

        Raises:
            InvalidVideo: as `resized`.
        """
        height, width = self.resized(len(indices), size, cap)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return [Unit(grid, pair) for pair in _pairs(indices)]

    def times(self, indices: Sequence[int], rate: float) -> list[float]:
        """Seconds from the beginning, of each unit: the middle of its two frames' times."""
        per_second = rate or _UNKNOWN_RATE
        return [(first / per_second + last / per_second) / 2 for first, last in _pairs(indices)]

    def rate_of(self, indices: Sequence[int], clip: Clip) -> float:
        """Sampled frames per second, as transformers' `VideoMetadata.sampled_fps`."""
        return len(indices) / clip.num_frames * (clip.rate or _UNKNOWN_RATE)

    def placeholders(
        self, units: Sequence[Unit], texts: Sequence[Sequence[int]]
    ) -> tuple[Int32s, Sequence[int]]:
        """The tokens that take the place of a video's `video_token_id`, and the offset of each
        unit's run among them.

        Args:
            texts: token ids of each unit's `time_text`.
        """
        ids: list[int] = []
        offsets: list[int] = []
        for unit, text in zip(units, texts, strict=True):
            ids += (*text, self.start_token_id)
            offsets.append(len(ids))
            ids += [self.video_token_id] * self.num_tokens(unit)
            ids.append(self.end_token_id)
        return np.array(ids, np.int32), offsets


def time_text(seconds: float) -> str:
    """What stands before a unit in the prompt."""
    return f"<{seconds:.1f} seconds>"


def _pairs(indices: Sequence[int]) -> list[tuple[int, int]]:
    padded = [*indices, *indices[-1:]] if len(indices) % 2 else indices
    return list(zip(padded[::2], padded[1::2], strict=True))
