"""Late token masks on their way to the device: one pinned copy for each step that has any."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class MaskBuffer:
    """The token masks of one step after another, packed on the host and uploaded at once.

    On a GPU there are two pinned host buffers, used in turn, and one buffer on the device. The copy
    has a stream of its own and runs beside the step that will be sampled. On a CPU the
    sampler reads the host buffer.

    Args:
        num_rows: the most masks of a step.
        vocab_size: number of tokens that a mask has bits for.
        device: the device that samples.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        shape, cuda = (num_rows, -(-vocab_size // 32)), device.type == "cuda"
        turns = 2 if cuda else 1
        self._hosts = [torch.empty(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(turns)]
        self._arrays: list[npt.NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._events = [torch.cuda.Event() for _ in range(turns)] if cuda else []
        self._device_side = torch.empty(shape, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._read = torch.cuda.Event() if cuda else None  # after the last masks were read
        self._turn = 0

    def device(self, count: int) -> Tensor:
        """Returns `[count, ceil(vocab_size / 32)]` int32, which the next `upload` fills."""
        return (self._device_side if self._events else self._hosts[0])[:count]

    def begin(self) -> None:
        """Starts on the masks of another step.

        The call has to come after the step with the masks before was sampled, and before the step
        that reads these masks is launched.
        """
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._read is not None:
            self._events[self._turn].synchronize()  # long done
            self._read.record()

    def put(self, index: int, mask: npt.NDArray[np.int32]) -> None:
        """Copies one of the step's masks."""
        self._arrays[self._turn][index] = mask

    def upload(self, count: int) -> None:
        """Enqueues the copy of the first `count` masks before the next launch."""
        if self._stream is not None and self._read is not None:
            copied = self._events[self._turn]
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._read)
                self._device_side[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
                copied.record()
            torch.cuda.current_stream().wait_event(copied)
