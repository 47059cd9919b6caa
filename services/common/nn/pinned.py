"""Host memory that torch did not allocate, registered with CUDA: copies from and to it need not
wait for the device. Both engines register the arena. What CUDA refuses is a RuntimeError.
"""

from typing import Any, cast

import torch
from torch import Tensor


def pin(memory: Tensor) -> None:
    """Registers a tensor's memory, which must stay mapped until `unpin`."""
    result = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        raise RuntimeError(f"{memory.nbytes} bytes cannot be registered as pinned memory: {result}")


def unpin(memory: Tensor, device: torch.device) -> None:
    """Ends the registration, once no copy of the device uses the memory."""
    torch.cuda.synchronize(device)
    _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return cast("Any", torch.cuda).cudart()
