"""What a unit is made from → its resized pixels: a still image, or a pair of frames.

The engine's pool of threads calls a `Preparer`. Frames are resized as `preprocess` resizes images,
which is as the reference video processor does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.errors import InvalidVideo
from services.common.geometry import Geometry, Unit
from services.common.images.image_header import read_header
from services.encoder.clips.clip_pool import ClipPool
from services.encoder.engine.messages import Source
from services.encoder.preprocess import MAX_PINNED_BYTES, Decoder, preprocess, resize

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
    decoder: Decoder
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
                max_source_pixels=self.max_source_pixels, decoder=self.decoder, pinned=self.pinned,
            )  # fmt: skip
        shape = (2, *self.geometry.size_of(unit), 3)
        pinned = self.pinned and math.prod(shape) <= MAX_PINNED_BYTES
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        if self._fill(source, unit.frames, out, decoded) == 1:
            out[1] = out[0]
        return out

    def _fill(
        self, source: Source, indices: tuple[int, int], out: Tensor, decoded: Callable[[], None]
    ) -> int:
        """Resizes each different frame; returns how many there are."""
        if source.video is not None:
            file, size = source.video.file, source.video.size
            with self.video_decoder.frames(file, size, indices) as shared:
                if sum(pixels.nbytes for pixels in shared) > _MAX_COPIED_BYTES:
                    return self._put_all(shared, out)
                frames = [pixels.copy() for pixels in shared]
            decoded()
            return self._put_all(frames, out)
        files = (source.image, source.second) if source.second else (source.image,)
        for index, data in enumerate(files):
            header = read_header(data, max_source_pixels=self.max_source_pixels)
            with self.decoder.decoded(data, header) as pixels:
                self._put(pixels, out[index])
        return len(files)

    def _put_all(self, frames: Sequence[np.ndarray], out: Tensor) -> int:
        for index, pixels in enumerate(frames):
            self._put(pixels, out[index])
        return len(frames)

    def _put(self, pixels: np.ndarray, out: Tensor) -> None:
        if self.resample is None:
            raise InvalidVideo("this model takes no videos")
        height, width, _ = out.shape
        out.copy_(resize(torch.from_numpy(pixels), height, width, self.resample))
