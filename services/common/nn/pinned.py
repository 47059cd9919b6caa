"""Registers host memory that torch did not allocate as pinned memory.

Copies between pinned memory and a GPU can be asynchronous. Both engines register the arena.
"""

from typing import Any, cast

import torch
from torch import Tensor


def pin(memory: Tensor) -> None:
    """Registers a tensor's memory, which must stay mapped until `unpin`.

    Raises:
        RuntimeError: CUDA refuses the memory.
    """
    result = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        raise RuntimeError(f"{memory.nbytes} bytes cannot be registered as pinned memory: {result}")


def unpin(memory: Tensor, device: torch.device) -> None:
    """Waits for the device's copies to end and then unregisters a tensor's memory."""
    torch.cuda.synchronize(device)
    _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return cast("Any", torch.cuda).cudart()
