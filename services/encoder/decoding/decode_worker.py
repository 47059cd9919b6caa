"""The process that decodes images; `decode_pool` starts it.

Each image has its own limits of CPU time and of memory: the kernel ends the process at the first
(SIGPROF), and at the second allocations fail. Under memory pressure in the pod this process goes
before the others. It has no device and no torch, and ends when the engine closes its socket.
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
    """An image to decode, and its limits."""

    header: ImageHeader
    memory_bytes: int
    cpu_s: float


def answer(question: list[bytes], shared: np.ndarray) -> bytes:
    """Decodes an image into the shared memory: from a task and the encoded image to the error's
    text, empty without one.
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
