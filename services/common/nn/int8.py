"""Linear layers with int8 weights and activations (W8A8): their `LinearMethod`.

The files have the format `int-quantized` of compressed-tensors. `int8_weight` is the specification
in plain torch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.gemm import int8_weight
from kernels.gemm.int8_weight import Int8Weight
from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation, Kernel, TokenRange, up_to
from services.common.nn.linear import Axis, Linear, TensorLayout
from services.common.nn.quantized import (
    ACTIVATIONS,
    QuantizedLinear,
    after_norm,
    few_or_many,
    half_obstacle,
)

SKINNY_TOKENS = 64  # largest number of tokens for the split-K kernel
_LAYOUTS = (
    TensorLayout(
        name="weight",
        parameter="weight",
        axes=(Axis("out"), Axis("in")),
        stored=(torch.int8,),
        dtype=torch.int8,
    ),
    TensorLayout(
        name="weight_scale",
        parameter="weight_scale",
        axes=(Axis("out"), 1),
        dtype=torch.float32,
        dummy=(2.7e-4, 0.0),
    ),
    *ACTIVATIONS,
)


class Int8Linear(QuantizedLinear):
    """Method of a linear layer with int8 `weight` `[N, K]` and float32 `weight_scale` `[N, 1]`."""

    multiply = staticmethod(int8_weight.w8a8_linear)
    dequantize = staticmethod(int8_weight.dequantize)
    has_kernels = staticmethod(int8_weight.has_int_mm)

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec.format)

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        return _LAYOUTS

    def weight(self, layer: Linear) -> Int8Weight:
        return Int8Weight(layer.weight, layer.weight_scale)

    def rows(self) -> Sequence[Implementation[Any]]:
        few = up_to(SKINNY_TOKENS)

        def normed(facts: Any) -> TokenRange:  # noqa: ANN401 - the facts of the decoder
            return TokenRange() if facts.device.is_hopper else few(facts)

        return (
            Implementation("norm_linear", "int8_norm", _norm_linear, half_obstacle, normed),
            Implementation("norm_swiglu", "int8_norm", _norm_swiglu, _hopper),
            Implementation("project", "int8_skinny_gemm", _project, half_obstacle, few),
            Implementation("linear_swiglu", "int8_gemm", _linear_swiglu, _hopper),
            Implementation(
                self.operation,
                "skinny_gemm",
                partial(_gemm, "split_k_partials"),
                half_obstacle,
                few,
            ),
            Implementation(self.operation, "gemm", partial(_gemm, "gemm"), _hopper),
            Implementation(
                self.operation, "int_mm", lambda _: int8_weight.int_mm_linear, _tensor_cores
            ),
            Implementation(self.operation, "plain", lambda _: int8_weight.w8a8_linear),
        )


def _tensor_cores(facts: Any) -> str:  # noqa: ANN401 - the facts of the decoder
    if facts.device.kind != "cuda":
        return "needs a GPU"
    return "" if facts.device.capability >= (8, 0) else "needs compute capability 8.0"


def _hopper(facts: Any) -> str:  # noqa: ANN401
    return half_obstacle(facts) or ("" if facts.device.is_hopper else "needs Hopper's tensor cores")


def _project(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import int8_kernels

    kernel = partial(int8_kernels.split_k_partials, device=facts.device)

    def project(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        return kernel(x, weight, layer.bias) if int8_weight.has_tiles(weight) else layer(x)

    return project


def _gemm(name: str, facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import int8_kernels
    from kernels.gemm.skinny_gemm import summed

    kernel = getattr(int8_kernels, name)

    def multiply(x: Tensor, weight: Int8Weight) -> Tensor:
        if not int8_weight.has_tiles(weight):
            return int8_weight.int_mm_linear(x, weight)
        return summed(kernel, x, weight, device=facts.device)

    return multiply


def _norm_linear(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import int8_kernels

    skinny = partial(int8_kernels.split_k_partials, device=facts.device)
    many = partial(int8_kernels.gemm, device=facts.device)
    multiply = few_or_many(skinny, many, SKINNY_TOKENS)
    return after_norm(facts, torch.int8, _columns, multiply, _project(facts))


def _norm_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import int8_kernels
    from kernels.gemm.quantizing import Quantized

    def multiply(x: Quantized, layer: Linear, _: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        return int8_kernels.gemm(x, weight, device=facts.device, is_swiglu=True)

    def columns(layer: Linear) -> int:
        return _columns(layer) if layer.bias is None else 0

    other = _linear_swiglu(facts)
    return after_norm(facts, torch.int8, columns, multiply, lambda x, layer, _: other(x, layer))


def _columns(layer: Linear) -> int:
    """Columns of the layer's input, which share a scale. 0 if tiles do not divide the weight."""
    return layer.in_features if int8_weight.has_tiles(layer.method.weight(layer)) else 0


def _linear_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import int8_kernels, silu_mul

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        if layer.bias is None and int8_weight.has_tiles(weight):
            return int8_kernels.gemm(x, weight, device=facts.device, is_swiglu=True)
        return silu_mul.silu_and_mul(layer(x), pdl=facts.device.supports_pdl)

    return multiply
