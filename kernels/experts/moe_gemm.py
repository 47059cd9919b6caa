"""Experts for many tokens: GEMMs over tiles of rows that share an expert.

A row is a token with one of its experts. The first GEMM gathers its tokens, and its epilogue
applies SwiGLU. Outputs of the second GEMM are sorted by expert, and `_combine_kernel` sums each
token's outputs in the order of its experts.

The reference implementation is `services.common.nn.experts.moe`, with the same rounding. 8-bit
weights can be multiplied with quantized activations (`MoEGemmConfig.w8a8`), as in `w8a8_linear` of
`fp8_weight` and `int8_weight`.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.experts.moe_routing import Routing
from kernels.experts.moe_weights import ExpertWeights, widen
from kernels.gemm.fp8_weight import BLOCK, E4M3
from kernels.gemm.packed_weight import PackedWeight
from kernels.gemm.quantizing import quantize_activations
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import MoEGemmConfig

_COMBINE_COLUMNS = 1024


def grouped_experts(
    x: Tensor,
    routing: Routing,
    gate_up: ExpertWeights | PackedWeight,
    down: ExpertWeights | PackedWeight,
    residual: Tensor,
    gemm: Callable[..., None],
    *,
    pdl: int,
) -> None:
    """Adds the experts' weighted outputs to the residual stream in place.

    Args:
        x: hidden states `[T, hidden]`.
        routing: routing of the tokens, with tiles of `config.tokens` rows of the GEMMs.
        gate_up: stack of matrices `[E, 2 * I, hidden]`.
        down: stack of matrices `[E, hidden, I]`.
        residual: residual stream `[T, hidden]`.
        gemm: function `launch_gemm` for such matrices, with all keyword arguments except `is_up`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_rows = len(routing.order)
    inner = x.new_empty(num_rows, gate_up.rows // 2)
    gemm(x, routing, gate_up, inner, is_up=True)
    out = x.new_empty(num_rows, down.rows)
    gemm(inner, routing, down, out, is_up=False)
    combine(out, routing, residual, pdl=pdl)


def combine(outputs: Tensor, routing: Routing, residual: Tensor, *, pdl: int) -> None:
    """Adds each token's weighted outputs to the residual stream in place.

    Args:
        outputs: outputs of the experts, `[T * k, hidden]`, in the order of the routing.
        routing: routing of the tokens.
        residual: residual stream `[T, hidden]`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tokens, hidden = residual.shape
    top_k = routing.experts.shape[1]
    _combine_kernel[(num_tokens, triton.cdiv(hidden, _COMBINE_COLUMNS))](
        outputs,
        routing.places,
        routing.weights,
        residual,
        WIDTH=hidden,
        TOP_K=top_k,
        COLUMNS=_COMBINE_COLUMNS,
        PDL=pdl,
        launch_pdl=pdl > 0,
    )


def launch_gemm(
    x: Tensor,
    routing: Routing,
    weight: ExpertWeights,
    out: Tensor,
    *,
    config: MoEGemmConfig,
    is_up: bool,
    pure: bool = False,
    pdl: int,
) -> None:
    """Computes one of the two GEMMs, and quantizes its activations before if needed.

    Args:
        x: hidden states of the tokens if `is_up`, or else of the rows.
        routing: routing of the tokens.
        weight: stack of matrices.
        out: tensor for the result, with a row for each row of the routing.
        config: division of the GEMM.
        is_up: True for gate and up with SwiGLU, False for down.
        pure: see `fp8_kernels.unpack`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tiles = routing.tiles.shape[1]
    num_rows = weight.rows // 2 if is_up else weight.rows
    rows = math.gcd(config.rows // 2 if is_up else config.rows, num_rows)
    width, values, constants = x.shape[1], weight.values, weight.constants
    columns = math.gcd(BLOCK if weight.block_rows else config.columns, width)
    x_columns, x_scale = 0, None
    if config.w8a8:
        kind = torch.int8 if weight.is_int8 else E4M3
        x_columns = width if weight.is_int8 or weight.block_rows == 1 else BLOCK
        quantized = quantize_activations(x, kind, x_columns, pdl=pdl)
        x, x_scale = quantized.values, quantized.scale
        if not weight.is_int8:
            values, constants["PACKED"] = values.view(E4M3), False
    _grouped_gemm_kernel[(num_rows // rows, num_tiles)](
        x,
        values,
        weight.scale,
        out,
        routing.order,
        routing.tiles,
        num_tiles,
        x_scale,
        0 if x_scale is None else x_scale.stride(1),
        X_COLUMNS=x_columns,
        WIDTH=width,
        HEIGHT=weight.rows,
        TOP_K=routing.experts.shape[1],
        TOKENS=config.tokens,
        ROWS=2 * rows if is_up else rows,
        COLUMNS=columns,
        STAGES=config.stages,
        UP=is_up,
        **constants,
        PURE=pure,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
    )


@triton.jit(do_not_specialize=["num_tiles", "x_stride"])
def _grouped_gemm_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles,
    x_scale_ptr,
    x_stride,
    X_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    PURE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies a tile of rows of one expert with ROWS rows of its matrix.

    If UP, half of the matrix rows belong to gate and half are the same rows of up, the inputs are
    gathered from their tokens, and SwiGLU is applied.
    """
    HALF: tl.constexpr = ROWS // 2
    wait_for_earlier(PDL)
    tile = tl.program_id(1)
    size = tl.load(tiles_ptr + 2 * num_tiles + tile)
    if size > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        index = tl.arange(0, ROWS)
        if UP:
            row = tl.program_id(0) * HALF + index % HALF + index // HALF * (HEIGHT // 2)
        else:
            row = tl.program_id(0) * ROWS + index
        place, source, is_row = rows_of_tile(
            order_ptr, tiles_ptr, num_tiles, size, TOP_K, TOKENS, UP
        )
        column = tl.arange(0, COLUMNS)
        weights = weight_ptr + (expert * HEIGHT + row)[:, None] * WIDTH + column[None, :]
        inputs = x_ptr + source.to(tl.int64)[:, None] * WIDTH + column[None, :]
        if X_COLUMNS > 0:
            x_scales = x_scale_ptr + source
        if BLOCK_ROWS > 0:
            scales = scale_ptr + (expert * SCALE_ROWS + row // BLOCK_ROWS) * SCALE_COLUMNS
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        # The weight is the first operand, because tensor cores need at least 64 rows of it.
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            weight = tl.load(weights + at)
            x = tl.load(inputs + at, mask=is_row[:, None], other=0.0)
            if BLOCK_ROWS > 0 and X_COLUMNS == 0:
                weight = widen(weight, dtype, PACKED, PURE)
            if X_COLUMNS > 0:  # 8-bit tensor cores sum only few columns exactly
                sums = tl.dot(weight, tl.trans(x)).to(tl.float32)
                if BLOCK_ROWS > 1:
                    block = at // 128
                    x_scale = tl.load(x_scales + block * x_stride, mask=is_row, other=0.0)
                    sums *= tl.load(scales + block)[:, None] * x_scale[None, :]
                acc += sums
            elif BLOCK_ROWS > 1:
                acc += tl.dot(weight, tl.trans(x)) * tl.load(scales + at // 128)[:, None]
            else:
                acc = tl.dot(weight, tl.trans(x), acc)
        if BLOCK_ROWS == 1:
            acc *= tl.load(scales)[:, None]
            if X_COLUMNS > 0:
                acc *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
        store_tile(out_ptr, acc, place, row, is_row, HEIGHT, UP)


@triton.jit
def rows_of_tile(  # noqa: ANN201
    order_ptr,
    tiles_ptr,
    num_tiles,
    size,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    UP: tl.constexpr,
):
    """Returns indices of a tile's rows and of their inputs, and which of the rows exist.

    Rows are indices in the order of the routing. Inputs are tokens if UP, or else the same rows.
    """
    within = tl.arange(0, TOKENS)
    is_row = within < size
    place = tl.load(tiles_ptr + num_tiles + tl.program_id(1)) + within
    source = place
    if UP:
        source = tl.load(order_ptr + place, mask=is_row, other=0) // TOP_K
    return place, source, is_row


@triton.jit
def store_tile(  # noqa: ANN201
    out_ptr, sums, place, row, is_row, HEIGHT: tl.constexpr, UP: tl.constexpr
):
    """Writes sums `[ROWS, TOKENS]` to the output. If UP, SwiGLU is applied to their halves."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + place.to(tl.int64)[:, None] * (HEIGHT // 2 if UP else HEIGHT)
    if UP:
        HALF: tl.constexpr = sums.shape[0] // 2
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, HALF, sums.shape[1])), (2, 1, 0))
        gate, up = tl.split(halves)  # [TOKENS, HALF] each
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tl.store(out + column[None, :], swiglu(gate, up), mask=is_row[:, None])
    else:
        tl.store(out + row[None, :], tl.trans(sums).to(dtype), mask=is_row[:, None])


@triton.jit
def _combine_kernel(
    outputs_ptr,
    places_ptr,
    weights_ptr,
    residual_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    wait_for_earlier(PDL)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + j).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        total += tl.load(outputs_ptr + place * WIDTH + column, mask=inside, other=0.0) * weight
    residual = residual_ptr + token * WIDTH + column
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    found = tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual, (found + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)
