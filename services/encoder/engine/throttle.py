"""Decides which batches take turns with decoders on the same GPU, and slows down larger ones.

Processes on one GPU are time-sliced, which costs a tenth of the GPU while both have work. Therefore
a large batch has the GPU in a turn (`DeviceTurns`), without decoders. A smaller batch takes no
turn, because the change from one process to another costs some milliseconds. Neither does a very
large batch, for which answers would stand still for too long: an image of 4096 x 4096 occupies the
GPU for a second. Such a batch leaves the GPU idle after each feature, for as long as that part of
the tower takes, because otherwise each short decode step would wait for several slices. No host
thread waits meanwhile. All of this holds only if the encoder shares its GPU. `benchmarks/LOG.md`
(burst, "Turns on the card") has the measurements, and ADR 0029 the decision.
"""

import ctypes
import functools
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import torch

from services.common.geometry import Grid
from services.common.model_spec import TowerSpec

# Some 40 ms on an H200, more than ten times what a turn costs.
_TURN_FLOPS = 2e13
# A fifth of a second on an H200: several times what a full batch of usual images takes.
_LARGE_BATCH_FLOPS = 1e14


def count_flops(spec: TowerSpec, grids: Iterable[Grid]) -> float:
    """Returns the number of floating-point operations of the tower's blocks: GEMMs and attention.

    Args:
        spec: sizes of the tower.
        grids: sizes of the images in patches.
    """
    weights, hidden = spec.block_weights, spec.hidden_size
    sizes = [height * width for _, height, width in grids]
    return spec.depth * sum(n * (2.0 * weights + 4.0 * spec.attended(n) * hidden) for n in sizes)


def needs_turn(flops: float) -> bool:
    """Returns whether a batch with this number of floating-point operations should have a turn."""
    return _TURN_FLOPS <= flops < _LARGE_BATCH_FLOPS


def most_patches_without_turn(spec: TowerSpec, most: int) -> int:
    """Returns the largest number of patches with which no batch has a turn, but at most `most`.

    A batch of several images has fewer operations than one image with all of the patches.
    """
    return bisect_left(
        range(1, most + 1), _TURN_FLOPS, key=lambda patches: count_flops(spec, [(1, 1, patches)])
    )


class Throttle:
    """The idle time of batches, in proportion to their duration. It is 0 before `calibrate`."""

    def __init__(self) -> None:
        self._seconds_per_flop = 0.0

    def calibrate(self, flops: float, seconds: float) -> None:
        """Sets the speed of the device, from the measured time of one batch.

        Args:
            flops: floating-point operations of the batch.
            seconds: time that the batch took.
        """
        self._seconds_per_flop = seconds / flops

    def idle_s(self, flops: float, num_parts: int) -> float:
        """Returns the idle seconds after each part of a batch. 0 if the batch is not very large.

        Args:
            flops: floating-point operations of the batch.
            num_parts: number of parts of equal length.
        """
        if flops < _LARGE_BATCH_FLOPS:
            return 0.0
        return flops * self._seconds_per_flop / num_parts

    def insert_idle(self, stream: torch.cuda.Stream, seconds: float) -> None:
        """Enqueues idle time on a stream: later work begins `seconds` after the work before it."""
        launch, sleep = _host_functions()
        handle, micros = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(int(1e6 * seconds))
        if (status := launch(handle, sleep, micros)) != 0:
            raise RuntimeError(f"cuLaunchHostFunc failed with {status}")


@functools.cache
def _host_functions() -> tuple[Any, ctypes.c_void_p]:
    """Returns the driver's function that enqueues a host function on a stream, and libc's `usleep`.
    A thread of CUDA calls `usleep` with the microseconds, so that no Python code runs.
    """
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    return ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, sleep
