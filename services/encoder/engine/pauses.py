"""Pauses in the work of a long batch, for others that use the same device.

Processes on one GPU take turns. While an image of 4096 x 4096 keeps it busy for a second, each of a
decoder's short steps waits for several turns. So after each of its parts such a batch waits as long
as the part takes: half of the time, the device is the others'. Nobody on the host waits for that.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

from services.common.model_spec import TowerSpec
from services.encoder.models.base import Grid

# A fifth of a second on an H200: several times what the largest batch of usual images takes.
_LONG_OPERATIONS = 1e14


def count_operations(config: TowerSpec, grids: Iterable[Grid]) -> float:
    """Floating-point operations of the tower's blocks, which are nearly all of them."""
    total = 0.0
    for time, height, width in grids:
        size = height * width
        weights = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
        total += time * (2.0 * size * weights + 4.0 * size**2 * config.hidden_size)
    return config.depth * total


class Pauses:
    """How long a batch pauses (not at all, until `calibrate` is called), and the pauses on CUDA
    streams.
    """

    def __init__(self) -> None:
        self._seconds_per_operation = 0.0

    def calibrate(self, operations: float, seconds: float) -> None:
        """So long took a batch of so many operations."""
        self._seconds_per_operation = seconds / operations

    def seconds_after_part(self, operations: float, num_parts: int) -> float:
        """For a batch of so many operations in equal parts; 0: it is short."""
        if operations < _LONG_OPERATIONS:
            return 0.0
        return operations * self._seconds_per_operation / num_parts

    def put(self, stream: torch.cuda.Stream, seconds: float) -> None:
        """What is enqueued on the stream from now on begins so long after what was before."""
        launch, sleep = _host_functions()
        handle, micros = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(int(1e6 * seconds))
        if (status := launch(handle, sleep, micros)) != 0:
            raise RuntimeError(f"cuLaunchHostFunc failed with {status}")


@functools.cache
def _host_functions() -> tuple[Any, ctypes.c_void_p]:
    """The driver's call that puts a host function on a stream, and libc's usleep: CUDA's own thread
    calls it with one argument, the microseconds, and no Python is involved.
    """
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    return ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, sleep
