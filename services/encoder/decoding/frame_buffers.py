"""Memory for copies of decoded frames, which is used again.

The first write to new memory takes several times as long as a copy to memory that was written
before: 8 to 14 ms instead of 2 for a pair of frames of 1080p. A video's decoder waits meanwhile.
"""

import threading

import torch
from torch import Tensor

# Most bytes of memory that no frame uses: ten pairs of frames of 1080p.
_MAX_IDLE_BYTES = 128 << 20


class FrameBuffers:
    """Copies of frames, in memory of earlier copies of the same shape. Several threads use it.

    Args:
        max_idle_bytes: most bytes of memory that is stored for later frames.

    Attributes:
        idle_bytes: bytes of memory that is stored for later frames.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self.idle_bytes = 0
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[Tensor] = []  # by the time of their release

    def copy(self, frame: Tensor) -> Tensor:
        """Returns a contiguous copy of a frame, which belongs to the caller until `release`."""
        with self._lock:
            at = next((n for n, idle in enumerate(self._idle) if idle.shape == frame.shape), None)
            found = None if at is None else self._idle.pop(at)
            self.idle_bytes -= 0 if found is None else found.nbytes
        if found is None:
            return frame.clone(memory_format=torch.contiguous_format)
        return found.copy_(frame)

    def release(self, copy: Tensor) -> None:
        """Stores the memory of a copy, to which nothing else may refer, for later frames. The
        memory that was released first is freed if there is too much.
        """
        with self._lock:
            self._idle.append(copy)
            self.idle_bytes += copy.nbytes
            while self.idle_bytes > self._max_idle_bytes:
                self.idle_bytes -= self._idle.pop(0).nbytes
