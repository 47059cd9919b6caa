"""The encoded data from which the encoder makes the pixels of a unit.

The front sends a `Source` to the engine with each job, and `preprocess` decodes it. Pure data.
"""

import msgspec

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Size


class Video(msgspec.Struct, frozen=True):
    """A video file in the front's memory.

    Attributes:
        file: address of the file's bytes. Its name identifies the video.
        size: height and width of the video's upright frames, in pixels.
        start: key frame from which the unit's first frame is decoded.
        index: address of the file's encoded `Index`. None if each decoder has to read it from the
            file.
    """

    file: MemoryAddress
    size: Size
    start: int = 0
    index: MemoryAddress | None = None


class Source(msgspec.Struct, frozen=True):
    """The file or files of a unit: an image, two images that are a pair of frames, or a video.

    Attributes:
        image: encoded image file. Empty if the unit is a pair of frames of a video.
        second: encoded image file of the pair's second frame. Empty if the unit is a still image,
            or if both frames of the pair are `image`.
        video: video file of the unit's frames. None if the unit is made of image files.
    """

    image: bytes = b""
    second: bytes = b""
    video: Video | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the image files. A video's bytes are not in the source."""
        return len(self.image) + len(self.second)


EMPTY_SOURCE = Source()
