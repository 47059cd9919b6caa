"""Experts for a few tokens, whose time is that of reading the experts' weights.

Each row, which is a token with one of its experts, is a GEMV. Few tokens rarely share an expert,
and if they do, its weights are in L2. The first kernel computes gate and up with SwiGLU. The second
kernel computes the down projections of a token's experts and adds their weighted sum to the
residual stream.

The reference implementation is `services.common.nn.experts.moe`, with the same rounding.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.experts.moe_routing import Routing
from kernels.experts.moe_weights import ExpertWeights, widen
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import MoEGemvConfig


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    residual: Tensor,
    config: MoEGemvConfig,
    *,
    pure: bool = False,
    pdl: int,
) -> None:
    """Adds the experts' weighted outputs to the residual stream in place.

    Args:
        x: hidden states `[T, hidden]`.
        routing: routing of the tokens.
        gate_up: matrices `[E, 2 * I, hidden]`.
        down: matrices `[E, hidden, I]`.
        residual: residual stream `[T, hidden]`.
        config: division of both kernels.
        pure: see `fp8_kernels.unpack`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tokens, hidden = x.shape
    top_k, size = routing.experts.shape[1], gate_up.rows // 2
    inner = x.new_empty(num_tokens * top_k, size)
    up_rows, down_rows = math.gcd(config.up_rows, size), math.gcd(config.down_rows, hidden)
    _gate_up_kernel[(size // up_rows, num_tokens * top_k)](
        x,
        gate_up.values,
        gate_up.scale,
        routing.experts,
        inner,
        WIDTH=hidden,
        HEIGHT=size,
        TOP_K=top_k,
        ROWS=up_rows,
        COLUMNS=min(config.up_columns, _padded(hidden)),
        **gate_up.constants,
        PURE=pure,
        PDL=pdl,
        num_warps=config.up_warps,
        launch_pdl=pdl > 0,
    )
    _down_kernel[(hidden // down_rows, num_tokens)](
        inner,
        down.values,
        down.scale,
        routing.experts,
        routing.weights,
        residual,
        WIDTH=size,
        HEIGHT=hidden,
        TOP_K=top_k,
        PADDED_K=_padded(top_k),
        ROWS=down_rows,
        COLUMNS=min(config.down_columns, _padded(size)),
        **down.constants,
        PURE=pure,
        PDL=pdl,
        num_warps=config.down_warps,
        launch_pdl=pdl > 0,
    )


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


@triton.jit
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    experts_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    PURE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(1)  # index of the row: a token with one of its experts
    wait_for_earlier(PDL)
    expert = tl.load(experts_ptr + number).to(tl.int64)
    x_row = x_ptr + number // TOP_K * WIDTH
    gates = weight_ptr + (expert * 2 * HEIGHT + row)[:, None] * WIDTH
    scales = expert * SCALE_ROWS * SCALE_COLUMNS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.static_range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        place = gates + column[None, :]
        gate_weight = tl.load(place, mask=inside[None, :], other=0.0)
        up_weight = tl.load(place + HEIGHT * WIDTH, mask=inside[None, :], other=0.0)
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        gate_x = x
        up_x = x
        if BLOCK_ROWS > 1:  # all rows of a CTA share a row of scales
            block = tl.program_id(0) * ROWS // BLOCK_ROWS * SCALE_COLUMNS + column // 128
            of_gate = scale_ptr + scales + block
            of_up = of_gate + HEIGHT // BLOCK_ROWS * SCALE_COLUMNS
            gate_x = x * tl.load(of_gate, mask=inside, other=0.0)
            up_x = x * tl.load(of_up, mask=inside, other=0.0)
        gate += widen(gate_weight, dtype, PACKED, PURE).to(tl.float32) * gate_x[None, :]
        up += widen(up_weight, dtype, PACKED, PURE).to(tl.float32) * up_x[None, :]
    gate_sum = tl.sum(gate, axis=1)
    up_sum = tl.sum(up, axis=1)
    if BLOCK_ROWS == 1:
        gate_sum *= tl.load(scale_ptr + scales + row)
        up_sum *= tl.load(scale_ptr + scales + HEIGHT + row)
    found = swiglu(gate_sum.to(dtype), up_sum.to(dtype))
    tl.store(out_ptr + number.to(tl.int64) * HEIGHT + row, found)


@triton.jit
def _down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    experts_ptr,
    weights_ptr,
    residual_ptr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    PURE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    # The index runs over the rows of all of the token's experts, one expert after the other.
    index = tl.arange(0, PADDED_K * ROWS)
    place, row = index // ROWS, first + index % ROWS
    is_row = place < TOP_K
    wait_for_earlier(PDL)
    expert = tl.load(experts_ptr + token * TOP_K + place, mask=is_row, other=0).to(tl.int64)
    share = tl.load(weights_ptr + token * TOP_K + place, mask=is_row, other=0.0)
    x_rows = x_ptr + (token * TOP_K + place).to(tl.int64)[:, None] * WIDTH
    weights = weight_ptr + (expert * HEIGHT + row)[:, None] * WIDTH
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    acc = tl.zeros((PADDED_K * ROWS, COLUMNS), tl.float32)
    for at in tl.static_range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < WIDTH)[None, :]
        weight = tl.load(weights + column[None, :], mask=inside, other=0.0)
        x = tl.load(x_rows + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if BLOCK_ROWS > 1:
            of_row = expert * SCALE_ROWS * SCALE_COLUMNS + row // BLOCK_ROWS * SCALE_COLUMNS
            of_block = scale_ptr + of_row[:, None] + (column // 128)[None, :]
            x *= tl.load(of_block, mask=inside, other=0.0)
        acc += widen(weight, dtype, PACKED, PURE).to(tl.float32) * x
    found = tl.sum(acc, axis=1)
    if BLOCK_ROWS == 1:
        found *= tl.load(scale_ptr + expert * SCALE_ROWS + row, mask=is_row, other=0.0)
    found = tl.where(is_row, found.to(dtype).to(tl.float32) * share, 0.0)
    total = tl.sum(tl.reshape(found, (PADDED_K, ROWS)), axis=0).to(dtype)
    residual = residual_ptr + token.to(tl.int64) * HEIGHT + first + tl.arange(0, ROWS)
    tl.store(residual, (tl.load(residual).to(tl.float32) + total.to(tl.float32)).to(dtype))
