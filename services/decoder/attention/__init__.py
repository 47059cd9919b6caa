"""Attention backends by name. A backend: one file and one line here."""

import importlib
import importlib.util

import torch

from services.decoder.attention.base import AttentionBackend, AttentionSizes

BACKENDS = {
    "sdpa": "services.decoder.attention.sdpa:SdpaBackend",
    "flashinfer": "services.decoder.attention.flashinfer:FlashInferBackend",
}
_PACKAGES = {"flashinfer": "flashinfer-python"}  # what `pip install triptych[gpu]` brings
_FLASHINFER_HEAD_DIMS = (64, 128)


def resolve(name: str, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" means for a model on a device; any other name is itself.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        fits = (
            device.type == "cuda"
            and dtype == torch.bfloat16
            and sizes.head_dim in _FLASHINFER_HEAD_DIMS
            and importlib.util.find_spec("flashinfer") is not None
        )
        return "flashinfer" if fits else "sdpa"
    if name not in BACKENDS:
        raise ValueError(f"no attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return name


def create_backend(
    name: str, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Makes a backend; its module is imported only now.

    Raises:
        ValueError: no such backend, its package is not installed, or it does not fit the device.
    """
    name = resolve(name, sizes, device, dtype)
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(name) is None:
        raise ValueError(
            f"attention backend {name!r} needs the package {package}: pip install 'triptych[gpu]'"
        )
    module, _, kind = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), kind)(sizes, device, dtype)
