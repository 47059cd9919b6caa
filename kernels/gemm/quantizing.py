"""Triton kernel that quantizes activations to e4m3 or int8 for 8-bit tensor cores.

The same kernel can compute the RMSNorm, or SwiGLU, before the quantization. The reference
implementations are `quantize_activations` of `fp8_weight` and `int8_weight`, with bitwise equal
results.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.fp8_weight import E4M3_MAX
from kernels.gemm.gemv import normed
from kernels.gemm.int8_weight import INT8_MAX
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_gemm import load_reduced

_TOKEN_MULTIPLE = 4  # cuBLAS needs a multiple of this number of scales
_LEAST_GROUPS, _MOST_GROUPS = 8, 32  # limits of the groups of a CTA that does not have a whole row
_LEAST = tl.constexpr(2.0**-126)  # smallest normal number
_HALF = tl.constexpr(12582912.0)  # 1.5 * 2^23; float32 numbers of this size are integers


class Quantized(NamedTuple):
    """Quantized activations of T tokens.

    Attributes:
        values: `[P, K]` e4m3 or int8, where P is T rounded up to a multiple of 4. Padding is 0.
        scale: `[P, groups]` float32, with contiguous columns, as cuBLAS needs them.
        num_tokens: number of tokens, T.
        dtype: data type of the activations before quantization.
    """

    values: Tensor
    scale: Tensor
    num_tokens: int
    dtype: torch.dtype

    def dequantized(self) -> Tensor:
        """Dequantizes the activations to `[T, K]` in their former data type."""
        width = self.values.shape[1] // self.scale.shape[1]
        wide = self.values.float() * self.scale.repeat_interleave(width, 1)
        return wide[: self.num_tokens].to(self.dtype)


def quantize_activations(
    x: Tensor | Quantized, kind: torch.dtype, block_columns: int, *, pdl: bool
) -> Quantized:
    """Quantizes activations, unless an earlier kernel has done so.

    Args:
        x: activations `[T, K]`, or quantized activations, which are returned unchanged.
        kind: data type of the result, e4m3 or int8.
        block_columns: columns per scale: 128, or K for a scale per token.
        pdl: see `DeviceFacts.supports_pdl`.
    """
    if isinstance(x, Quantized):
        return x
    return _quantize(x, x, None, 0.0, kind, block_columns, pdl=pdl)


def swiglu_quantize(
    gate_up: Tensor, kind: torch.dtype, block_columns: int, *, pdl: bool
) -> Quantized:
    """Computes `silu_and_mul` of `gate_up` `[T, 2 * K]` and quantizes the result `[T, K]`.

    Other arguments are as for `quantize_activations`.
    """
    return _quantize(None, gate_up, None, 0.0, kind, block_columns, is_swiglu=True, pdl=pdl)


def norm_quantize(
    x: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    kind: torch.dtype,
    block_columns: int,
    *,
    pdl: bool,
) -> Quantized:
    """Adds `x` to the residual stream, computes the RMSNorm and quantizes the result.

    The rounding before quantization is that of `add_norm`.

    Args:
        x: `[T, K]`, or split-K partials of it. None if nothing is added.
        residual: `[T, K]`, whose memory gets the sum.
        norm: weight of the norm, `[K]`.
        eps: constant of the norm.
        kind, block_columns, pdl: see `quantize_activations`.
    """
    return _quantize(x, residual, norm, eps, kind, block_columns, pdl=pdl)


def _quantize(
    x: Tensor | None,
    residual: Tensor,
    norm: Tensor | None,
    eps: float,
    kind: torch.dtype,
    block_columns: int,
    *,
    is_swiglu: bool = False,
    pdl: bool,
) -> Quantized:
    num_tokens, columns = residual.shape
    columns //= 2 if is_swiglu else 1
    padded = triton.cdiv(num_tokens, _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
    groups = -(-columns // block_columns)
    values = torch.empty(padded, columns, dtype=kind, device=residual.device)
    scale = torch.empty(groups, padded, dtype=torch.float32, device=residual.device).t()
    size = triton.next_power_of_2(block_columns)
    if norm is None:
        few = 1 << (min(groups, _LEAST_GROUPS).bit_length() - 1)
        per_cta = max(few, math.gcd(groups, _MOST_GROUPS))
    else:  # a CTA has the whole row
        per_cta = triton.next_power_of_2(groups)
    _quantize_kernel[(padded, triton.cdiv(groups, per_cta))](
        x,
        residual,
        norm,
        values,
        scale,
        num_tokens,
        padded,
        columns,
        num_tokens * columns,
        eps,
        BLOCK_COLUMNS=block_columns,
        SIZE=size,
        GROUPS=per_cta,
        LARGEST=INT8_MAX if kind == torch.int8 else E4M3_MAX,
        NORM=norm is not None,
        ADD=norm is not None and x is not None,
        SPLITS=len(x) if x is not None and x.dim() == 3 else 0,
        SWIGLU=is_swiglu,
        PDL=pdl,
        num_warps=4 if size * per_cta < 4096 else 8,
        launch_pdl=pdl,
    )
    return Quantized(values, scale, num_tokens, residual.dtype)


@triton.jit
def larger(one, other):  # noqa: ANN201 - Triton blocks have no type
    """Computes the maximum, which is NaN if an operand is NaN."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x):  # noqa: ANN201 - Triton blocks have no type
    """Computes the largest magnitude of each row."""
    return tl.reduce(tl.abs(x), 1, larger)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):  # noqa: ANN201 - Triton blocks have no type
    """Computes the scale of each row: the largest magnitude divided by LARGEST.

    The scale is at least the smallest normal number, and 1 for a row of zeros. It is NaN if a value
    is NaN, because quantized integers would hide the NaN.
    """
    return tl.where(amax == 0, 1.0, larger(tl.div_rn(amax, LARGEST), _LEAST))


@triton.jit
def quotient(x, scale):  # noqa: ANN201 - Triton blocks have no type
    """Computes `x / scale`, rounded once, in three instructions per element instead of ten.

    The product with the reciprocal is corrected by its exact remainder (Markstein, 1990).
    """
    inverse = tl.div_rn(1.0, scale)
    near = x * inverse
    return tl.fma(tl.fma(-near, scale, x), inverse, near)


@triton.jit(do_not_specialize=["num_tokens", "padded"])
def _quantize_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    padded,
    num_columns,
    stride,
    eps,
    BLOCK_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, SIZE)
    column = group[:, None] * BLOCK_COLUMNS + within[None, :]
    inside = (column < num_columns) & (within < BLOCK_COLUMNS)[None, :]
    is_read = inside & (token < num_tokens)
    place = token.to(tl.int64) * num_columns + column
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    norm = column.to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    if SWIGLU:
        gate_ptr = residual_ptr + token.to(tl.int64) * num_columns + place
        gate = tl.load(gate_ptr, mask=is_read, other=0.0)
        up = tl.load(gate_ptr + num_columns, mask=is_read, other=0.0)
        x = swiglu(gate, up).to(tl.float32)
    else:
        x = tl.load(residual_ptr + place, mask=is_read, other=0.0).to(tl.float32)
    if ADD:
        x += load_reduced(x_ptr, place, is_read, stride, SPLITS, dtype).to(tl.float32)
        tl.store(residual_ptr + place, x.to(dtype), mask=is_read)
        x = x.to(dtype).to(tl.float32)
    if NORM:
        x = normed(x, norm, tl.rsqrt(tl.sum(x * x) / num_columns + eps), dtype)
    scale = scale_of(amax_of(x), LARGEST)
    values = tl.clamp(quotient(x, scale[:, None]), -LARGEST, LARGEST)
    if values_ptr.dtype.element_ty == tl.int8:
        # The addition rounds to nearest even, and the lowest bits of the sum are the integer.
        values = (values + _HALF).to(tl.int32, bitcast=True)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + place, values, mask=inside)
    is_group = group * BLOCK_COLUMNS < num_columns
    tl.store(scale_ptr + group * padded + token, scale, mask=is_group)
