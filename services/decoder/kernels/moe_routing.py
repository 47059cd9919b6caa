"""Which experts a step's tokens go to, and in which order the experts' kernels take the tokens.

A CTA per token finds its experts; then rows are sorted by expert, by counting. Nothing waits for
the host. The order is that of experts, then of tokens, so that no result depends on timing.

The plain twin of experts and weights is `services.decoder.kernels.plain.route`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.skinny_gemm import load_reduced

_ROWS, _MORE_ROWS = 128, 256  # that a CTA sorts: more where there are many
_MANY_ROWS = 16384
_FEW_CTAS = 4  # up to here each of them counts all rows


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
        tile: most rows of a tile; 0: no lists are wanted.
        pdl: see `DeviceFacts.supports_pdl`.
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
        ends=ints(num_experts),
        tiles=ints(3, max_tiles(rows, num_experts, max(1, tile))),
    )
    size = triton.next_power_of_2(num_experts)
    _route_kernel[(num_tokens,)](
        logits, routing.experts, routing.weights, num_experts, num_tokens * num_experts,
        EXPERTS=size, TOP_K=top_k, SPLITS=len(logits) if logits.dim() == 3 else 0,
        NORMALIZE=normalize, HALF=_half(dtype), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    if tile:
        held = _ROWS if rows <= _MANY_ROWS else _MORE_ROWS
        ctas = triton.cdiv(rows, held)
        counts = routing.ends  # not read
        if ctas > _FEW_CTAS:
            counts = ints(ctas, num_experts)
            _count_kernel[(ctas,)](
                routing.experts, counts, rows, num_experts, ROWS=held, EXPERTS=size, PDL=pdl,
                num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
        _sort_kernel[(ctas,)](
            routing.experts, counts, routing.order, routing.places, routing.ends, routing.tiles,
            rows, num_tokens, num_experts, routing.tiles.shape[1], ctas, ROWS=held, EXPERTS=size,
            TILE=tile, CTAS=16, COUNTED=ctas > _FEW_CTAS, PDL=pdl,
            num_warps=held // 16, launch_pdl=pdl,
        )  # fmt: skip
    return routing


def _half(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit(do_not_specialize=["stride"])
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, num_experts, stride, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, NORMALIZE: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = token * num_experts + expert
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


@triton.jit
def _counts(experts_ptr, first, num_rows, expert, ROWS: tl.constexpr):
    """`[EXPERTS]`: how many of ROWS rows from `first` on go to each expert."""
    row = first + tl.arange(0, ROWS)
    of_row = tl.load(experts_ptr + row, mask=row < num_rows, other=-1)
    return tl.sum((of_row[:, None] == expert[None, :]).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    experts_ptr, counts_ptr, num_rows, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = _counts(experts_ptr, number * ROWS, num_rows, expert, ROWS)
    tl.store(counts_ptr + number * num_experts + expert, counts, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "widest", "ctas"])
def _sort_kernel(
    experts_ptr, counts_ptr, order_ptr, places_ptr, ends_ptr, tiles_ptr, num_rows, num_tokens,
    num_experts, widest, ctas, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    CTAS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sorts by counting: a row's place is behind the rows of lower experts, and behind those of its
    own expert that come before it.
    """
    number = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    row = number * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # rows of earlier CTAs
    if COUNTED:
        for first in range(0, ctas, CTAS):
            cta = first + tl.arange(0, CTAS)
            inside = (cta < ctas)[:, None] & is_expert[None, :]
            of_ctas = counts_ptr + cta[:, None] * num_experts + expert[None, :]
            part = tl.load(of_ctas, mask=inside, other=0)
            counts += tl.sum(part, axis=0)
            before += tl.sum(tl.where((cta < number)[:, None], part, 0), axis=0)
    else:
        for cta in range(0, ctas):
            part = _counts(experts_ptr, cta * ROWS, num_rows, expert, ROWS)
            counts += part
            before += tl.where(cta < number, part, 0)
    ends = tl.cumsum(counts, axis=0)
    first = ends - counts
    of_row = tl.load(experts_ptr + row, mask=row < num_rows, other=-1)
    other = number * ROWS + tl.arange(0, ROWS)
    of_other = tl.load(experts_ptr + other, mask=other < num_rows, other=-1)
    earlier = (of_row[:, None] == of_other[None, :]) & (other[None, :] < row[:, None])
    start = tl.where(of_row[:, None] == expert[None, :], (first + before)[None, :], 0)
    place = tl.sum(start, axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + place, row, mask=row < num_rows)
    tl.store(places_ptr + row, place, mask=row < num_rows)
    of_expert = (counts + TILE - 1) // TILE
    last = tl.cumsum(of_expert, axis=0)
    for index in range(number, tl.cdiv(num_tokens, TILE), ctas):
        tile = tiles_ptr + last - of_expert + index
        size = tl.minimum(counts - index * TILE, TILE)
        tl.store(tile, expert, mask=size > 0)
        tl.store(tile + widest, first + index * TILE, mask=size > 0)
        tl.store(tile + 2 * widest, size, mask=size > 0)
    if number == 0:
        tl.store(ends_ptr + expert, ends, mask=is_expert)
        used = tl.sum(of_expert, axis=0)
        for at in range(0, widest, EXPERTS):
            tile = at + expert
            tl.store(tiles_ptr + 2 * widest + tile, 0, mask=(tile >= used) & (tile < widest))
