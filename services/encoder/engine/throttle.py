"""Idle time inside a very large batch, so that a decoder on the same GPU gets half of it.

Processes on one GPU are time-sliced. While an image of 4096 x 4096 keeps it busy for a second, each
short decode step waits for several slices. So after each DeepStack feature a large batch leaves the
GPU idle for as long as that part of the tower takes. No host thread waits for it; the runner calls
this where the encoder shares its GPU, and nowhere else. Measured in
`benchmarks/LOG.md` (burst); ADR 0029.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch

from services.common.geometry import Grid
from services.common.model_spec import TowerSpec

# A fifth of a second on an H200: several times what a full batch of usual images takes.
_LARGE_BATCH_FLOPS = 1e14


def count_flops(spec: TowerSpec, grids: Iterable[Grid]) -> float:
    """Floating-point operations of the tower's blocks: GEMMs and attention."""
    weights = 4 * spec.hidden_size**2 + 2 * spec.hidden_size * spec.intermediate_size
    sizes = [height * width for _, height, width in grids]
    return spec.depth * sum(2.0 * n * weights + 4.0 * n**2 * spec.hidden_size for n in sizes)


class Throttle:
    """How long a batch leaves the GPU idle; never, until `calibrate` is called."""

    def __init__(self) -> None:
        self._seconds_per_flop = 0.0

    def calibrate(self, flops: float, seconds: float) -> None:
        """Measured: a batch of `flops` took `seconds`."""
        self._seconds_per_flop = seconds / flops

    def idle_s(self, flops: float, num_parts: int) -> float:
        """Idle seconds after each of a batch's equal parts; 0: the batch is not large."""
        if flops < _LARGE_BATCH_FLOPS:
            return 0.0
        return flops * self._seconds_per_flop / num_parts

    def insert_idle(self, stream: torch.cuda.Stream, seconds: float) -> None:
        """Work enqueued on the stream from now on begins `seconds` after the work before it."""
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
