"""The tasks of the processes that read clients' files, and the results.

Pure data: the front and the engine import this file, and only the processes import decoders.
"""

from dataclasses import dataclass

import msgspec

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.errors import InvalidVideo
from services.common.geometry import Size
from services.common.images.image_header import ImageHeader

MAX_PROBES = 2  # videos whose facts are read at the same time
MAX_FRAME_PIXELS = 4096 * 2304
CORRUPT = "the video is truncated or corrupt"
TOO_SLOW = "decoding the video takes too long"


class DecoderLost(InvalidVideo):
    """The video's worker was killed twice, or did not answer in time, possibly for another reason
    than the video. The gateway does not send the video to another encoder, but the client may send
    it again.
    """


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a video file, as in the gRPC message `ProbeResponse`.

    Attributes:
        num_frames: number of frames.
        rate: frames per second on average. 0 if unknown.
        height: height of the upright frames in pixels.
        width: width of the upright frames in pixels.
        duration_s: duration in seconds. 0 if unknown.
        frame_digests: digests of all frames, one after another.
    """

    num_frames: int
    rate: float
    height: int
    width: int
    duration_s: float
    frame_digests: bytes


class StillTask(msgspec.Struct, frozen=True, tag="still"):
    """Decodes an image file, whose bytes are sent with the task.

    Attributes:
        header: header of the file.
        memory_bytes: most bytes that the worker may allocate for the task.
        cpu_s: seconds of CPU time that the task may take.
    """

    header: ImageHeader
    memory_bytes: int
    cpu_s: float


class ProbeTask(msgspec.Struct, frozen=True, tag="probe"):
    """Opens a video file and reads its facts. The file stays open for a `FramesTask`.

    Attributes:
        file: address of the file.
        memory_bytes: most bytes that the worker may allocate for the open video.
        cpu_s: seconds of CPU time that the task may take.
    """

    file: MemoryAddress
    memory_bytes: int
    cpu_s: float


class FramesTask(msgspec.Struct, frozen=True, tag="frames"):
    """Decodes two frames of a video file, which is opened if it is not open, and stays open.

    Attributes:
        file: address of the file.
        indices: numbers of the two frames, which may be equal.
        memory_bytes: most bytes that the worker may allocate for the open video.
        cpu_s: seconds of CPU time that the task may take.
    """

    file: MemoryAddress
    indices: tuple[int, int]
    memory_bytes: int
    cpu_s: float


Task = StillTask | ProbeTask | FramesTask


class Result(msgspec.Struct, frozen=True):
    """The result of a task. Pixels are in the memory that the worker shares with the engine.

    Attributes:
        facts: facts of the video. None unless the task was a probe and had no error.
        sizes: height and width of each frame that a `FramesTask` decoded. The pixels of the frames
            follow each other.
        error_code: code of an error in `services/common/errors.py`. Empty if there was no error.
        message: text of the error.
    """

    facts: Facts | None = None
    sizes: list[Size] = []
    error_code: str = ""
    message: str = ""
