"""Which experts a step's tokens go to, and in which order the experts' kernels take the tokens.

Softmax, top-k, the weights, and a sort by expert, by one kernel for few tokens and by two for many;
nothing waits for the host. The order is that of experts, then of tokens, so that no result depends
on timing.

The plain twin of experts and weights is `services.decoder.kernels.plain.route`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.skinny_gemm import load_reduced

_ELEMENTS = 8192  # probabilities that a CTA holds at most, unless there is one CTA
_MOST_TOKENS = 64  # of one CTA
_CTAS = 128  # for many tokens, about


@dataclass(frozen=True, slots=True)
class Routing:
    """T tokens of k experts each, T * k rows.

    Attributes:
        experts: `[T, k]` int32, ascending.
        weights: `[T, k]` float32, rounded to the model's dtype.
        order: `[T * k]` int32: the rows `token * k + j`, sorted by expert.
        places: `[T * k]` int32: where each row is in `order`.
        ends: `[E]` int32: where each expert's rows end in `order`.
        tiles: `[3, n]` int32: expert, first place and number of rows of each tile of one expert's
            rows; the tiles behind the last one have no rows.

    The last four are not filled if `route` was asked for no tiles.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    places: Tensor
    ends: Tensor
    tiles: Tensor


def max_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """The most tiles of up to `tile` rows that experts can need together."""
    return min(num_rows, num_experts + num_rows // tile)


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    dtype: torch.dtype,
    tile: int,
    pdl: bool = False,
) -> Routing:
    """The routing of a step.

    Args:
        logits: `[T, E]`, or split-K partials of them; they are rounded to `dtype` first.
        top_k: experts per token.
        normalize: scale a token's weights to a sum of 1.
        dtype: the model's.
        tile: most rows of a tile; 0: no lists are wanted, for up to 64 tokens.
        pdl: see `DeviceFacts.supports_pdl`.
    """
    num_tokens, num_experts = logits.shape[-2:]
    size = triton.next_power_of_2(num_experts)
    most = min(_MOST_TOKENS, max(1, 2 * _ELEMENTS // size))
    is_one = num_tokens <= most
    held = triton.next_power_of_2(num_tokens if is_one else triton.cdiv(num_tokens, _CTAS))
    if not is_one:
        held = max(4, min(held, _ELEMENTS // size))
    ctas, rows = triton.cdiv(num_tokens, held), num_tokens * top_k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    routing = Routing(
        experts=ints(num_tokens, top_k),
        weights=torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device),
        order=ints(rows),
        places=ints(rows),
        ends=ints(num_experts),
        tiles=ints(3, max_tiles(rows, num_experts, max(1, tile))),
    )
    assert is_one or tile > 0
    counts = routing.ends if is_one else ints(ctas, num_experts)
    warps = min(16, max(1, held * size // 1024))
    lists = routing.order, routing.places, routing.ends, routing.tiles
    constants = {
        "TOKENS": held, "EXPERTS": size, "TOP_K": top_k, "TILE": tile, "PDL": pdl,
        "num_warps": warps, "launch_pdl": pdl,
    }  # fmt: skip
    widest = routing.tiles.shape[1]
    _route_kernel[(ctas,)](
        logits, routing.experts, routing.weights, counts, *lists, num_tokens, num_experts, widest,
        num_tokens * num_experts, SPLITS=len(logits) if logits.dim() == 3 else 0,
        NORMALIZE=normalize, ONE=is_one, HALF=_half(dtype), **constants,
    )  # fmt: skip
    if not is_one:
        _sort_kernel[(ctas,)](
            routing.experts, counts, *lists, num_tokens, num_experts, widest, ctas,
            CTAS=32, **constants,
        )  # fmt: skip
    return routing


def _half(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "widest", "stride"])
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, counts_ptr, order_ptr, places_ptr, ends_ptr, tiles_ptr,
    num_tokens, num_experts, widest, stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, NORMALIZE: tl.constexpr, ONE: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_expert, is_token = expert < num_experts, token < num_tokens
    inside = is_token[:, None] & is_expert[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = token[:, None] * num_experts + expert[None, :]
    logits = load_reduced(logits_ptr, place, inside, stride, SPLITS, HALF).to(tl.float32)
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    found = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    found = found / tl.sum(found, axis=1)[:, None]
    # Probabilities are not negative, so that their bits are in their order, and a value that is not
    # a number is above all; of equal ones the lowest expert is above.
    bits = found.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keys = (bits.to(tl.int64) << 32) | (EXPERTS - 1 - expert)[None, :].to(tl.int64)
    keys = tl.where(is_expert[None, :], keys, -1)
    chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for _ in tl.static_range(TOP_K):
        best = keys == tl.max(keys, axis=1)[:, None]
        chosen = tl.where(best, 1, chosen)
        keys = tl.where(best, -1, keys)
    if NORMALIZE:
        found = found / tl.sum(tl.where(chosen > 0, found, 0.0), axis=1)[:, None]
    chosen = tl.where(inside, chosen, 0)
    row = token[:, None] * TOP_K + tl.cumsum(chosen, axis=1) - 1
    ids = tl.broadcast_to(expert[None, :], (TOKENS, EXPERTS))
    tl.store(experts_ptr + row, ids, mask=chosen > 0)
    tl.store(weights_ptr + row, found.to(HALF).to(tl.float32), mask=chosen > 0)
    counts = tl.sum(chosen, axis=0)
    if ONE and TILE > 0:
        _list(
            chosen, row, counts, counts * 0, order_ptr, places_ptr, ends_ptr, tiles_ptr, expert,
            is_expert, num_tokens, widest, TILE,
        )  # fmt: skip
    elif not ONE:
        tl.store(counts_ptr + tl.program_id(0) * num_experts + expert, counts, mask=is_expert)


@triton.jit(do_not_specialize=["num_tokens", "widest", "ctas"])
def _sort_kernel(
    experts_ptr, counts_ptr, order_ptr, places_ptr, ends_ptr, tiles_ptr,
    num_tokens, num_experts, widest, ctas,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
    CTAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    token = number * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_expert, is_token = expert < num_experts, token < num_tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for j in tl.static_range(TOP_K):
        of_token = tl.load(experts_ptr + token * TOP_K + j, mask=is_token, other=-1)
        chosen += (of_token[:, None] == expert[None, :]).to(tl.int32)
    row = token[:, None] * TOP_K + tl.cumsum(chosen, axis=1) - 1
    counts = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # rows of the tokens of other CTAs
    for first in range(0, ctas, CTAS):
        cta = first + tl.arange(0, CTAS)
        inside = (cta < ctas)[:, None] & is_expert[None, :]
        of_ctas = counts_ptr + cta[:, None] * num_experts + expert[None, :]
        part = tl.load(of_ctas, mask=inside, other=0)
        counts += tl.sum(part, axis=0)
        before += tl.sum(tl.where((cta < number)[:, None], part, 0), axis=0)
    _list(
        chosen, row, counts, before, order_ptr, places_ptr, ends_ptr, tiles_ptr, expert,
        is_expert, num_tokens, widest, TILE,
    )  # fmt: skip


@triton.jit
def _list(
    chosen, row, counts, before, order_ptr, places_ptr, ends_ptr, tiles_ptr, expert, is_expert,
    num_tokens, widest, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the sorted rows of a CTA's tokens; the first CTA writes the experts' ends and tiles.

    Args:
        chosen: `[T, E]` 1 where a token goes to an expert, else 0.
        row: the number of the token's row for the expert.
        counts: rows of each expert.
        before: those of other CTAs' tokens, which come first.
    """
    ends = tl.cumsum(counts, axis=0)
    first = ends - counts
    place = (first + before)[None, :] + tl.cumsum(chosen, axis=0) - 1
    tl.store(order_ptr + place, row, mask=chosen > 0)
    tl.store(places_ptr + row, place, mask=chosen > 0)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + expert, ends, mask=is_expert)
        of_expert = (counts + TILE - 1) // TILE
        last = tl.cumsum(of_expert, axis=0)
        for index in range(0, tl.cdiv(num_tokens, TILE)):
            tile = last - of_expert + index
            is_tile = index < of_expert
            tl.store(tiles_ptr + tile, expert, mask=is_tile)
            tl.store(tiles_ptr + widest + tile, first + index * TILE, mask=is_tile)
            size = tl.minimum(counts - index * TILE, TILE)
            tl.store(tiles_ptr + 2 * widest + tile, size, mask=is_tile)
        used = tl.sum(of_expert, axis=0)
        for at in range(0, widest, expert.shape[0]):
            tile = at + expert
            none = (tile >= used) & (tile < widest)
            tl.store(tiles_ptr + 2 * widest + tile, 0, mask=none)
