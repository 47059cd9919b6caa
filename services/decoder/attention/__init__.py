"""Attention backends by name: `sdpa`, the plain one, and `paged`, that of GPUs."""

import importlib.util
from collections.abc import Mapping

import torch

from services.common.nn.device import DeviceFacts
from services.decoder.attention.base import AttentionBackend, AttentionSizes
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.attention.table import resolve as resolve_table
from services.decoder.kernels.attention_tuning import AttentionFacts

BACKENDS = ("sdpa", "paged")


def resolve(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that "auto" selects; any other name is returned as it is.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        has_triton = importlib.util.find_spec("triton") is not None
        fits = device.type == "cuda" and dtype.itemsize == 2 and has_triton
        return "paged" if fits else "sdpa"
    if name not in BACKENDS:
        raise ValueError(f"no attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return name


def attention_facts(
    sizes: AttentionSizes, device: torch.device, dtype: torch.dtype
) -> AttentionFacts:
    """Facts of a model on a device of this machine."""
    return AttentionFacts(
        device=DeviceFacts.of(device),
        dtype=dtype,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=sizes.block_size,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
    )


def create_backend(
    name: str,
    sizes: AttentionSizes,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Mapping[str, str] | None = None,
) -> AttentionBackend:
    """Makes a backend; kernel libraries are imported only now.

    Args:
        name: of `BACKENDS`, or "auto".
        sizes: of the model and the engine.
        device: of the model.
        dtype: of queries and the KV cache.
        overrides: see `dispatch.parse_overrides`; operations of other tables are ignored.

    Raises:
        ValueError: no such backend, or it does not fit the device or dtype.
        UnknownOverride: an implementation does not exist or cannot run here.
    """
    if resolve(name, device, dtype) == "sdpa":
        return SdpaBackend(sizes, device, dtype)
    if device.type != "cuda":
        raise ValueError(f"attention backend 'paged' needs a GPU, not {device.type}")
    if dtype.itemsize != 2:
        raise ValueError(f"attention backend 'paged' needs bfloat16 or float16, not {dtype}")
    from services.decoder.attention.paged import PagedBackend

    facts = attention_facts(sizes, device, dtype)
    table = resolve_table(facts, overrides)
    return PagedBackend(facts, sizes, device, table)
