"""FP8 linear layers on a GPU with quantized activations (W8A8), for FP8 tensor cores.

| name        | tokens | how                                                                     |
|-------------|--------|-------------------------------------------------------------------------|
| skinny_w8a8 | 2-64   | split-K, for reading the weights fast; partials are scaled, in float32  |
| scaled_mm   | any    | cuBLAS or CUTLASS                                                       |
| triton_gemm | any    | a Triton kernel, if cuBLAS does not support the block scales            |

A kernel before the GEMM quantizes activations, and may compute the norm as well. Tensor cores sum
128 columns, and these sums are scaled and added in float32. The reference implementation is
`fp8_weight.w8a8_linear`.
"""

# pyright: reportAssignmentType=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.fp8_weight import BLOCK, E4M3, Fp8Weight
from kernels.gemm.quantizing import Quantized, quantize_activations
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_gemm import num_splits, output_of

_ROWS = 64  # rows of the weight of a CTA of the skinny GEMM
_MAX_SPLITS = 8
_FEW_TOKENS = 32  # with more tokens, fewer CTAs fit an SM
# Tokens, rows and warps of a tile, by largest number of tokens.
_TRITON_TILE = {16: (16, 64, 4), 64: (64, 128, 4), 128: (128, 128, 8)}


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Division of the skinny GEMM: splits of K, and buffers of the pipeline."""

    splits: int
    stages: int


def skinny_config(
    num_tokens: int, num_rows: int, columns: int, device: DeviceFacts
) -> SkinnyConfig:
    """Chooses a configuration by the rule that is best on an H200 for 8B shapes.

    K is split as long as all CTAs fit the device together. `benchmarks.kernels.fp8 --tune` measured
    the candidates.
    """
    is_few = num_tokens <= _FEW_TOKENS
    most_ctas = (4 if is_few else 3) * device.num_sms
    splits = num_splits(-(-num_rows // _ROWS), columns, BLOCK, most_ctas, _MAX_SPLITS)
    return SkinnyConfig(splits, stages=4 if is_few and splits < _MAX_SPLITS else 3)


def split_k_partials(
    x: Tensor | Quantized,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """Computes `w8a8_linear(x) + bias` for few tokens.

    Returns:
        Split-K partials `[S, T, N]` float32, or the result `[T, N]` in the dtype of `x` if K is not
        split.
    """
    found = quantize_activations(x, E4M3, weight.block_columns, pdl=device.supports_pdl)
    num_rows, columns = weight.values.shape
    config = config or skinny_config(found.num_tokens, num_rows, columns, device)
    out = output_of(config.splits, found.num_tokens, num_rows, found.dtype, found.values.device)
    _launch_skinny(found, weight, bias, out, config, device, is_swiglu=False)
    return out


def linear_swiglu(
    x: Tensor | Quantized, weight: Fp8Weight, bias: Tensor | None = None, *, device: DeviceFacts
) -> Tensor:
    """Computes `silu_and_mul(w8a8_linear(x) + bias)` for few tokens.

    Shapes are `[T, K]`, `[2 * N, K]` → `[T, N]`.
    """
    found = quantize_activations(x, E4M3, weight.block_columns, pdl=device.supports_pdl)
    config = SkinnyConfig(1, stages=4 if found.num_tokens <= _FEW_TOKENS else 3)
    size = found.num_tokens, len(weight.values) // 2
    out = torch.empty(size, dtype=found.dtype, device=found.values.device)
    _launch_skinny(found, weight, bias, out, config, device, is_swiglu=True)
    return out


def _launch_skinny(
    x: Quantized,
    weight: Fp8Weight,
    bias: Tensor | None,
    out: Tensor,
    config: SkinnyConfig,
    device: DeviceFacts,
    *,
    is_swiglu: bool,
) -> None:
    num_rows, columns = weight.values.shape
    _skinny_kernel[(triton.cdiv(num_rows, _ROWS), config.splits)](
        x.values,
        x.scale,
        weight.values,
        weight.scale,
        bias,
        out,
        x.num_tokens,
        len(x.values),
        num_rows,
        columns,
        TOKENS=max(16, triton.next_power_of_2(x.num_tokens)),
        ROWS=_ROWS,
        SPAN=columns // config.splits,
        BLOCK_ROWS=weight.block_rows,
        SCALE_COLUMNS=weight.scale.shape[1],
        BIAS=bias is not None,
        SWIGLU=is_swiglu,
        STAGES=config.stages,
        PDL=device.supports_pdl,
        num_warps=4,
        launch_pdl=device.supports_pdl,
    )


def scaled_mm(x: Tensor | Quantized, weight: Fp8Weight, *, device: DeviceFacts) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` by torch's scaled GEMM with exact (slow) accumulation."""
    found = quantize_activations(x, E4M3, weight.block_columns, pdl=device.supports_pdl)
    if weight.block_columns == found.values.shape[1]:  # per channel
        return torch._scaled_mm(
            found.values, weight.values.t(), found.scale, weight.scale.t(), out_dtype=found.dtype
        )[: found.num_tokens]
    if weight.scale.shape[1] % 4:  # cuBLAS needs a multiple of 4
        return triton_gemm(found, weight, device=device)
    kinds: Any = F.ScalingType
    return F.scaled_mm(
        found.values,
        weight.values.t(),
        found.scale,
        kinds.BlockWise1x128,
        weight.scale.t(),
        kinds.BlockWise128x128,
        output_dtype=found.dtype,
    )[: found.num_tokens]


def triton_gemm(x: Tensor | Quantized, weight: Fp8Weight, *, device: DeviceFacts) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` with block scales, by a Triton kernel."""
    pdl = device.supports_pdl
    found = quantize_activations(x, E4M3, weight.block_columns, pdl=pdl)
    num_tokens, (num_rows, columns) = found.num_tokens, weight.values.shape
    out = torch.empty(num_tokens, num_rows, dtype=found.dtype, device=found.values.device)
    limit = next((size for size in _TRITON_TILE if num_tokens <= size), 128)
    tokens, rows, warps = _TRITON_TILE[limit]
    grid = (triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, rows),)
    _block_gemm_kernel[grid](
        found.values,
        found.scale,
        weight.values,
        weight.scale,
        out,
        num_tokens,
        num_rows,
        columns,
        found.scale.stride(1),
        weight.scale.shape[1],
        TOKENS=tokens,
        ROWS=rows,
        COLUMNS=BLOCK,
        GROUP=16,
        PDL=pdl,
        num_warps=warps,
        num_stages=3,
        launch_pdl=pdl,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "padded"])
def _skinny_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    padded,
    num_rows,
    num_columns,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROWS // 2
    index = tl.arange(0, ROWS)
    if SWIGLU:  # half of the rows belong to gate, and half are the same rows of up
        row = tl.program_id(0) * HALF + index % HALF + index // HALF * (num_rows // 2)
        is_row = index % HALF < num_rows // 2 - tl.program_id(0) * HALF
    else:
        row = tl.program_id(0) * ROWS + index
        is_row = row < num_rows
    split = tl.program_id(1)
    token, column = tl.arange(0, TOKENS), split * SPAN + tl.arange(0, 128)
    is_token = token < num_tokens
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    scales = scale_ptr + row // BLOCK_ROWS * SCALE_COLUMNS
    x_scales = x_scale_ptr + token
    if BLOCK_ROWS > 1:
        scales += split * (SPAN // 128)
        x_scales += split * (SPAN // 128) * padded
    # Scales are read an iteration ahead, because only operands of tensor cores are pipelined.
    scale = tl.load(scales, mask=is_row, other=0.0)
    wait_for_earlier(PDL)
    x_scale = tl.load(x_scales, mask=is_token, other=0.0)
    # The weight is the first operand, because tensor cores need 64 rows of it.
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in tl.range(0, SPAN, 128, num_stages=STAGES):
        weight = tl.load(weights + at, mask=is_row[:, None], other=0.0)
        x = tl.load(inputs + at, mask=is_token[:, None], other=0.0)
        if BLOCK_ROWS > 1:
            factor, is_more = scale[:, None] * x_scale[None, :], at + 128 < SPAN
            scales += 1
            x_scales += padded
            scale = tl.load(scales, mask=is_row & is_more, other=0.0)
            x_scale = tl.load(x_scales, mask=is_token & is_more, other=0.0)
            sums += tl.dot(weight, tl.trans(x)) * factor
        else:
            sums += tl.dot(weight, tl.trans(x))
    if BLOCK_ROWS == 1:
        sums *= scale[:, None] * x_scale[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, bias, 0.0)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SWIGLU:
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, HALF, TOKENS)), (2, 1, 0))
        gate, up = tl.split(halves)
        of_out = tl.program_id(0) * HALF + tl.arange(0, HALF)
        inside = is_token[:, None] & (of_out < num_rows // 2)[None, :]
        place = token[:, None] * (num_rows // 2) + of_out[None, :]
        tl.store(out_ptr + place, swiglu(gate, up), mask=inside)
    else:
        place = (split * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
        inside = is_token[:, None] & is_row[None, :]
        tl.store(out_ptr + place, tl.trans(sums).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _block_gemm_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    scale_stride,
    scale_columns,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    # GROUP tiles of rows are multiplied with all tokens before the next GROUP, so that their
    # weights stay in L2.
    token_tiles, row_tiles = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_rows, ROWS)
    index = tl.program_id(0)
    first = index // (GROUP * token_tiles) * GROUP
    height = min(row_tiles - first, GROUP)
    index = index % (GROUP * token_tiles)
    row = (first + index % height) * ROWS + tl.arange(0, ROWS)
    token = index // height * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    is_token, is_row = token < num_tokens, row < num_rows
    inputs = x_ptr + token.to(tl.int64)[:, None] * num_columns + column[None, :]
    weights = weight_ptr + row.to(tl.int64)[None, :] * num_columns + column[:, None]
    # ROWS divides 128, so all rows of a tile share a scale.
    scales = scale_ptr + (first + index % height) * ROWS // 128 * scale_columns
    x_scales = x_scale_ptr + token
    wait_for_earlier(PDL)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for at in range(0, num_columns, COLUMNS):
        block = at // COLUMNS
        x = tl.load(inputs + at, mask=is_token[:, None], other=0.0)
        weight = tl.load(weights + at, mask=is_row[None, :], other=0.0)
        x_scale = tl.load(x_scales + block * scale_stride, mask=is_token, other=0.0)
        sums += tl.dot(x, weight) * (x_scale * tl.load(scales + block))[:, None]
    place = token.to(tl.int64)[:, None] * num_rows + row[None, :]
    result = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=is_token[:, None] & is_row[None, :])
