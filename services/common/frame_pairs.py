"""Frames, sizes and times of videos, for models that see a video as a list of images.

Each image is a pair of sampled frames, with its time as text before it.

The formulas are those of transformers' video processor and processor (5.17) for these
models, with their rounding: counts are truncated; indices and sizes are rounded half to even.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.common.errors import InvalidVideo
from services.common.geometry import MAX_ASPECT_RATIO, Int32s, Patches, Size, Unit, fitted

UNKNOWN_RATE = 24.0  # frames per second that are assumed where a video has no rate


@dataclass(frozen=True, slots=True)
class Clip:
    """The facts about a video that are known before it is decoded.

    Attributes:
        num_frames: number of frames that can be decoded.
        rate: frames per second on average. 0 if it is unknown.
        size: size of an upright frame.
    """

    num_frames: int
    rate: float
    size: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelLimits:
    """A request's limits on the pixels of a video's resized frames. None stands for the limit of
    the model's video processor.

    Attributes:
        min_per_frame: least pixels of each frame.
        max_per_frame: most pixels of each frame.
        total: pixels of all tokens together, as qwen-vl-utils counts them: a pair of frames counts
            once, so that `total` divided by the pixels of a token is the most tokens of a video.
        min_of_all: least pixels of all frames together, if `min_per_frame` is None.
        max_of_all: most pixels of all frames together, if `total` is None.
        cap_per_frame: switch of the cap on each frame's pixels, which keeps the frames of a short
            video as small as those of a long video.
    """

    min_per_frame: int | None = None
    max_per_frame: int | None = None
    total: int | None = None
    min_of_all: int | None = None
    max_of_all: int | None = None
    cap_per_frame: bool | None = None


NO_LIMITS = PixelLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A request's choice of a video's frames. None stands for the choice of the model's video
    processor.

    Attributes:
        fps: frames to sample per second. Excludes `num_frames` and `all_frames`.
        num_frames: number of frames to sample of the whole video. Excludes `all_frames`.
        all_frames: switch that leaves no frame out, as long as there are at most `max_frames`.
        max_frames: most frames that `fps` or `all_frames` samples.
    """

    fps: float | None = None
    num_frames: int | None = None
    all_frames: bool = False
    max_frames: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePairs(Patches):
    """The video processor of a checkpoint.

    Attributes:
        video_token_id: token that the chat template writes once per video, and that also stands for
            each of a unit's tokens.
        start_token_id, end_token_id: tokens before and behind a unit's tokens.
        min_pixels, max_pixels: least and most pixels of all resized frames of a video together.
        fps: frames to sample per second. All frames are sampled if it is None.
        num_frames: number of frames to sample of each video, if `fps` is None.
        min_frames, max_frames: least and most frames that `fps` samples.
        max_frame_tokens: most tokens of a frame where its pixels are capped.
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
        """Returns the indices of the sampled frames, in order. An index may occur twice."""
        fps, count = wanted.fps, wanted.num_frames
        if wanted.all_frames:
            count = min(num_frames, wanted.max_frames or num_frames)
        elif fps is None and count is None:
            fps, count = self.fps, self.num_frames
        most = wanted.max_frames or self.max_frames
        if count is None and fps is None:
            count = min(max(num_frames, self.min_frames), most)
        elif count is None:
            count = int(num_frames / (rate or UNKNOWN_RATE) * (fps or 0.0))
            count = min(max(count, self.min_frames), most, num_frames)
        places = np.linspace(0, num_frames - 1, count).round().astype(int)
        return tuple(places.tolist())

    def resized(self, num_sampled: int, size: Size, limits: PixelLimits = NO_LIMITS) -> Size:
        """Returns the size (height, width) to which each frame is resized.

        Raises:
            InvalidVideo: the video has a single frame, or an aspect ratio over 200.
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
                f"the video's frames have {size[1]}x{size[0]} pixels, and one side may be at most "
                f"{MAX_ASPECT_RATIO} times as long as the other"
            )
        low, high = self._pixels(num_sampled, limits)
        return fitted(
            (height, width),
            side,
            low,
            high,
            frames=num_sampled,
            counted=round(num_sampled / 2) * 2,  # 5 frames count as 4
        )

    def caps(self, limits: PixelLimits) -> bool:
        """Returns whether the pixels of each frame are capped."""
        return self.cap_pixels_per_frame if limits.cap_per_frame is None else limits.cap_per_frame

    def _pixels(self, num_sampled: int, limits: PixelLimits) -> tuple[int, int]:
        """Returns the least and the most pixels of all sampled frames together."""
        low, floor = limits.min_of_all or self.min_pixels, limits.min_per_frame
        if floor is not None:
            low = floor * num_sampled
        high = limits.max_of_all or self.max_pixels
        if limits.total is not None:
            high = 2 * limits.total
        if self.caps(limits):
            share = min(self.max_frame_tokens * self.token_size**2, high // num_sampled)
            high = max(share, int((floor or low) * 1.05)) * num_sampled
        if limits.max_per_frame is not None:
            high = min(high, limits.max_per_frame * num_sampled)
        return min(low, high), high

    def units(
        self, indices: Sequence[int], size: Size, limits: PixelLimits = NO_LIMITS
    ) -> list[Unit]:
        """Returns a unit for each pair of sampled frames. An odd last frame is paired with itself.

        Raises:
            InvalidVideo: see `resized`.
        """
        height, width = self.resized(len(indices), size, limits)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return [Unit(grid, pair) for pair in _pairs(indices)]

    def times(self, indices: Sequence[int], rate: float) -> list[float]:
        """Returns the time of each unit in seconds, which is the mean of its frames' times."""
        per_second = rate or UNKNOWN_RATE
        return [(first / per_second + last / per_second) / 2 for first, last in _pairs(indices)]

    def texts(self, times: Sequence[float]) -> list[str]:
        """Returns the text that stands before each unit in the prompt.

        Args:
            times: time of each unit in seconds.
        """
        return [time_text(time) for time in times]

    def steps(self, num_units: int, rate: float) -> Sequence[int]:
        """Returns the time of each unit in positions, if the positions of the prompt have the time.
        All are 0 here, because a unit's time is text.

        Args:
            num_units: number of units.
            rate: sampled frames per second.
        """
        return [0] * num_units

    def rate_of(self, indices: Sequence[int], clip: Clip) -> float:
        """Returns the sampled frames per second, as transformers' `VideoMetadata.sampled_fps`."""
        return len(indices) / clip.num_frames * (clip.rate or UNKNOWN_RATE)

    def placeholders(
        self, units: Sequence[Unit], texts: Sequence[Sequence[int]]
    ) -> tuple[Int32s, Sequence[int]]:
        """Returns the token ids that replace a video's `video_token_id`, and the offset of each
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
    """Returns the text that stands before a unit in the prompt."""
    return f"<{seconds:.1f} seconds>"


def _pairs(indices: Sequence[int]) -> list[tuple[int, int]]:
    padded = [*indices, *indices[-1:]] if len(indices) % 2 else indices
    return list(zip(padded[::2], padded[1::2], strict=True))
