"""What a unit is made from → its resized pixels: a still image, or a pair of frames.

The engine's pool of threads calls a `Preparer`. Frames are resized as `preprocess` resizes images,
which is as the reference video processor does.
"""

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.errors import InvalidVideo
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import read_header
from services.encoder.clips.clip_pool import ClipPool
from services.encoder.engine.messages import Source
from services.encoder.preprocess import MAX_PINNED_BYTES, Decode, preprocess, resize

# Of a pair of frames (1080p: 12 MB); larger ones stay with their decoder until they are resized.
_MAX_COPIED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Preparer:
    """Decodes and resizes one unit. Threads share it.

    Attributes:
        resample: of frames; None: the model takes no videos.
        max_source_pixels: larger images are refused before a pixel is decoded.
        pinned: the result is in pinned memory, unless it is large.
    """

    geometry: Geometry
    resample: str | None
    max_source_pixels: int
    decode: Decode
    video_decoder: ClipPool
    pinned: bool = False

    def __call__(self, source: Source, unit: Unit, decoded: Callable[[], None]) -> Tensor:
        """Pixels of a unit.

        Args:
            unit: of it, as made from its header elsewhere.
            decoded: called if a video's decoder is free again before its frames are resized.

        Returns:
            `[height, width, 3]` uint8 of the unit's size, contiguous; of frames `[2, ...]`.

        Raises:
            InvalidImage: not a readable image, too large, or the unit is none of its.
            InvalidVideo: the frames cannot be decoded.
            VideoNotHeld: the video's file is gone.
        """
        if unit.frames is None:
            return preprocess(
                source.image, unit, self.geometry,
                max_source_pixels=self.max_source_pixels, decode=self.decode, pinned=self.pinned,
            )  # fmt: skip
        if self.resample is None:
            raise InvalidVideo("this model takes no videos")
        height, width = self.geometry.size_of(unit)
        shape = (2, height, width, 3)
        pinned = self.pinned and math.prod(shape) <= MAX_PINNED_BYTES
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        with closing(self._frames(source, unit.frames, decoded)) as frames:
            for index, pixels in enumerate(frames):
                # One that is alone is both.
                out[index:] = resize(torch.from_numpy(pixels), height, width, self.resample)
        return out

    def _frames(
        self, source: Source, indices: tuple[int, int], decoded: Callable[[], None]
    ) -> Generator[np.ndarray]:
        """Each different frame, valid until the next one."""
        if source.video is None:
            for data in (source.image, source.second) if source.second else (source.image,):
                header = read_header(data, max_source_pixels=self.max_source_pixels)
                with self.decode(data, header) as pixels:
                    yield pixels
            return
        with self.video_decoder.frames(source.video.file, source.video.size, indices) as shared:
            if sum(pixels.nbytes for pixels in shared) > _MAX_COPIED_BYTES:
                yield from shared
                return
            frames = [pixels.copy() for pixels in shared]
        decoded()
        yield from frames
