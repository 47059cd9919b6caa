"""The staging buffer packs a step's small arrays on the host and copies them to the device at once.

`StepComputer` begins and uploads a step; `step_inputs` and the sampler add arrays.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
_TURNS = 3
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staged(NamedTuple):
    """The place of an array in a staging buffer.

    Attributes:
        offset: byte offset in the buffer.
        size_bytes: bytes of the array, without reserved ones behind it.
        dtype: data type of the array.
        shape: shape of the array.
    """

    offset: int
    size_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def element(self) -> int:
        """Index of the first element, if the buffer had elements of this size alone."""
        return self.offset // self.dtype.itemsize


class Staging:
    """Packs arrays, uploads them, and gives views of them on the device.

    On a GPU there are several pinned host buffers, used in turn: the copy of step n may still wait
    for step n - 1 when step n + 1 is packed. There is one device buffer: kernels and copies run in
    order on one stream. On a CPU there are only the host buffers.

    Args:
        size_bytes: bytes of a step's arrays, at most.
        device: the device that computes.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._hosts = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(_TURNS)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._cuda = cuda
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)] if cuda else []
        self._device_side = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._size_bytes = size_bytes
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Starts a step; waits in the rare case that the last copy from the buffer has not run."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._used = 0
        if self._cuda:
            self._copied[self._turn].synchronize()  # returns at once if there was no copy

    def add(
        self, array: npt.NDArray[np.generic], *, min_elements: int = 0, size: int | None = None
    ) -> Staged:
        """Copies an array into the buffer.

        Args:
            array: an array with at least one axis.
            min_elements: number of elements to reserve at least, so that the place of the next
                array does not change.
            size: length to which the last axis is padded with zeros. None adds no padding.

        Raises:
            RuntimeError: the array does not fit into the buffer.
        """
        kind, shape, num_bytes, start = array.dtype, array.shape, array.nbytes, self._used
        count = shape[-1]
        if size is not None and size != count:
            shape = (*shape[:-1], size)
            num_bytes = math.prod(shape) * kind.itemsize
        reserved = max(num_bytes, min_elements * kind.itemsize) if min_elements else num_bytes
        self._used = start + -(-reserved // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._size_bytes:
            raise RuntimeError(
                f"a step's inputs need {self._used} bytes; the staging buffer is full"
            )
        target = np.ndarray(shape, kind, self._arrays[self._turn], start)
        if shape[-1] == count:
            target[...] = array
        else:
            target[..., :count] = array
            target[..., count:] = 0
        return Staged(start, num_bytes, kind, shape)

    def host(self, staged: Staged) -> npt.NDArray[Any]:
        """Returns the array on the host, valid until the next step."""
        return np.ndarray(staged.shape, staged.dtype, self._arrays[self._turn], staged.offset)

    def upload(self) -> None:
        """Starts the copy of the step's arrays to the device."""
        if self._cuda:
            source = self._hosts[self._turn][: self._used]
            self._device_side[: self._used].copy_(source, non_blocking=True)
            self._copied[self._turn].record()

    def device_buffer(self, dtype: torch.dtype) -> Tensor:
        """Returns the whole buffer on the device as elements of a type, valid like `device`."""
        side = self._device_side if self._cuda else self._hosts[self._turn]
        return side[: len(side) // _ALIGNMENT * _ALIGNMENT].view(dtype)

    def device(self, staged: Staged) -> Tensor:
        """Returns the array on the device, valid until the next step's `upload`."""
        side = self._device_side if self._cuda else self._hosts[self._turn]
        raw = side[staged.offset : staged.offset + staged.size_bytes]
        return raw.view(_DTYPES[staged.dtype]).view(staged.shape)
