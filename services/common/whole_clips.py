"""Frames, sizes and times of videos, for models that see a video as a whole.

All tokens of a video are one run in the prompt, without text between the pairs of frames. The
positions of the tokens have the time. A pair is still a unit of its own, because the vision tower
of these models does not attend from one pair to another.

The formulas are those of transformers' video processor and processor (5.17) for these models, with
their rounding. Two things differ. Where float32 would make transformers sample a frame behind the
last one, that frame is left out. And transformers 5.17 rounds the seconds of a pair down before it
multiplies them, and begins the text behind a video within the video's time; here both are as in
the models' training, in transformers 4 and in vLLM.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from services.common.errors import InvalidVideo
from services.common.frame_pairs import NO_LIMITS, UNKNOWN_RATE, FramePairs, PixelLimits, Sampling
from services.common.geometry import MAX_ASPECT_RATIO, Int32s, Size, Unit, fitted

# The share of `max_video_tokens` that the tokens of a video may have if frames are capped.
_SHARE_OF_TOKENS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeClips(FramePairs):
    """The video processor of a checkpoint whose videos are one run of tokens.

    `min_pixels` and `max_pixels` are limits on each frame, and `max_frame_tokens` is not used.

    Attributes:
        max_video_tokens: number of tokens, of which the tokens of a video may be 90 % if the pixels
            of frames are capped.
        tokens_per_second: number of positions on the time axis for a second. None if the position
            is the number of the pair.
    """

    max_video_tokens: int = 128_000
    tokens_per_second: float | None = None

    def indices(self, num_frames: int, rate: float, wanted: Sampling) -> tuple[int, ...]:
        """Returns the indices of the sampled frames, in order, an even number of them unless all
        frames are taken.

        Raises:
            InvalidVideo: the video has less than two frames, or less than the request wants.
        """
        if num_frames < 2:
            raise InvalidVideo("a video needs two frames or more: send one as an image")
        fps, count = wanted.fps, wanted.num_frames
        if wanted.all_frames:
            count = min(num_frames, wanted.max_frames or num_frames)
            if count == num_frames:
                return tuple(range(num_frames))
        elif fps is None and count is None:
            fps, count = self.fps, self.num_frames
        if count is None:
            most = min(wanted.max_frames or self.max_frames, num_frames) // 2 * 2
            sampled = num_frames / (rate or UNKNOWN_RATE) * (fps or 2.0)
            count = math.floor(min(max(sampled, self.min_frames), most) / 2) * 2
        else:
            count = round(count / 2) * 2
        if not 0 < count <= num_frames:
            raise InvalidVideo(f"{count} frames cannot be sampled from a video of {num_frames}")
        step = num_frames / count
        places = (np.arange(count) * step).astype(np.float32).astype(np.int64)
        return tuple(places.tolist())

    def resized(self, num_sampled: int, size: Size, limits: PixelLimits = NO_LIMITS) -> Size:
        """Returns the size (height, width) to which each frame is resized.

        Raises:
            InvalidVideo: the video has a single frame, or an aspect ratio over 200.
        """
        if num_sampled < 2:
            raise InvalidVideo("a video needs two frames or more: send one as an image")
        if max(size) / min(size) > MAX_ASPECT_RATIO:
            raise InvalidVideo(
                f"the video's frames have {size[1]}x{size[0]} pixels, and one side may be at most "
                f"{MAX_ASPECT_RATIO} times as long as the other"
            )
        low = limits.min_per_frame or limits.min_of_all or self.min_pixels
        high = limits.max_per_frame or limits.max_of_all or self.max_pixels
        if self.caps(limits) or limits.total is not None:
            side = self.token_size
            total = int(self.max_video_tokens * side * side * _SHARE_OF_TOKENS)
            total = total if limits.total is None else limits.total
            high = max(min(high, total * 2 // num_sampled), int(low * 1.05))
        return fitted(size, self.token_size, min(low, high), high)

    def texts(self, times: Sequence[float]) -> list[str]:
        return [""] * len(times)

    def steps(self, num_units: int, rate: float) -> Sequence[int]:
        """Returns the time of each unit in positions: its number, or the seconds since the first
        unit times `tokens_per_second`, in float32 and rounded down.
        """
        if self.tokens_per_second is None:
            return range(num_units)
        interval = np.float32(2 / rate) * np.float32(self.tokens_per_second)
        return (np.arange(num_units, dtype=np.float32) * interval).astype(np.int64).tolist()

    def placeholders(
        self, units: Sequence[Unit], texts: Sequence[Sequence[int]]
    ) -> tuple[Int32s, Sequence[int]]:
        """Returns the token ids that replace a video's `video_token_id`, and the offset of each
        unit's run among them.

        Args:
            texts: not used.
        """
        *offsets, total = accumulate(map(self.num_tokens, units), initial=0)
        return np.full(total, self.video_token_id, np.int32), offsets
