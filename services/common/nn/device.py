"""Resolves the settings for an engine's device and data type."""

import torch

from services.common.settings import SettingsError


def resolve_device(name: str) -> torch.device:
    """The device that a setting names. `auto` is the first GPU, or the CPU if there is no GPU.

    Raises:
        SettingsError: the machine does not have the device.
    """
    available = torch.cuda.is_available()
    device = torch.device(("cuda" if available else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        if not available or (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"device {name!r} does not exist: torch sees no such GPU")
        device = torch.device("cuda", device.index or 0)
    return device


def gpu_uuid(device: torch.device) -> str:
    """Returns the name of a GPU that is the same in all processes of the machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The data type that a setting names. `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)
