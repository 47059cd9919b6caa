"""The experts of a few tokens, whose time is that of reading the experts' weights.

Each row, a token with one of its experts, is a GEMV of its own: few tokens seldom share an expert,
and what they share the L2 has. The first kernel computes gate and up and their activation; the
second the down projections of a token's experts, their weighted sum, and the addition to the
residual stream.

A kernel may normalise the residual stream itself, and find its experts itself by the router's
logits: each CTA does it again, which takes less time than a kernel that others wait for.

With `early` both read before they wait (`gdc_wait`) what the kernel before the last one has
written. They may: the kernel in between lets dependents start only after its own wait, so all that
came before it is complete and in the L2 when they start, and they read past the L1 (`.cg`), which
may hold older values. Whoever launches them must know that the kernel in between does so.

The plain twin is `services.decoder.kernels.plain.moe`; the rounding points are the same.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.common.nn.layers import RMSNorm
from services.decoder.kernels.gemv import normed
from services.decoder.kernels.moe_routing import Routing, Scores, choose_experts
from services.decoder.kernels.moe_weights import ExpertWeights, widen
from services.decoder.kernels.silu_mul import swiglu
from services.decoder.kernels.tuning import MoEGemvConfig


def experts(
    x: Tensor,
    routing: Routing | Scores,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    residual: Tensor,
    config: MoEGemvConfig,
    *,
    norm: RMSNorm | None = None,
    pure: bool = False,
    pdl: bool,
) -> None:
    """Adds the experts' weighted outputs to the residual stream, in place.

    Args:
        x: `[T, hidden]`; with `norm` it may be the residual stream.
        routing: of the tokens, or what they are routed by.
        gate_up: `[E, 2 * I, hidden]`.
        down: `[E, hidden, I]`.
        residual: `[T, hidden]`.
        config: of both kernels. If `early`, the kernel before these lets dependents start only
            after its own wait.
        norm: of x.
        pure: see `fp8_kernels.unpack`.
        pdl: see `DeviceFacts.supports_pdl`.
    """
    num_tokens, hidden = x.shape
    size = gate_up.num_rows // 2
    if isinstance(routing, Scores):
        top_k, normalize = routing.top_k, routing.normalize
        chosen = routing.logits, None, None
    else:
        top_k, normalize = routing.experts.shape[1], False
        chosen = None, routing.experts, routing.weights
    num_experts = len(gate_up.values)
    if isinstance(routing, Scores):
        num_experts = routing.logits.shape[-1]
    shared: dict[str, Any] = {
        "NUM_EXPERTS": num_experts, "EXPERTS": _padded(num_experts), "TOP_K": top_k,
        "ROUTE": isinstance(routing, Scores), "EARLY": config.early, "PURE": pure, "PDL": pdl,
        "launch_pdl": pdl,
    }  # fmt: skip
    inner = x.new_empty(num_tokens * top_k, size)
    up_rows, down_rows = math.gcd(config.up_rows, size), math.gcd(config.down_rows, hidden)
    up_units = math.gcd(config.up_units, size // up_rows)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _gate_up_kernel[(size // (up_rows * up_units), num_tokens * top_k)](
        x, weight, eps, *chosen[:2], gate_up.values, gate_up.scale, inner, WIDTH=hidden,
        HEIGHT=size, ROWS=up_rows, UNITS=up_units, COLUMNS=min(config.up_columns, _padded(hidden)),
        NORM=norm is not None, WARPS=config.up_warps, **gate_up.constants, **shared,
        num_warps=config.up_warps,
    )  # fmt: skip
    _down_kernel[(hidden // down_rows, num_tokens)](
        inner, *chosen, down.values, down.scale, residual, WIDTH=size, HEIGHT=hidden,
        PADDED_K=_padded(top_k), ROWS=down_rows, COLUMNS=min(config.down_columns, _padded(size)),
        NORMALIZE=normalize, WARPS=min(config.down_warps, _padded(top_k)), **down.constants,
        **shared, num_warps=config.down_warps,
    )  # fmt: skip


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


@triton.jit
def _gate_up_kernel(
    x_ptr, norm_ptr, eps, logits_ptr, experts_ptr, weight_ptr, scale_ptr, out_ptr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROUTE: tl.constexpr,
    EARLY: tl.constexpr, PURE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS * UNITS
    number = tl.program_id(1)  # of the token with one of its experts
    token = number // TOP_K
    x_row = x_ptr + token.to(tl.int64) * WIDTH
    if PDL and not EARLY:
        gdc_launch_dependents()
        gdc_wait()
    rms_scale = 1.0
    if NORM:
        squares = tl.zeros((COLUMNS,), tl.float32)
        for at in tl.static_range(0, WIDTH, COLUMNS):
            column = at + tl.arange(0, COLUMNS)
            x = _load(x_row + column, column < WIDTH, EARLY).to(tl.float32)
            squares += x * x
        rms_scale = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if ROUTE:
        # Each warp routes the token by itself: a row of the block is a warp's.
        index = tl.arange(0, EXPERTS)
        place = logits_ptr + token * NUM_EXPERTS + index[None, :] + tl.zeros((WARPS, 1), tl.int32)
        logits = tl.load(place, mask=index[None, :] < NUM_EXPERTS, other=0.0).to(tl.float32)
        _, slot = choose_experts(logits, index, NUM_EXPERTS, EXPERTS, TOP_K, False)
        found = tl.where(slot == number % TOP_K, index[None, :], 0)
        expert = tl.max(tl.max(found, axis=1), axis=0).to(tl.int64)
    else:
        expert = tl.load(experts_ptr + number).to(tl.int64)
    scales = expert * SCALE_ROWS * SCALE_COLUMNS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for unit in tl.static_range(UNITS):
        first = first_row + unit * ROWS
        row = first + tl.arange(0, ROWS)
        gates = weight_ptr + (expert * 2 * HEIGHT + row)[:, None] * WIDTH
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in tl.static_range(0, WIDTH, COLUMNS):
            column = at + tl.arange(0, COLUMNS)
            inside = column < WIDTH
            place = gates + column[None, :]
            gate_weight = tl.load(place, mask=inside[None, :], other=0.0)
            up_weight = tl.load(place + HEIGHT * WIDTH, mask=inside[None, :], other=0.0)
            x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
                x = normed(x, norm, rms_scale, dtype)
            gate_x, up_x = x, x
            if BLOCK_ROWS > 1:  # a unit's rows have one row of scales
                block = first // BLOCK_ROWS * SCALE_COLUMNS + column // 128
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
    x_ptr, logits_ptr, experts_ptr, weights_ptr, weight_ptr, scale_ptr, residual_ptr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, NORMALIZE: tl.constexpr, WARPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROUTE: tl.constexpr,
    EARLY: tl.constexpr, PURE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    # All rows of all of the token's experts are loaded at once, one expert after the other.
    index = tl.arange(0, PADDED_K * ROWS)
    place, row = index // ROWS, first + index % ROWS
    is_row = place < TOP_K
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    if PDL and not EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if ROUTE:
        # Each warp routes the token by itself, and looks for its share of the token's experts.
        scored = tl.arange(0, EXPERTS)
        warp = tl.arange(0, WARPS)[:, None]
        logits = _load(
            logits_ptr + token * NUM_EXPERTS + scored[None, :] + warp * 0,
            (scored < NUM_EXPERTS)[None, :], EARLY,
        ).to(tl.float32)  # fmt: skip
        shares, slot = choose_experts(logits, scored, NUM_EXPERTS, EXPERTS, TOP_K, NORMALIZE)
        wanted = warp * (PADDED_K // WARPS) + tl.arange(0, PADDED_K // WARPS)[None, :]
        is_wanted = slot[:, None, :] == wanted[:, :, None]
        expert = tl.sum(tl.where(is_wanted, scored[None, None, :], 0), axis=2)
        share = tl.sum(tl.where(is_wanted, shares[:, None, :], 0.0), axis=2)
        expert = tl.reshape(expert, (PADDED_K,))
        share = tl.reshape(share, (PADDED_K,)).to(dtype).to(tl.float32)
        expert = tl.reshape(tl.broadcast_to(expert[:, None], (PADDED_K, ROWS)), (PADDED_K * ROWS,))
        share = tl.reshape(tl.broadcast_to(share[:, None], (PADDED_K, ROWS)), (PADDED_K * ROWS,))
        expert = expert.to(tl.int64)
    else:
        expert = _load(experts_ptr + token * TOP_K + place, is_row, EARLY).to(tl.int64)
        share = _load(weights_ptr + token * TOP_K + place, is_row, EARLY)
    x_rows = x_ptr + (token * TOP_K + place).to(tl.int64)[:, None] * WIDTH
    weights = weight_ptr + (expert * HEIGHT + row)[:, None] * WIDTH
    column = tl.arange(0, COLUMNS)
    inside = is_row[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weights + column[None, :], mask=inside, other=0.0)
    if PDL and EARLY:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((PADDED_K * ROWS, COLUMNS), tl.float32)
    for at in tl.static_range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < WIDTH)[None, :]
        if at > 0:
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


@triton.jit
def _load(place, inside, EARLY: tl.constexpr):
    """What the kernel before the last one has written; EARLY: before the wait, past the L1."""
    if EARLY:
        return tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.load(place, mask=inside, other=0.0)
