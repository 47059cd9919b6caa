"""Late token masks on their way to the device: one pinned copy for each step that has any."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class MaskBuffer:
    """Masks of one step, packed on the host and uploaded at once. `ModelRunner` owns it.

    On a GPU there are two pinned host buffers, used in turn, and one on the device: the step that
    reads it is launched before the next one's masks are uploaded to the same stream. On a CPU the
    host buffer is read.
    """

    def __init__(self, num_rows: int, num_words: int, device: torch.device) -> None:
        shape, cuda = (num_rows, num_words), device.type == "cuda"
        turns = 2 if cuda else 1
        self._hosts = [torch.empty(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(turns)]
        self._arrays: list[npt.NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._events = [torch.cuda.Event() for _ in range(turns)] if cuda else []
        self._device_side = torch.empty(shape, dtype=torch.int32, device=device)
        self._turn = 0

    def device(self, count: int) -> Tensor:
        """`[count, num_words]` int32, which the next `upload` fills."""
        return (self._device_side if self._events else self._hosts[0])[:count]

    def upload(self, masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Enqueues the copy of the masks, in order."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._events:
            self._events[self._turn].synchronize()  # long done
        for target, mask in zip(self._arrays[self._turn], masks, strict=False):
            target[:] = mask
        if self._events:
            count = len(masks)
            self._device_side[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
            self._events[self._turn].record()
