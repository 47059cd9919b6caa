"""Frames of videos decoded in this process, in place of `ClipPool`."""

from collections.abc import Generator
from contextlib import closing, contextmanager

import numpy as np

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Size
from services.encoder.decoding.clips.container import to_rgb, upright_size
from services.encoder.decoding.clips.frames import Frames


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


class InProcessClips:
    """In the place of a `ClipPool`; a file's address is its name here.

    Args:
        files: by name.
    """

    def __init__(self, **files: bytes) -> None:
        self._files = files

    @staticmethod
    def address(name: str) -> MemoryAddress:
        return MemoryAddress(0, 0, name, 0)

    @contextmanager
    def frames(
        self,
        file: MemoryAddress,
        size: Size,
        indices: tuple[int, int],
        lane: int = 0,
        index: MemoryAddress | None = None,
    ) -> Generator[list[np.ndarray]]:
        yield frame_pixels(self._files[file.name], tuple(dict.fromkeys(indices)))
