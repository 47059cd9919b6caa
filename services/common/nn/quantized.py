"""What the methods of quantized linear layers share; a format is a file beside this one."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.common.nn.dispatch import Kernel
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, LinearMethod


class QuantizedLinear(LinearMethod):
    """What the methods of quantized weights share. They hold no state but the format's."""

    def __init__(self, weight_format: str) -> None:
        self.weight_format = weight_format
        self.operation = f"{weight_format}_linear"

    @abstractmethod
    def multiply(self, x: Tensor, weight: Any) -> Tensor:  # noqa: ANN401 - the format's
        """The plain twin: `[T, K]` → `[T, N]`."""

    @abstractmethod
    def dequantize(self, weight: Any, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - the format's
        """`[..., N, K]`."""

    @abstractmethod
    def has_kernels(self, weight: Any) -> bool:  # noqa: ANN401 - the format's
        """Whether all rows of the dispatch table take the matrix."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        weight, rows = self.weight(layer), x.reshape(-1, layer.in_features)
        if self.kernels is None or not self.has_kernels(weight):
            found = self.multiply(rows, weight)
        else:
            found = self.kernels.call(self.operation, rows, weight)
        if layer.bias is not None:
            found = found + layer.bias
        return found.view(*x.shape[:-1], layer.out_features)


def half_obstacle(facts: Any) -> str:  # noqa: ANN401 - the decoder's
    """Why a Triton kernel of half precision cannot run; empty: it can."""
    half = "" if facts.dtype.itemsize == 2 else f"needs bfloat16 or float16, not {facts.dtype}"
    return facts.device.triton_obstacle or half


def after_norm(
    facts: Any,  # noqa: ANN401 - the decoder's
    kind: torch.dtype,
    columns: Callable[[Linear], int],
    multiply: Callable[[Any, Linear], Tensor],
    other: Kernel,
) -> Kernel:
    """`norm_linear` by a norm that quantizes.

    Args:
        kind: that activations become.
        columns: per scale of a layer's input; 0: `multiply` does not take the layer, which a plain
            norm and `other` compute.
    """
    from kernels.gemm import add_norm, quantizing

    pdl = facts.device.supports_pdl

    def fused(
        x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
    ) -> tuple[Tensor, Tensor]:
        if block := columns(layer):
            quantized = quantizing.norm_quantize(
                x, residual, norm.weight, norm.eps, kind, block, pdl=pdl
            )
            return multiply(quantized, layer), residual
        if x is None:
            normed = add_norm.rms_norm(residual, norm.weight, norm.eps, pdl=pdl)
        else:
            normed, residual = add_norm.add_rms_norm(x, residual, norm.weight, norm.eps, pdl=pdl)
        return other(normed, layer), residual

    return fused
