"""The device and the dtype of an engine, by their settings."""

import torch

from services.common.settings import SettingsError


def resolve_device(name: str) -> torch.device:
    """The device that a setting names; `auto`: the first GPU if there is one, else the CPU.

    Raises:
        SettingsError: this machine does not have it.
    """
    available = torch.cuda.is_available()
    device = torch.device(("cuda" if available else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        if not available or (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"device {name!r} does not exist: torch sees no such GPU")
        device = torch.device("cuda", device.index or 0)
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting names; `auto`: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)
