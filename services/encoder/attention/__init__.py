"""The attention backends, imported when asked for."""

import importlib
import importlib.util

import torch

from services.encoder.attention.base import AttentionBackend

BACKENDS = {
    "sdpa": "services.encoder.attention.sdpa:SdpaAttention",
    "hopper": "services.encoder.attention.hopper:HopperAttention",
}
_HOPPER, _HOPPER_HEAD_DIM = (9, 0), 64  # compute capability; what a kernel's registers hold
_HOPPER_DTYPES = (torch.bfloat16, torch.float16)


class AttentionUnavailable(ValueError):
    """The backend that was asked for cannot run here; the message says why."""


def resolve(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """The backend to use: `name` itself if it can run, or for "auto" the best that can.

    Raises:
        AttentionUnavailable: no such backend, or it cannot run this model here.
    """
    if name == "auto":
        return "sdpa" if _hopper_obstacle(device, head_dim, dtype) else "hopper"
    if name not in BACKENDS:
        raise AttentionUnavailable(
            f"no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}"
        )
    if name == "hopper" and (obstacle := _hopper_obstacle(device, head_dim, dtype)):
        raise AttentionUnavailable(f"attention backend hopper: {obstacle}; use sdpa or auto")
    return name


def create(name: str, *, num_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend `name`, as `resolve` returned it."""
    module, attribute = BACKENDS[name].split(":")
    return getattr(importlib.import_module(module), attribute)(num_heads, head_dim, dtype)


def _hopper_obstacle(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if head_dim != _HOPPER_HEAD_DIM:
        return f"it has no kernel for head_dim {head_dim}"
    if dtype not in _HOPPER_DTYPES:
        return f"it has no kernel for {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return "it runs on Hopper (H100, H200) alone"
    return None
