"""Matrices of experts as the kernels read them: unquantized, or with 8 bits and scales."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import DeviceFacts
from kernels.gemm.fp8_kernels import unpack
from kernels.gemm.fp8_weight import Fp8Weight
from kernels.gemm.int8_weight import Int8Weight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A stack of matrices, one of each expert.

    Attributes:
        values: `[E, N, K]`. FP8 values on a GPU are bytes.
        scale: scales `[E, ...]` float32. None if the matrices are unquantized.
        block_rows: rows per scale, see `Fp8Weight`. 0 if the matrices are unquantized.
    """

    values: Tensor
    scale: Tensor | None = None
    block_rows: int = 0

    @classmethod
    def of(cls, weight: Tensor | Fp8Weight | Int8Weight) -> "ExpertWeights":
        """Converts a stack of matrices `[E, N, K]` to the form that kernels read."""
        if isinstance(weight, Tensor):
            return cls(weight)
        if isinstance(weight, Int8Weight):
            return cls(weight.values, weight.scale, 1)
        values = weight.values.view(torch.uint8) if weight.values.is_cuda else weight.values
        return cls(values, weight.scale, weight.block_rows)

    @property
    def rows(self) -> int:
        return self.values.shape[1]

    @property
    def is_int8(self) -> bool:
        return self.values.dtype == torch.int8

    def multiplies_quantized(self, device: DeviceFacts) -> bool:
        """Returns whether GEMMs on the device multiply the weights with quantized activations."""
        return self.is_int8 or (self.block_rows > 0 and device.capability >= (8, 9))

    @property
    def constants(self) -> dict[str, Any]:
        rows, columns = (0, 0) if self.scale is None else self.scale.shape[1:]
        return {
            "BLOCK_ROWS": self.block_rows,
            "SCALE_ROWS": rows,
            "SCALE_COLUMNS": columns,
            "PACKED": self.values.dtype == torch.uint8,
        }


@triton.jit
def widen(values, dtype: tl.constexpr, PACKED: tl.constexpr, PURE: tl.constexpr):  # noqa: ANN201
    """Converts weights exactly to the dtype of activations. FP8 bytes are converted by assembly."""
    # Triton's interpreter cannot run assembly.
    return unpack(values, dtype, PURE) if PACKED else values.to(tl.float32).to(dtype)
