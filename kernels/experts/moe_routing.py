"""Which experts a step's tokens go to, and in which order the experts' kernels take the tokens.

A CTA per token finds its experts; then a CTA per expert finds its tokens, and the last one of them
to finish lists the tiles. Nothing waits for the host. The order is that of experts, then of tokens,
so that no result depends on timing.

The plain twin of experts and weights is `kernels.plain.route`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced

_SORTED_TOKENS = 1024  # that a CTA holds at once


@dataclass(frozen=True, slots=True)
class Routing:
    """T tokens of k experts each, T * k rows.

    Attributes:
        experts: `[T, k]` int32, ascending.
        weights: `[T, k]` float32, rounded to the model's dtype.
        order: `[T * k]` int32: the rows `token * k + j`, sorted by expert.
        places: `[T * k]` int32: where each row is in `order`.
        tiles: `[3, n]` int32: expert, first place and number of rows of each tile of one expert's
            rows; the tiles behind the last one have no rows.

    The last three are not filled if `route` was asked for no tiles.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    places: Tensor
    tiles: Tensor


def max_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """The most tiles of up to `tile` rows that experts can need together."""
    return min(num_rows, num_experts + num_rows // tile)


def route(
    logits: Tensor, top_k: int, *, normalize: bool, dtype: torch.dtype, tile: int, pdl: int = 0
) -> Routing:
    """The routing of a step.

    Args:
        logits: `[T, E]`, or split-K partials of them; they are rounded to `dtype` first.
        top_k: experts per token.
        normalize: scale a token's weights to a sum of 1.
        dtype: the model's.
        tile: most rows of a tile; 0: no lists are wanted.
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
    counts = ints(num_experts + 1)  # and how many experts are counted
    _route_kernel[(num_tokens,)](
        logits, routing.experts, routing.weights, counts, num_experts, num_tokens,
        EXPERTS=size, TOP_K=top_k, SPLITS=len(logits) if logits.dim() == 3 else 0,
        NORMALIZE=normalize, HALF=_half(dtype), PDL=pdl, num_warps=1, launch_pdl=pdl > 0,
    )  # fmt: skip
    if tile:
        _sort_kernel[(num_experts,)](
            routing.experts, counts, routing.order, routing.places, routing.tiles, num_tokens,
            routing.tiles.shape[1], TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            TOKENS=min(triton.next_power_of_2(num_tokens), _SORTED_TOKENS), EXPERTS=size,
            TILE=tile, PDL=pdl, num_warps=4, launch_pdl=pdl > 0,
        )  # fmt: skip
    return routing


def _half(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, counts_ptr, num_experts, num_tokens,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, NORMALIZE: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    wait_for_earlier(PDL)
    place, stride = token * num_experts + expert, num_tokens * num_experts
    logits = load_reduced(logits_ptr, place, inside, stride, SPLITS, HALF).to(tl.float32)
    logits = tl.where(inside, logits, float("-inf"))
    share = tl.exp(logits - tl.max(logits, axis=0))
    share = share / tl.sum(share, axis=0)
    # Probabilities are not negative, so that their bits are in their order, and a value that is not
    # a number is above all; of equal ones the lowest expert is above. An integer's maximum is one
    # instruction per warp.
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
        tl.store(counts_ptr + num_experts, 0)  # for the sort


@triton.jit(do_not_specialize=["num_tokens", "widest"])
def _sort_kernel(
    experts_ptr, counts_ptr, order_ptr, places_ptr, tiles_ptr, num_tokens, widest,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows of one expert: their places are behind all rows of lower experts."""
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
        is_here = (of_rows == expert).to(tl.int32)  # once in a token at most
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
    experts_ptr, first, num_tokens, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """`[TOKENS, PADDED_K]`: the experts of tokens from `first` on; none are above all others."""
    token, column = first + tl.arange(0, TOKENS)[:, None], tl.arange(0, PADDED_K)[None, :]
    inside = (token < num_tokens) & (column < TOP_K)
    return tl.load(experts_ptr + token * TOP_K + column, mask=inside, other=1 << 30)


@triton.jit
def _list_tiles(
    counts_ptr, tiles_ptr, num_experts, widest, EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.arange(0, EXPERTS)
    # Past L1, which is not coherent between SMs.
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
