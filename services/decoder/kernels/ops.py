"""The operations of a decoder layer that a GPU runs as one kernel each, and their plain twins."""

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from services.common.nn import layers
from services.decoder.models import rope


class Ops(Protocol):
    """What a layer asks for between its matrix products. Arguments may be overwritten."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `layers.rms_norm`."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `layers.add_rms_norm`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `layers.silu_and_mul`."""
        ...

    def qk_rope_cache(
        self,
        qkv: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """See `rope.qk_rope_cache`."""
        ...


class PlainOps:
    """Plain torch: the specification, and the path of CPUs."""

    rms_norm = staticmethod(layers.rms_norm)
    add_rms_norm = staticmethod(layers.add_rms_norm)
    silu_and_mul = staticmethod(layers.silu_and_mul)
    qk_rope_cache = staticmethod(rope.qk_rope_cache)


def create_ops(device: torch.device, head_dim: int) -> Ops:
    """The fused operations where they run, else the plain ones."""
    half = head_dim // 2
    fits = half & (half - 1) == 0
    if device.type != "cuda" or not fits or importlib.util.find_spec("triton") is None:
        return PlainOps()
    from services.decoder.kernels.triton_ops import TritonOps

    return TritonOps()
