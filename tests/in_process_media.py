"""Images and videos decoded in the calling process, without limits, in the place of `MediaPool`."""

from collections.abc import Generator
from contextlib import closing, contextmanager

import numpy as np
from torch import Tensor

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Geometry, Size, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader
from services.encoder.decoding.clips.container import to_rgb, upright_size
from services.encoder.decoding.clips.frames import Frames
from services.encoder.decoding.decode import decode
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Source
from services.encoder.decoding.tasks import Facts


class InProcessMedia:
    """Decodes in the calling thread. A video file's address is its name here.

    Args:
        files: video files, by name.
    """

    def __init__(self, **files: bytes) -> None:
        self._files = files

    @staticmethod
    def address(name: str) -> MemoryAddress:
        return MemoryAddress(0, 0, name, 0)

    @contextmanager
    def still(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        pixels = np.empty((*header.upright_size, 3), np.uint8)
        decode(data, header, pixels)
        yield pixels

    @contextmanager
    def frames(
        self, file: MemoryAddress, size: Size, indices: tuple[int, int]
    ) -> Generator[list[np.ndarray]]:
        yield frame_pixels(self._files[file.name], tuple(dict.fromkeys(indices)))


def frame_pixels(data: bytes, indices: tuple[int, ...]) -> list[np.ndarray]:
    """Upright RGB, `[height, width, 3]` uint8 each."""
    found = []
    with closing(Frames(memoryview(data))) as frames:
        for index in indices:
            frame = frames.frame(index)
            out = np.empty((*upright_size(frame), 3), np.uint8)
            to_rgb(frame, out)
            found.append(out)
    return found


def probe(data: bytes) -> Facts:
    """Returns the facts of a video file."""
    with closing(Frames(memoryview(data))) as frames:
        return frames.facts()


def preprocess(
    data: bytes, unit: Unit, geometry: Geometry, max_source_pixels: int = MAX_SOURCE_PIXELS
) -> Tensor:
    """Returns a still image's pixels."""
    made = Preprocessor(
        geometry,
        InProcessMedia(),  # type: ignore[arg-type]
        pinned=False,
        max_source_pixels=max_source_pixels,
    )
    return made.prepare(Source(data), unit)
