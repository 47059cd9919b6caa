"""Processes that decode images: one that takes too long or too much loses only itself.

The engine's threads borrow a worker each. A worker is `decode_worker`, with limits of its own for
each image; it decodes into memory that it shares with the engine, so that pixels are not copied.
Before an image is decoded its worst case is taken from a budget, which is a share of the pod's
memory. An image that ends its worker is an `InvalidImage`, so that no other encoder gets it.
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

# CPU time of one image of up to so many pixels, and in proportion of a larger one. 40 million
# pixels take 1 to 3 s in the slowest format.
DECODE_CPU_S, _DECODE_PIXELS = 10.0, 40_000_000
_WORKER = "services.encoder.decoding.decode_worker"


class MemoryBudget:
    """Bytes that threads take before they use memory; first come, first served."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def taken(self, num_bytes: int) -> Generator[None]:
        """Waits for bytes and holds them for the block.

        Raises:
            InvalidImage: there will never be as many.
        """
        if num_bytes > self.total_bytes:
            raise InvalidImage(
                f"decoding the image may take {num_bytes} bytes; at most {self.total_bytes}, a "
                "quarter of the encoder's memory, are given to one image here"
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


def cpu_limit_s(header: ImageHeader) -> float:
    """Seconds of CPU time that decoding an image may take."""
    return DECODE_CPU_S * max(1.0, header.width * header.height / _DECODE_PIXELS)


class DecodePool:
    """Worker processes. Its users' threads wait for a free one.

    Args:
        memory_bytes: of all images that are being decoded.
    """

    def __init__(self, num_workers: int, *, memory_bytes: int) -> None:
        self.num_workers = num_workers
        self._budget = MemoryBudget(memory_bytes)
        self._workers = [Child(_WORKER, 3 * MAX_SOURCE_PIXELS) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @contextmanager
    def decoded(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        memory_bytes = worst_case_bytes(header, len(data))
        with self._budget.taken(memory_bytes):
            worker = self._idle.get()
            try:
                yield _decode(worker, data, Task(header, memory_bytes, cpu_limit_s(header)))
            finally:
                worker.trim()
                self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes. No image may be in work."""
        for worker in self._workers:
            worker.close()


def _decode(worker: Child, data: bytes, task: Task) -> np.ndarray:
    """Pixels in the shared memory, until the worker's next image."""
    try:
        error = worker.ask(msgspec.msgpack.encode(task), data, cpu_s=task.cpu_s)
    except ChildLost as lost:
        log.warning("an image of %d bytes ended its decoder: %s", len(data), lost)
        raise InvalidImage(
            "decoding the image takes more time or memory than an image of its size may"
        ) from None
    if error:
        raise InvalidImage(error.decode())
    return worker.pixels(*task.header.upright_size, 3)
