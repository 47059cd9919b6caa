"""Chooses the experts of a step's tokens, and sorts the tokens by expert for the GEMMs.

A CTA per token chooses its experts. Then a CTA per expert finds its tokens, and the last of these
CTAs to finish lists the tiles. Nothing waits for the host. Rows are sorted by expert and then by
token, so that results do not depend on timing.

The reference implementation of experts and weights is `kernels.plain.route`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced

_SORTED_TOKENS = 1024  # tokens that a CTA has at the same time


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of T tokens. Each token has k experts, so there are T * k rows.

    `order`, `places` and `tiles` are undefined if `route` was called with a tile size of 0.

    Attributes:
        experts: `[T, k]` int32, ascending.
        weights: `[T, k]` float32, rounded to the model's dtype.
        order: `[T * k]` int32, rows `token * k + j`, sorted by expert.
        places: `[T * k]` int32, index of each row in `order`.
        tiles: `[3, n]` int32, with expert, first index in `order` and number of rows of each tile.
            A tile has rows of one expert. Unused tiles at the end have 0 rows.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    places: Tensor
    tiles: Tensor


def max_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """Largest number of tiles of up to `tile` rows that all experts can need together."""
    return min(num_rows, num_experts + num_rows // tile)


def route(
    logits: Tensor, top_k: int, *, normalize: bool, dtype: torch.dtype, tile: int, pdl: int = 0
) -> Routing:
    """Computes the routing of a step.

    Args:
        logits: logits of the router `[T, E]`, or split-K partials of these, which are rounded to
            `dtype` first.
        top_k: number of experts per token.
        normalize: True if a token's weights are scaled to a sum of 1.
        dtype: data type of the model.
        tile: largest number of rows of a tile. 0 if rows are not sorted.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tokens, num_experts = logits.shape[-2:]
    rows = num_tokens * top_k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    routing = Routing(
        experts=ints(num_tokens, top_k),
        weights=torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device),
        order=ints(rows),
        places=ints(rows),
        tiles=ints(3, max_tiles(rows, num_experts, max(1, tile))),
    )
    size = triton.next_power_of_2(num_experts)
    counts = ints(num_experts + 1)  # the last element counts the experts that are done
    _route_kernel[(num_tokens,)](
        logits,
        routing.experts,
        routing.weights,
        counts,
        num_experts,
        num_tokens,
        EXPERTS=size,
        TOP_K=top_k,
        SPLITS=len(logits) if logits.dim() == 3 else 0,
        NORMALIZE=normalize,
        HALF=_half(dtype),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl > 0,
    )
    if tile:
        _sort_kernel[(num_experts,)](
            routing.experts,
            counts,
            routing.order,
            routing.places,
            routing.tiles,
            num_tokens,
            routing.tiles.shape[1],
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            TOKENS=min(triton.next_power_of_2(num_tokens), _SORTED_TOKENS),
            EXPERTS=size,
            TILE=tile,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl > 0,
        )
    return routing


def _half(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    counts_ptr,
    num_experts,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    wait_for_earlier(PDL)
    place, stride = token * num_experts + expert, num_tokens * num_experts
    logits = load_reduced(logits_ptr, place, inside, stride, SPLITS, HALF).to(tl.float32)
    logits = tl.where(inside, logits, float("-inf"))
    share = tl.exp(logits - tl.max(logits, axis=0))
    share = share / tl.sum(share, axis=0)
    # Probabilities are not negative, so their bits have the same order as integers, with NaN above
    # all numbers. Of equal probabilities, the lowest expert is chosen. The maximum of integers is
    # one instruction per warp.
    keys = tl.where(inside, share.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    chosen = tl.zeros((EXPERTS,), tl.int32)
    for _ in tl.static_range(TOP_K):
        lowest = tl.min(tl.where(keys == tl.max(keys, axis=0), expert, EXPERTS), axis=0)
        chosen = tl.where(expert == lowest, 1, chosen)
        keys = tl.where(expert == lowest, -1, keys)
    if NORMALIZE:
        share = share / tl.sum(tl.where(chosen > 0, share, 0.0), axis=0)
    row = token * TOP_K + tl.cumsum(chosen, axis=0) - 1
    tl.store(experts_ptr + row, expert, mask=chosen > 0)
    tl.store(weights_ptr + row, share.to(HALF).to(tl.float32), mask=chosen > 0)
    if token == 0:
        tl.store(counts_ptr + num_experts, 0)  # initialized for `_sort_kernel`


@triton.jit(do_not_specialize=["num_tokens", "widest"])
def _sort_kernel(
    experts_ptr,
    counts_ptr,
    order_ptr,
    places_ptr,
    tiles_ptr,
    num_tokens,
    widest,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sorts the rows of one expert, which follow all rows of experts with a lower index."""
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    wait_for_earlier(PDL)
    first, count = 0, 0
    for at in range(0, num_tokens, TOKENS):
        of_rows = _experts_of(experts_ptr, at, num_tokens, TOP_K, PADDED_K, TOKENS)
        first += tl.sum((of_rows < expert).to(tl.int32))
        count += tl.sum((of_rows == expert).to(tl.int32))
    tl.store(counts_ptr + expert, count, cache_modifier=".cg")
    place = first
    for at in range(0, num_tokens, TOKENS):
        of_rows = _experts_of(experts_ptr, at, num_tokens, TOP_K, PADDED_K, TOKENS)
        is_here = (of_rows == expert).to(tl.int32)  # a token has an expert at most once
        has = tl.sum(is_here, axis=1)
        column = tl.sum(is_here * tl.arange(0, PADDED_K)[None, :], axis=1)
        row = (at + tl.arange(0, TOKENS)) * TOP_K + column
        places = place + tl.cumsum(has, axis=0) - 1
        tl.store(order_ptr + places, row, mask=has > 0)
        tl.store(places_ptr + row, places, mask=has > 0)
        place += tl.sum(has, axis=0)
    tl.debug_barrier()
    if tl.atomic_add(counts_ptr + num_experts, 1, sem="acq_rel") == num_experts - 1:
        tl.debug_barrier()
        _list_tiles(counts_ptr, tiles_ptr, num_experts, widest, EXPERTS, TILE)


@triton.jit
def _experts_of(
    experts_ptr,
    first,
    num_tokens,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Loads the experts of tokens from `first` on, `[TOKENS, PADDED_K]`.

    Padding has a number above all experts.
    """
    token, column = first + tl.arange(0, TOKENS)[:, None], tl.arange(0, PADDED_K)[None, :]
    inside = (token < num_tokens) & (column < TOP_K)
    return tl.load(experts_ptr + token * TOP_K + column, mask=inside, other=1 << 30)


@triton.jit
def _list_tiles(
    counts_ptr, tiles_ptr, num_experts, widest, EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.arange(0, EXPERTS)
    # `.cg` bypasses L1, which is not coherent between SMs.
    counts = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0, cache_modifier=".cg")
    first = tl.cumsum(counts, axis=0) - counts
    of_expert = (counts + TILE - 1) // TILE
    last = tl.cumsum(of_expert, axis=0)
    for index in range(0, tl.max(of_expert, axis=0)):
        tile = tiles_ptr + last - of_expert + index
        size = tl.minimum(counts - index * TILE, TILE)
        tl.store(tile, expert, mask=size > 0)
        tl.store(tile + widest, first + index * TILE, mask=size > 0)
        tl.store(tile + 2 * widest, size, mask=size > 0)
    used = tl.sum(of_expert, axis=0)
    for at in range(0, widest, EXPERTS):
        tile = at + expert
        tl.store(tiles_ptr + 2 * widest + tile, 0, mask=(tile >= used) & (tile < widest))
