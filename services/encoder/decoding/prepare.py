"""What a unit is made from → its resized pixels: a still image, or a pair of frames.

The engine's pool of threads calls a `Preparer`. Frames are resized as `preprocess` resizes images,
which is as the reference video processor does.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.geometry import Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, read_header
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.preprocess import Preprocessor, resize
from services.encoder.engine.messages import Source

# Of a pair of frames (1080p: 12 MB); larger ones stay with their decoder until they are resized.
_MAX_COPIED_BYTES = 16 << 20


@dataclass(frozen=True)
class Preparer(Preprocessor):
    """Also raises InvalidVideo: the frames cannot be decoded; VideoNotHeld: the video's file is
    gone.

    Attributes:
        resample: of frames.
    """

    resample: str
    video_decoder: ClipPool

    def __call__(self, source: Source, unit: Unit, decoded: Callable[[], None]) -> Tensor:
        if unit.frames is None:
            return super().__call__(source, unit, decoded)
        height, width = self.geometry.size_of(unit)
        out = self.empty(2, height, width, 3)
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
                header = read_header(data, max_source_pixels=MAX_SOURCE_PIXELS)
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
