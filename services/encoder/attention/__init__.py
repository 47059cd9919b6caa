"""The attention backends, imported when asked for."""

import importlib
import importlib.util

import torch

from services.encoder.attention.base import AttentionBackend

BACKENDS = {
    "sdpa": "services.encoder.attention.sdpa:SdpaAttention",
    "flashinfer": "services.encoder.attention.flashinfer:FlashInferAttention",
}
_FLASHINFER_HEAD_DIMS = (64, 128)
_FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


class AttentionUnavailable(ValueError):
    """The backend that was asked for cannot run here; the message says why."""


def resolve(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """The backend to use: `name` itself if it can run, or for "auto" the best that can.

    Raises:
        AttentionUnavailable: no such backend, or it cannot run this model here.
    """
    obstacle = _flashinfer_obstacle(device, head_dim, dtype)
    if name == "auto":
        return "flashinfer" if obstacle is None else "sdpa"
    if name not in BACKENDS:
        raise AttentionUnavailable(
            f"no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}"
        )
    if name == "flashinfer" and obstacle is not None:
        raise AttentionUnavailable(f"attention backend flashinfer: {obstacle}; use sdpa or auto")
    return name


def create(name: str, *, num_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend `name`, as `resolve` returned it."""
    module, attribute = BACKENDS[name].split(":")
    return getattr(importlib.import_module(module), attribute)(num_heads, head_dim, dtype)


def _flashinfer_obstacle(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it has no kernel for head_dim {head_dim}"
    if dtype not in _FLASHINFER_DTYPES:
        return f"it has no kernel for {dtype}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed (extra: gpu)"
    return None
