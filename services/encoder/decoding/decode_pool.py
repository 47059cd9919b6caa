"""Processes that decode images. A hostile image can only end its own decoder.

Each thread of the engine borrows a worker for an image. A worker runs `decode_worker` with limits
of CPU time and memory for each image. The worker decodes into memory shared with the engine, which
saves a copy of the pixels. Before an image is decoded, the memory of its worst case is reserved
from a budget, which is a share of the pod's memory. An image that ends its worker is reported as an
`InvalidImage`, and the gateway does not send such an image to further encoders.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import numpy as np

from services.common.errors import InvalidImage
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader
from services.encoder.decoding.child import Child, ChildLost
from services.encoder.decoding.decode import worst_case_bytes
from services.encoder.decoding.decode_worker import Task

log = logging.getLogger(__name__)

# CPU time for an image of up to 40 million pixels, which take 1 to 3 s in the slowest format. A
# larger image may take longer, in proportion to its pixels.
DECODE_CPU_S = 10.0
_DECODE_PIXELS = 40_000_000
_WORKER = "services.encoder.decoding.decode_worker"


class MemoryBudget:
    """A budget of bytes that threads reserve before they use memory, in order of arrival.

    Args:
        total_bytes: size of the budget.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait for bytes."""
        return len(self._waiting)

    @contextmanager
    def reserved(self, num_bytes: int) -> Generator[None]:
        """Waits until bytes are free, and reserves them during the `with` block.

        Raises:
            InvalidImage: the whole budget has fewer bytes.
        """
        if num_bytes > self.total_bytes:
            raise InvalidImage(
                f"decoding the image may take {num_bytes} bytes; an image may take at most "
                f"{self.total_bytes}, which is a quarter of the encoder's memory"
            )
        me = object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me and self._free_bytes >= num_bytes)
            self._waiting.popleft()
            self._free_bytes -= num_bytes
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += num_bytes
                self._changed.notify_all()


def cpu_limit_s(header: ImageHeader, cpu_s: float = DECODE_CPU_S) -> float:
    """Returns the seconds of CPU time that decoding an image may take.

    Args:
        header: header of the image file.
        cpu_s: seconds for an image of up to 40 million pixels.
    """
    return cpu_s * max(1.0, header.width * header.height / _DECODE_PIXELS)


class DecodePool:
    """A pool of worker processes. A thread waits until a worker is free.

    Args:
        num_workers: number of worker processes, all of which are started at once.
        memory_bytes: most memory for all images that are being decoded.
        cpu_s: seconds of CPU time for an image of up to 40 million pixels.

    Attributes:
        num_workers: number of worker processes.
        workers: the worker processes, in the order of their start.
    """

    def __init__(self, num_workers: int, *, memory_bytes: int, cpu_s: float = DECODE_CPU_S) -> None:
        self.num_workers = num_workers
        self.workers = [Child(_WORKER, 3 * MAX_SOURCE_PIXELS) for _ in range(num_workers)]
        self._cpu_s = cpu_s
        self._budget = MemoryBudget(memory_bytes)
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        for worker in self.workers:
            self._idle.put(worker)

    @contextmanager
    def decoded(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        """Decodes an image file.

        Args:
            data: the encoded file.
            header: header of the file.

        Yields:
            Upright pixels `[height, width, 3]` uint8, valid inside the `with` block.

        Raises:
            InvalidImage: the file is corrupt, or needs more memory or time than an image may.
        """
        memory_bytes = worst_case_bytes(header, len(data))
        with self._budget.reserved(memory_bytes):
            worker = self._idle.get()
            try:
                task = Task(header, memory_bytes, cpu_limit_s(header, self._cpu_s))
                yield decode_in(worker, data, task)
            finally:
                worker.trim()
                self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes. No image may be being decoded."""
        for worker in self.workers:
            worker.close()


def decode_in(worker: Child, data: bytes, task: Task) -> np.ndarray:
    """Decodes an image file in a worker process.

    Args:
        worker: the process, which runs `decode_worker`.
        data: the encoded file.
        task: header of the file, and the image's limits.

    Returns:
        Pixels in the worker's shared memory, valid until its next image.

    Raises:
        InvalidImage: the file is corrupt, or decoding it exceeds a limit.
    """
    try:
        error = worker.ask(msgspec.msgpack.encode(task), data, cpu_s=task.cpu_s)
    except ChildLost as lost:
        log.warning("an image of %d bytes ended the worker that decoded it: %s", len(data), lost)
        raise InvalidImage(
            "decoding the image takes more time or memory than an image of its size may"
        ) from None
    if error:
        raise InvalidImage(error.decode())
    return worker.pixels(*task.header.upright_size, 3)
