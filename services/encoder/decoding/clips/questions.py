"""The questions to the processes that decode videos, and their answers. Pure data: only those
processes import PyAV.
"""

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Size

MAX_FRAME_PIXELS = 4096 * 2304
DECODER_THREADS = 2  # threads of FFmpeg that decode a video
# Threads of the CPU for each lane of a video: a lane of H.264 in 1080p keeps 1.2 threads busy on an
# H200's host, because FFmpeg's two wait for each other. The rest is for resizing and for the tower.
LANE_THREADS = 1.5
CORRUPT = "the video is truncated or corrupt"
TOO_SLOW = "decoding the video takes too long"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a video file. All but the index are fields of the message `ProbeResponse`.

    Attributes:
        num_frames: number of frames.
        rate: frames per second on average. 0 if unknown.
        height: height of the upright frames in pixels.
        width: width of the upright frames in pixels.
        duration_s: duration in seconds. 0 if unknown.
        frame_digests: digests of all frames, one after another.
        key_frames: numbers of the frames behind the first with which decoding may start, int32.
        index: the encoded `Index` of the file, with which workers decode frames without reading all
            packets before. Empty if it is stored elsewhere.
    """

    num_frames: int
    rate: float
    height: int
    width: int
    duration_s: float
    frame_digests: bytes
    key_frames: bytes = b""
    index: bytes = b""

    @property
    def public(self) -> dict[str, Any]:
        """The fields of the message `ProbeResponse`, by name."""
        fields = asdict(self)
        del fields["index"]
        return fields


class Question(msgspec.Struct):
    """A request for the facts of a video file, or for two of its frames.

    Attributes:
        file: address of the file.
        frames: numbers of the two frames to decode. None if the facts are requested.
        memory_bytes: most bytes that the process may allocate for the answer.
        cpu_s: seconds of CPU time that the answer may take.
        index: address of the file's encoded `Index`. None if it has to be read from the file.
    """

    file: MemoryAddress
    frames: tuple[int, int] | None
    memory_bytes: int
    cpu_s: float
    index: MemoryAddress | None = None


class Answer(msgspec.Struct):
    """The answer to a question.

    Attributes:
        facts: facts of the file. None if frames were requested, or after an error.
        sizes: height and width of each frame. The frames' pixels are in the shared memory, one
            frame after another.
        error_code: code of an error in `services/common/errors.py`. Empty if there was no error.
        message: text of the error.
    """

    facts: Facts | None = None
    sizes: list[Size] = []
    error_code: str = ""
    message: str = ""
