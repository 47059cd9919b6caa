"""A process that decodes images: `python -m services.encoder.decode_worker`, run by `decode_pool`.

Each image has its own limits of CPU time and of memory: the kernel ends the process at the first
(SIGPROF), and at the second allocations fail. Under memory pressure in the pod this process goes
before the others. It has no device and no torch, and ends when the engine closes its socket.
"""

import mmap
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Before numpy, whose BLAS would start a thread per core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251

import msgspec
import numpy as np

from services.common.errors import InvalidImage
from services.common.image_header import ImageHeader
from services.encoder.decode import decode

HEAD = struct.Struct("<I")  # the length of what follows
_TASK_HEAD = struct.Struct("<II")  # of a task, and of its image
SLACK_BYTES = 64 << 20  # of the allocators
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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(int(sys.argv[4]) - min(int(sys.argv[4]), os.nice(0)))  # its parent's thread may be nice
    with suppress(OSError):  # where the sandbox has no such file
        Path("/proc/self/oom_score_adj").write_text("1000")
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
    _limit_memory(task.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)
    try:
        decode(image, task.header, pixels)
    except MemoryError:
        return _TOO_LARGE
    except InvalidImage as error:
        return error.message
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(None)
    return ""


def _limit_memory(num_bytes: int | None) -> None:
    """Limits what may be allocated beyond what the process has mapped now; None: nothing."""
    limit = resource.RLIM_INFINITY
    if num_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


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
