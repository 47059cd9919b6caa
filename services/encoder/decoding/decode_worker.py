"""The process that decodes images. `decode_pool` starts it.

Each image has limits of CPU time and of memory. The kernel ends the process by SIGPROF when the CPU
time is used up, and allocations beyond the memory limit fail. When the pod is short of memory, the
kernel ends this process before others. The process uses neither torch nor a device, and it ends
when the engine closes its socket.
"""

import os
from dataclasses import dataclass

# Before numpy, whose BLAS would start a thread per core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251

import msgspec
import numpy as np

from services.common.errors import InvalidImage
from services.common.images.image_header import ImageHeader
from services.common.process.work_limits import limited
from services.encoder.decoding.child import serve
from services.encoder.decoding.decode import decode

_TOO_LARGE = "decoding the image takes more memory than an image of its size may"


@dataclass(frozen=True, slots=True)
class Task:
    """An image to decode, and its limits.

    Attributes:
        header: header of the image file.
        memory_bytes: most bytes that the process may allocate for the image.
        cpu_s: seconds of CPU time that decoding may take.
    """

    header: ImageHeader
    memory_bytes: int
    cpu_s: float


def answer(question: list[bytes], shared: np.ndarray) -> bytes:
    """Decodes an image into the shared memory.

    Args:
        question: the encoded `Task`, and the image file.
        shared: memory for the pixels.

    Returns:
        Text of the error. Empty if the image was decoded.
    """
    task, image = msgspec.msgpack.decode(question[0], type=Task), question[1]
    height, width = task.header.upright_size
    pixels = shared[: height * width * 3].reshape(height, width, 3)
    try:
        with limited(task.cpu_s, task.memory_bytes):
            decode(image, task.header, pixels)
    except MemoryError:
        return _TOO_LARGE.encode()
    except InvalidImage as error:
        return error.message.encode()
    return b""


if __name__ == "__main__":
    serve(2, answer)
