"""A process that decodes images: `python -m services.encoder.decode_worker`, run by `decode_pool`.

Each image has its own limits of CPU time and of memory: the kernel ends the process at the first
(SIGPROF), and at the second allocations fail. Under memory pressure in the pod this process goes
before the others. It has no device and no torch, and ends when the engine closes its socket.
"""

import mmap
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

# Before numpy, whose BLAS would start a thread per core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251

import msgspec
import numpy as np

from services.common.errors import InvalidImage
from services.common.images.image_header import ImageHeader
from services.common.process.work_limits import go_first, limited
from services.encoder.decode import decode

HEAD = struct.Struct("<I")  # the length of what follows
_TASK_HEAD = struct.Struct("<II")  # of a task, and of its image
_TOO_LARGE = "decoding the image takes more memory than an image of its size may"


@dataclass(frozen=True, slots=True)
class Task:
    """An image to decode, and its limits."""

    header: ImageHeader
    memory_bytes: int
    cpu_s: float


def encode_task(task: Task, num_bytes: int) -> bytes:
    """A task as it crosses the socket, before the image's `num_bytes`."""
    body = msgspec.msgpack.encode(task)
    return _TASK_HEAD.pack(len(body), num_bytes) + body


def main() -> None:
    """Decodes until the engine closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front handles them
    channel, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    shared = np.frombuffer(mmap.mmap(memory, int(sys.argv[3])), np.uint8)
    go_first()
    with suppress(ConnectionError):
        _serve(channel, shared)


def _serve(channel: socket.socket, shared: np.ndarray) -> None:
    channel.sendall(HEAD.pack(0))  # ready
    while (head := _read(channel, _TASK_HEAD.size)) is not None:
        task_bytes, image_bytes = _TASK_HEAD.unpack(head)
        body, image = _read(channel, task_bytes), _read(channel, image_bytes)
        if body is None or image is None:
            break
        answer = _run(msgspec.msgpack.decode(body, type=Task), image, shared).encode()
        channel.sendall(HEAD.pack(len(answer)) + answer)


def _run(task: Task, image: bytes, shared: np.ndarray) -> str:
    """Decodes into the shared memory; returns the error's text, empty without one."""
    height, width = task.header.upright_size
    pixels = shared[: height * width * 3].reshape(height, width, 3)
    try:
        with limited(task.cpu_s, task.memory_bytes):
            decode(image, task.header, pixels)
    except MemoryError:
        return _TOO_LARGE
    except InvalidImage as error:
        return error.message
    return ""


def _read(channel: socket.socket, size: int) -> bytes | None:
    """Exactly `size` bytes; None: the engine has closed the socket."""
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        count = channel.recv_into(view[position:])
        if not count:
            return None
        position += count
    return bytes(data)


if __name__ == "__main__":
    main()
