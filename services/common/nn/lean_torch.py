"""Imported before torch by the processes that compute: on a machine without an NVIDIA driver torch
is imported without what its compiler alone needs.

`torch._meta_registrations` describes hundreds of operators a second time, in Python, for tensors
without data: a third of the import, half a second. It is left to whoever imports it later.
"""

import sys
from pathlib import Path
from types import ModuleType

_LEFT_OUT = "_meta_registrations"


def _import_torch() -> None:
    if "torch" in sys.modules or Path("/dev/nvidiactl").exists():
        return
    name = f"torch.{_LEFT_OUT}"
    sys.modules[name] = ModuleType(name)
    import torch

    delattr(torch, _LEFT_OUT)
    del sys.modules[name]


_import_torch()
