"""Base class and helpers of the methods for quantized linear layers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.plain import reduce_split_k
from services.common.nn.dispatch import Kernel
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, LinearMethod, TensorLayout

# Tensors of activations as the files declare them, which are not read: layers quantize activations
# by scales of their own, or leave them as they are.
ACTIVATIONS = tuple(
    TensorLayout(name=f"{place}_{name}", axes=(1,))
    for place in ("input", "output")
    for name in ("scale", "zero_point", "global_scale")
)


class QuantizedLinear(LinearMethod):
    """Base class of the methods for quantized weights. A method has no state of its layers."""

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

    @staticmethod
    @abstractmethod
    def multiply(x: Tensor, weight: Any, /) -> Tensor:  # noqa: ANN401 - a type of the format
        """Multiplies in plain torch, which specifies the result: `[T, K]` → `[T, N]`."""

    @staticmethod
    @abstractmethod
    def dequantize(weight: Any, dtype: torch.dtype, /) -> Tensor:  # noqa: ANN401
        """Returns the weight as a matrix `[..., N, K]`."""

    @staticmethod
    @abstractmethod
    def has_kernels(weight: Any, /) -> bool:  # noqa: ANN401
        """Returns whether all rows of the dispatch table support a weight."""


def half_obstacle(facts: Any) -> str:  # noqa: ANN401 - the facts of the decoder
    """Reason why a half-precision Triton kernel cannot run. Empty if it can."""
    half = "" if facts.dtype.itemsize == 2 else f"needs bfloat16 or float16, not {facts.dtype}"
    return facts.device.triton_obstacle or half


def of_layer(kernel: Kernel) -> Kernel:
    """Wraps a kernel of (x, weight, bias, ...) as a kernel of (x, layer, ...)."""

    def call(x: Tensor, layer: Linear, *rest: Tensor) -> Tensor | None:
        return kernel(x, layer.method.weight(layer), layer.bias, *rest)

    return call


def gemv_after_norm(kernel: Kernel) -> Kernel:
    """Implements `norm_linear` or `norm_swiglu` by a GEMV of (x, norm, eps, weight, bias)."""

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
    """Makes a kernel (quantized activations, layer, ...) that depends on the number of tokens.

    Args:
        few: kernel (x, weight, bias) for up to `most` tokens.
        many: GEMM (x, weight) for more tokens. The bias is added to its output.
        most: largest number of tokens for `few`.
        then: function of the output of `many` and the further arguments, such as an activation.
    """

    def multiply(x: Any, layer: Linear, *rest: Linear) -> Any:  # noqa: ANN401 - or `Quantized`
        weight = layer.method.weight(layer)
        if x.num_tokens <= most:
            return few(x, weight, layer.bias)
        found = many(x, weight)
        return then(found if layer.bias is None else found + layer.bias, *rest)

    return multiply


def after_norm(
    facts: Any,  # noqa: ANN401 - the facts of the decoder
    kind: torch.dtype,
    columns: Callable[[Linear], int],
    multiply: Kernel,
    other: Kernel,
) -> Kernel:
    """Implements `norm_linear` or `norm_swiglu` by a norm kernel that quantizes its output.

    Args:
        facts: facts about the device and the model.
        kind: data type of the quantized activations.
        columns: function that returns the columns per scale of a layer's input, or 0 if `multiply`
            does not support the layer.
        multiply: kernel (quantized activations, layer, further arguments) → the layer's output.
        other: kernel (normed activations, layer, further arguments) for the remaining layers.
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
