"""What the methods of quantized linear layers share; a format is a file beside this one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.plain import reduce_split_k
from services.common.nn.dispatch import Kernel
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, LinearMethod


class QuantizedLinear(LinearMethod):
    """What the methods of quantized weights share. They hold no state but the format's.

    Attributes:
        multiply: the plain twin: `[T, K]`, weight → `[T, N]`.
        dequantize: (weight, dtype) → `[..., N, K]`.
        has_kernels: whether all rows of the dispatch table take the matrix.
    """

    multiply: Callable[[Tensor, Any], Tensor]
    dequantize: Callable[[Any, torch.dtype], Tensor]
    has_kernels: Callable[[Any], bool]

    def __init__(self, weight_format: str) -> None:
        self.weight_format = weight_format
        self.operation = f"{weight_format}_linear"

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


def of_layer(kernel: Kernel, takes: Callable[[Any], bool] = lambda _: True) -> Kernel:
    """A kernel of (x, weight, bias, ...) as one of (x, layer, ...). In a projection, which has no
    further arguments, the layer computes itself where the kernel does not take its weight.
    """

    def call(x: Tensor, layer: Linear, *rest: Tensor) -> Tensor | None:
        weight = layer.method.weight(layer)
        return kernel(x, weight, layer.bias, *rest) if takes(weight) else layer(x)

    return call


def gemv_after_norm(kernel: Kernel) -> Kernel:
    """`norm_linear`, or `norm_swiglu`, by a GEMV of (x, norm, eps, weight, bias)."""

    def fused(
        x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, *_: Linear
    ) -> tuple[Tensor, Tensor]:
        if x is not None:
            residual = residual + reduce_split_k(x, residual.dtype)
        weight = layer.method.weight(layer)
        return kernel(residual, norm.weight, norm.eps, weight, layer.bias), residual

    return fused


def few_or_many(
    few: Kernel, many: Kernel, most: int, then: Kernel = lambda found, *_: found
) -> Kernel:
    """(quantized activations, layer, ...) → its output, by `few` for up to `most` tokens, else by a
    GEMM without a bias and what comes behind it, which gets the further arguments.
    """

    def multiply(x: Any, layer: Linear, *rest: Linear) -> Any:  # noqa: ANN401 - or `Quantized`
        weight = layer.method.weight(layer)
        if x.num_tokens <= most:
            return few(x, weight, layer.bias)
        found = many(x, weight)
        return then(found if layer.bias is None else found + layer.bias, *rest)

    return multiply


def after_norm(
    facts: Any,  # noqa: ANN401 - the decoder's
    kind: torch.dtype,
    columns: Callable[[Linear], int],
    multiply: Kernel,
    other: Kernel,
) -> Kernel:
    """`norm_linear`, or `norm_swiglu`, by a norm that quantizes.

    Args:
        kind: that activations become.
        multiply: (quantized activations, layer, what follows it in the arguments) → its output.
        columns: per scale of a layer's input; 0: `multiply` does not take the layer, which a plain
            norm and `other` compute.
    """
    from kernels.gemm import add_norm, quantizing

    pdl = facts.device.supports_pdl

    def fused(
        x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear, *rest: Linear
    ) -> tuple[Tensor, Tensor]:
        if block := columns(layer):
            quantized = quantizing.norm_quantize(
                x, residual, norm.weight, norm.eps, kind, block, pdl=pdl
            )
            return multiply(quantized, layer, *rest), residual
        if x is None:
            normed = add_norm.rms_norm(residual, norm.weight, norm.eps, pdl=pdl)
        else:
            normed, residual = add_norm.add_rms_norm(x, residual, norm.weight, norm.eps, pdl=pdl)
        return other(normed, layer, *rest), residual

    return fused
