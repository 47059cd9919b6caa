"""A step's small arrays, packed into one host buffer and moved to the device in one copy."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class Staged:
    """The place of one array in a staging buffer."""

    offset: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Staging:
    """Packs arrays, uploads them, shows them on the device.

    On a GPU the host side is pinned and there are several, used in turn: the copy of step n may
    still wait behind step n - 1 when step n + 1 is packed. The device side is one: kernels and
    copies follow each other on one stream. On a CPU there is only the host side, one per turn.
    """

    def __init__(self, size_bytes: int, device: torch.device, turns: int = 3) -> None:
        cuda = device.type == "cuda"
        self._hosts = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(turns)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._events = [torch.cuda.Event() for _ in range(turns)] if cuda else []
        self._device_side = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Starts a step; waits in the rare case that this turn's last copy has not run."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._used = 0
        if self._events:
            self._events[self._turn].synchronize()

    def add(self, array: npt.NDArray[np.generic], *, room: int = 0) -> Staged:
        """Copies an array into the buffer; what comes next lies behind `room` elements at least."""
        staged = self.reserve(array.shape, array.dtype, room=room)
        self.host(staged)[...] = array
        return staged

    def reserve(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, room: int = 0) -> Staged:
        """A place for an array that is written there, through `host`; `room` as for `add`."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        staged = Staged(self._used, size, _DTYPES[kind], shape)
        self._used += -(-max(size, room * kind.itemsize) // _ALIGNMENT) * _ALIGNMENT
        if self._used > len(self._hosts[0]):
            raise RuntimeError(f"a step's inputs need {self._used} bytes of staging, too many")
        return staged

    def host(self, staged: Staged) -> npt.NDArray[np.generic]:
        """The array on the host, writable until `upload`."""
        raw = self._arrays[self._turn][staged.offset : staged.offset + staged.size_bytes]
        return raw.view(_NUMPY[staged.dtype]).reshape(staged.shape)

    def upload(self) -> None:
        """Puts the copy on the stream."""
        if self._events:
            source = self._hosts[self._turn][: self._used]
            self._device_side[: self._used].copy_(source, non_blocking=True)
            self._events[self._turn].record()

    def device(self, staged: Staged) -> Tensor:
        """The array on the device, valid until the next step's `upload`."""
        side = self._device_side if self._events else self._hosts[self._turn]
        raw = side[staged.offset : staged.offset + staged.size_bytes]
        return raw.view(staged.dtype).view(staged.shape)


_NUMPY = {kind: dtype for dtype, kind in _DTYPES.items()}
