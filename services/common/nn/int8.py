"""Linear layers of int8 weights and activations (W8A8): the layers' method.

Files are compressed-tensors' `int-quantized`; `int8_weight` is the specification.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.gemm import int8_weight
from kernels.gemm.int8_weight import Int8Weight
from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation
from services.common.nn.linear import Axis, Linear, QuantizedLinear, TensorLayout

_LAYOUTS = (
    TensorLayout(
        name="weight", parameter="weight", axes=(Axis("out"), Axis("in")), stored=(torch.int8,),
        dtype=torch.int8,
    ),
    TensorLayout(
        name="weight_scale", parameter="weight_scale", axes=(Axis("out"), None),
        dtype=torch.float32, dummy=(2.7e-4, 0.0),
    ),
)  # fmt: skip


class Int8Linear(QuantizedLinear):
    """Method of a linear layer: `weight` int8 `[N, K]`, `weight_scale` float32 `[N, 1]`."""

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec.format)

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        return _LAYOUTS

    def weight(self, layer: Linear) -> Int8Weight:
        return Int8Weight(layer.weight, layer.weight_scale)

    def multiply(self, x: Tensor, weight: Int8Weight) -> Tensor:
        return int8_weight.w8a8_linear(x, weight)

    def dequantize(self, weight: Int8Weight, dtype: torch.dtype) -> Tensor:
        return int8_weight.dequantize(weight, dtype)

    def has_kernels(self, weight: Int8Weight) -> bool:
        return int8_weight.has_int_mm(weight)

    def rows(self) -> Sequence[Implementation[Any]]:
        return (
            Implementation(
                self.operation, "int_mm", lambda _: int8_weight.int_mm_linear, _tensor_cores
            ),
            Implementation(self.operation, "plain", lambda _: int8_weight.w8a8_linear),
        )  # fmt: skip


def _tensor_cores(facts: Any) -> str:  # noqa: ANN401 - the decoder's
    if facts.device.kind != "cuda":
        return "needs a GPU"
    return "" if facts.device.capability >= (8, 0) else "needs compute capability 8.0"
