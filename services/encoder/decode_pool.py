"""Processes that decode images: one that takes too long or too much loses only itself.

The engine's threads borrow a worker each. A worker is `decode_worker`, with limits of its own for
each image; it decodes into memory that it shares with the engine, so that pixels are not copied.
Before an image is decoded its worst case is taken from a budget, which is a share of the pod's
memory. An image that ends its worker is an `InvalidImage`, so that no other encoder gets it.
"""

import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress

import numpy as np

from services.common.errors import InternalError, InvalidImage
from services.common.images.image_header import ImageHeader
from services.encoder.decode import worst_case_bytes
from services.encoder.decode_worker import HEAD, Task, encode_task

log = logging.getLogger(__name__)

# CPU time of one image. 40 million pixels take 1 to 3 s in the slowest format.
DECODE_CPU_S = 10.0
_WALL_FACTOR = 6  # of the CPU time: for a machine that does other things, too
_KEPT_BYTES = 48 << 20  # of a worker's shared memory between two images
_START_S, _STOP_S = 30.0, 2.0


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
                f"decoding the image may take {num_bytes} bytes; at most {self.total_bytes} are "
                "given to one image here"
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


class DecodePool:
    """Worker processes. Its users' threads wait for a free one.

    Args:
        num_workers: processes.
        memory_bytes: of all images that are being decoded.
        max_source_pixels: of one image.
        cpu_s: of one image.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        memory_bytes: int,
        max_source_pixels: int,
        cpu_s: float = DECODE_CPU_S,
    ) -> None:
        self.num_workers = num_workers
        self._budget = MemoryBudget(memory_bytes)
        self._cpu_s = cpu_s
        self._workers = [_Worker(max_source_pixels * 3) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return [worker.pid for worker in self._workers]

    @contextmanager
    def decoded(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        memory_bytes = worst_case_bytes(header, len(data))
        with self._budget.taken(memory_bytes):
            worker = self._idle.get()
            try:
                yield worker.decode(data, Task(header, memory_bytes, self._cpu_s))
            finally:
                worker.trim()
                self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes. No image may be in work."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process and the memory that it shares; both for one thread at a time.

    Args:
        size_bytes: of the memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("triptych-decode", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size_bytes)
        self._memory = mmap.mmap(self._fd, size_bytes)
        self._used_bytes = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def decode(self, data: bytes, task: Task) -> np.ndarray:
        """Pixels in the shared memory, until the next call."""
        shape = (*task.header.upright_size, 3)
        self._used_bytes = shape[0] * shape[1] * 3
        if self._process.poll() is not None:  # ended while it was idle
            self._restart()
        self._wait_until_ready()
        try:
            self._socket.settimeout(task.cpu_s * _WALL_FACTOR)
            self._socket.sendall(encode_task(task, len(data)))
            self._socket.sendall(data)
            error = self._receive()
        except OSError:  # it has ended, or takes too long
            status = self._restart()
            log.warning("an image of %d bytes ended its decoder: %s", len(data), status)
            raise InvalidImage(
                "decoding the image takes more time or memory than an image of its size may"
            ) from None
        if error:
            raise InvalidImage(error)
        return np.frombuffer(self._memory, np.uint8, self._used_bytes).reshape(shape)

    def trim(self) -> None:
        """Gives back the pages of a large image; without the interpreter lock, unlike `madvise`."""
        if self._used_bytes > _KEPT_BYTES:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, len(self._memory))

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._socket.settimeout(_START_S)
            self._receive()
        except OSError:
            log.error("a decoder did not start: %s", self._restart())
            raise InternalError("an image decoder cannot be started") from None
        self._ready = True

    def _receive(self) -> str:
        answer = b""
        while len(answer) < HEAD.size or len(answer) < HEAD.size + HEAD.unpack_from(answer)[0]:
            part = self._socket.recv(4096)
            if not part:
                raise ConnectionError
            answer += part
        return answer[HEAD.size :].decode()

    def _start(self) -> None:
        """Starts the process, which is ready some time later."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.encoder.decode_worker",
                 str(theirs.fileno()), str(self._fd), str(len(self._memory))],
                pass_fds=(theirs.fileno(), self._fd), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._socket, self._ready = mine, False

    def _restart(self) -> str:
        """Replaces the process; says how the old one ended."""
        self._socket.close()
        if self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)  # its end of the socket closes a little earlier
        self._process.kill()
        status = self._process.wait()
        self._start()
        return signal.Signals(-status).name if status < 0 else f"status {status}"
