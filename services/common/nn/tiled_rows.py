"""Rows of a dispatch table for W4A16: which kernel serves how many tokens.

Weights that have no whole tiles, or groups of few columns, go to the kernels of bytes
(`packed_kernels`) for a few tokens and are dequantized for more, as other formats are.
"""

from typing import Any

from torch import Tensor

from kernels.plain import reduce_split_k
from kernels.tuning import swiglu_gemm_config
from services.common.nn.dispatch import Kernel
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear

GEMV_TOKENS = 1
SKINNY_TOKENS = 192  # for more, dequantizing the weight takes less than reading it again and again
_BYTES_TOKENS = 16  # of the kernels of bytes


def linear(facts: Any) -> Kernel:  # noqa: ANN401 - the decoder's, as below
    """`(x, weight)` → `[T, N]`."""
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight

    def multiply(x: Tensor, weight: packed_weight.PackedWeight) -> Tensor:
        if weight.is_tiled:
            if len(x) <= SKINNY_TOKENS:
                return packed_tiles.skinny_gemm(x, weight, device=facts.device)
            return packed_tiles.linear(x, weight, device=facts.device)
        if len(x) <= _BYTES_TOKENS:
            return packed_kernels.skinny_gemm(x, weight, device=facts.device)
        return packed_weight.weight_only_linear(x, weight)

    return multiply


def project(facts: Any) -> Kernel:  # noqa: ANN401
    """`(x, layer)` → `[T, N]`, or partials, for up to `SKINNY_TOKENS`."""
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        if weight.is_tiled:
            return packed_tiles.split_k_partials(x, weight, layer.bias, device=facts.device)
        if len(x) <= _BYTES_TOKENS and packed_weight.has_kernels(weight):
            return packed_kernels.split_k_partials(x, weight, layer.bias, device=facts.device)
        return layer(x)

    return multiply


def linear_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    """`(x, layer of gate and up)` → `silu(gate) * up`, `[T, N]`."""
    from kernels.gemm import packed_tiles, silu_mul, swiglu_gemm

    device = facts.device

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        divides = weight.is_tiled and weight.rows % (2 * packed_tiles.TILE_ROWS) == 0
        if divides and len(x) <= SKINNY_TOKENS:
            return packed_tiles.linear_swiglu(x, weight, layer.bias, device=device)
        config = swiglu_gemm_config(device, weight.columns)
        fits = divides and device.is_hopper and not config.obstacle(weight.rows, weight.columns)
        if fits and layer.bias is None and config.is_faster(len(x), weight.rows):
            wide = packed_tiles.dequantized(weight, x.dtype, device=device)
            return swiglu_gemm.linear_swiglu(x, wide, config)
        return silu_mul.silu_and_mul(layer(x), pdl=facts.device.supports_pdl)

    return multiply


def norm_linear(facts: Any) -> Kernel:  # noqa: ANN401
    """`(x, residual, norm, layer)`, see `StepKernels`, for one token."""
    from kernels.gemm import add_norm, packed_gemv

    unfused, pdl = project(facts), facts.device.supports_pdl

    def multiply(
        x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
    ) -> tuple[Tensor, Tensor]:
        if x is not None:
            residual = residual + reduce_split_k(x, residual.dtype)
        weight = layer.method.weight(layer)
        if not packed_gemv.has_gemv(weight):
            normed = add_norm.rms_norm(residual, norm.weight, norm.eps, pdl=pdl)
            return unfused(normed, layer), residual
        found = packed_gemv.norm_linear(
            residual, norm.weight, norm.eps, weight, layer.bias, pdl=pdl
        )
        return found, residual

    return multiply


def linear_residual(facts: Any) -> Kernel:  # noqa: ANN401
    """`(x, layer, residual)`, see `StepKernels`, for one token."""
    from kernels.gemm import packed_gemv

    unfused, pdl = project(facts), facts.device.supports_pdl

    def multiply(x: Tensor, layer: Linear, residual: Tensor) -> Tensor | None:
        weight = layer.method.weight(layer)
        if not packed_gemv.has_gemv(weight):
            return unfused(x, layer)
        packed_gemv.linear_residual(x, weight, layer.bias, residual, pdl=pdl)
        return None

    return multiply
