"""Rows of a dispatch table for W4A16: which kernel serves how many tokens.

Weights that have no whole tiles, or groups of few columns, go to the kernels of bytes
(`packed_kernels`) for a few tokens and are dequantized for more, as other formats are.
"""

from typing import Any

from torch import Tensor

from kernels.tuning import swiglu_gemm_config
from services.common.nn.dispatch import Kernel
from services.common.nn.linear import Linear

SKINNY_TOKENS = 192  # for more, dequantizing the weight takes less than reading it again and again
BYTES_TOKENS = 16  # of the kernels of bytes; not measured yet


def linear(facts: Any) -> Kernel:  # noqa: ANN401 - the decoder's, as below
    """`(x, weight)` → `[T, N]`."""
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight
    from kernels.gemm.skinny_gemm import summed

    def multiply(x: Tensor, weight: packed_weight.PackedWeight) -> Tensor:
        if weight.is_tiled:
            if len(x) <= SKINNY_TOKENS:
                return summed(packed_tiles.split_k_partials, x, weight, device=facts.device)
            return packed_tiles.linear(x, weight, device=facts.device)
        if len(x) <= BYTES_TOKENS:
            return summed(packed_kernels.split_k_partials, x, weight, device=facts.device)
        return packed_weight.weight_only_linear(x, weight)

    return multiply


def project(facts: Any) -> Kernel:  # noqa: ANN401
    """`(x, layer)` → `[T, N]`, or partials, for up to `SKINNY_TOKENS`."""
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        if weight.is_tiled:
            return packed_tiles.split_k_partials(x, weight, layer.bias, device=facts.device)
        if len(x) <= BYTES_TOKENS and packed_weight.has_kernels(weight):
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
