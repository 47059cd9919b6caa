"""What the processes that decode videos are asked, and what they answer. Pure data: PyAV is loaded
by those processes alone.
"""

from dataclasses import dataclass

import msgspec

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Size

MAX_FRAME_PIXELS = 4096 * 2304
CORRUPT = "the video is truncated or corrupt"
TOO_SLOW = "decoding the video takes too long"


@dataclass(frozen=True, slots=True)
class Facts:
    """As ProbeResponse, but for the file's digest."""

    num_frames: int
    rate: float
    height: int
    width: int
    duration_s: float
    frame_digests: bytes


class Question(msgspec.Struct):
    """What to do with a file; `frames`: its frames to decode, None: read its facts."""

    file: MemoryAddress
    frames: tuple[int, int] | None
    memory_bytes: int
    cpu_s: float


class Answer(msgspec.Struct):
    """`error_code` is empty, or a code of services/common/errors.py; sizes are those of the frames,
    whose pixels are in the shared memory, one behind the other.
    """

    facts: Facts | None = None
    sizes: list[Size] = []
    error_code: str = ""
    message: str = ""
