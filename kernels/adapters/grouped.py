"""Shrink and expand of `kernels.adapters.shrink_expand` for many tokens, in groups of one slot.

A group's tokens stand anywhere in the step, see `TokenGroups`. A CTA of shrink reads a part of the
inputs of a group once, and multiplies it by the factors `a` of all modules. A CTA of expand adds
the parts of the products, and goes through several tiles of rows, whose loads are in flight
together. The order of a token's sums depends on the number of tokens of the step
(`adapter_tuning.shrink_splits`), and not on which other tokens the step has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters import adapter_tuning as tuning
from kernels.adapters.factors import AdapterRows, SlotFactors, padded_rank
from kernels.adapters.token_groups import TokenGroups
from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.changes import MODULES
from kernels.gemm.module_tiles import part_of_module
from kernels.gemm.silu_mul import swiglu


def shrink(
    x: Tensor, factors: SlotFactors, rows: AdapterRows, *, shared_memory_bytes: int, pdl: int = 0
) -> Tensor:
    """Computes `shrink_adapters` of normalized inputs `[T, K]`, whose rows are contiguous."""
    (groups, pdl), config = _groups_and_mode(rows, pdl), tuning.SHRINK
    num_groups, size = groups.tokens.shape
    num_tokens, num_columns = x.shape
    _, modules, rank, _ = factors.a.shape
    blocks = triton.cdiv(num_columns, config.columns)
    span = triton.cdiv(blocks, min(tuning.shrink_splits(num_tokens), blocks)) * config.columns
    splits = triton.cdiv(num_columns, span)
    out = torch.empty(splits, num_tokens, modules, rank, dtype=torch.float32, device=x.device)
    height = modules * rank
    tile = min(64, padded_rank(height))
    _shrink_groups_kernel[splits, num_groups, triton.cdiv(height, tile)](
        x,
        factors.a,
        groups.tokens,
        groups.slots,
        out,
        num_tokens,
        num_columns,
        height,
        span,
        TOKENS=size,
        ROWS=tile,
        TILE=config.columns,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages(tile, shared_memory_bytes),
        launch_pdl=pdl > 0,
    )
    return out


def takes(base: Tensor, products: Tensor, factors: SlotFactors) -> bool:
    """Returns whether `expand` computes this step."""
    _, num_tokens, _, rank = products.shape
    is_plain = factors.factor is None and base.dim() == 2
    return num_tokens > tuning.FEW_TOKENS and rank <= tuning.MOST_RANK and is_plain


def expand(
    base: Tensor,
    out: Tensor,
    products: Tensor,
    factors: SlotFactors,
    rows: AdapterRows,
    *,
    is_swiglu: bool,
    shared_memory_bytes: int,
    consumer: SlotFactors | None = None,
    pdl: int = 0,
) -> Tensor:
    """Computes `expand_adapters`, or `expand_adapters_swiglu`, into `out`.

    Args:
        base: `[T, N]`, output of the base layer.
        out: result, which is `base` without SwiGLU.
        products: result of `shrink_adapters`.
        factors: factors of the layer.
        rows: adapters of the tokens.
        is_swiglu: True for `expand_adapters_swiglu`.
        shared_memory_bytes: largest shared memory of a CTA.
        consumer: factors of the layer that takes the result of SwiGLU. None to compute no products
            for it.
        pdl: mode of dependent launch.

    Returns:
        The products of the consumer. They have no element if there is none.
    """
    config = tuning.EXPAND_SWIGLU if is_swiglu else tuning.EXPAND
    config = config if consumer is None else tuning.EXPAND_SWIGLU_SHRINK
    groups, pdl = _groups_and_mode(rows, pdl)
    width = 0 if consumer is None else consumer.a.shape[2]
    num_groups, size = groups.tokens.shape
    splits, num_tokens, modules, rank = products.shape
    sizes = (*factors.sizes, *[0] * (MODULES - modules))
    part = config.rows * config.tiles
    parts = sum(triton.cdiv(each, part) for each in sizes[: 1 if is_swiglu else MODULES])
    stages = config.stages(rank, shared_memory_bytes, is_swiglu=is_swiglu, width=width)
    found = products.new_empty(parts, num_tokens, 1, width)
    _expand_groups_kernel[parts, num_groups](
        base,
        out,
        products,
        factors.b,
        groups.tokens,
        groups.slots,
        None if consumer is None else consumer.a,
        found,
        num_tokens,
        factors.b.stride(0),
        *sizes,
        modules,
        SPLITS=splits,
        RANK=rank,
        WIDTH=width,
        TOKENS=size,
        ROWS=config.rows,
        TILES=config.tiles,
        STAGES=stages,
        SWIGLU=is_swiglu,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
    )
    return found


def _groups_and_mode(rows: AdapterRows, pdl: int) -> tuple[TokenGroups, int]:
    """Returns the groups of the tokens, and the mode of dependent launch.

    The kernels read the groups before they wait. If the groups are only made now, the kernels are
    launched without dependent launch (mode 0), because the kernel that writes the groups is the one
    directly before, see `kernels.dependent_launch`.
    """
    return rows.token_groups, 0 if rows.groups is None else pdl


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_groups_kernel(
    x_ptr,
    a_ptr,
    tokens_ptr,
    slots_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    height,
    span,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile of rows of a slot's `a`, `[height, num_columns]`, for a group of tokens.

    A layer has K columns (`num_columns`) and M modules of a padded rank, which are `height` rows
    together. `x` is `[T, K]`, `a` is `[slots, height, K]`, `tokens` are `[G, TOKENS]` and `slots`
    `[G]` int32, see `TokenGroups`. The partial products `out` are `[splits, T, height]` float32. A
    split has `span` columns, a multiple of TILE.
    """
    split, group = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = split * span + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + group)
    token = tl.load(tokens_ptr + group * TOKENS + tl.arange(0, TOKENS))
    is_token, is_row = token >= 0, row < height
    weights = a_ptr + (slot.to(tl.int64) * height + row)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token.to(tl.int64)[:, None] * num_columns + column[None, :]
    # A CTA without tokens waits, too: the next kernel waits for this one alone.
    wait_for_earlier(PDL)
    if slot >= 0:
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
        for at in tl.range(0, span, TILE):
            inside = column + at < num_columns
            weight = tl.load(weights + at, mask=is_row[:, None] & inside[None, :], other=0.0)
            x = tl.load(inputs + at, mask=is_token[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(weight), acc)
        place = (split * num_tokens + token).to(tl.int64)[:, None] * height + row[None, :]
        tl.store(out_ptr + place, acc, mask=is_token[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens", "modules"])
def _expand_groups_kernel(
    base_ptr,
    out_ptr,
    products_ptr,
    b_ptr,
    tokens_ptr,
    slots_ptr,
    a_ptr,
    next_ptr,
    num_tokens,
    b_stride,
    size0,
    size1,
    size2,
    size3,
    modules,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes TILES tiles of rows of one module, or of gate and up, for a group of tokens.

    The tensors are those of `shrink_expand._expand_kernel`, with `base` `[T, N]`, and with `tokens`
    and `slots` of the groups, see `TokenGroups`.

    With SwiGLU, tokens without adapters have groups of their own, whose products are zeros. If
    WIDTH is not 0, it is the rank of the layer that takes the result, whose factors `a` are
    `[slots, WIDTH, size0]`. A CTA writes its part of their products, `[parts, T, WIDTH]`.
    """
    num_rows = size0 + size1 + size2 + size3
    part, group = tl.program_id(0), tl.program_id(1)
    first, size, start, module = part * (ROWS * TILES), size0, 0, 0
    if not SWIGLU:
        first, size, start, module = part_of_module(part, size0, size1, size2, size3, ROWS * TILES)
    slot = tl.load(slots_ptr + group)
    token = tl.load(tokens_ptr + group * TOKENS + tl.arange(0, TOKENS))
    is_token = token >= 0
    is_known = is_token & (slot >= 0)
    row = start + first + tl.arange(0, ROWS)
    at_base = token.to(tl.int64)[:, None] * num_rows + row[None, :]
    at_out = at_base
    if SWIGLU:
        at_out = token.to(tl.int64)[:, None] * size0 + row[None, :]
    at_b = row.to(tl.int64)[:, None] * b_stride + tl.maximum(slot, 0) * RANK
    at_b += tl.arange(0, RANK)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait_for_earlier(PDL)
    if slot >= (-1 if SWIGLU else 0):
        stride = num_tokens.to(tl.int64) * (modules * RANK)
        own = products_ptr + token.to(tl.int64) * (modules * RANK) + module * RANK
        x = _own_products(own, is_known, stride, SPLITS, RANK, dtype)
        up_x = x
        if SWIGLU:
            up_x = _own_products(own + RANK, is_known, stride, SPLITS, RANK, dtype)
        if WIDTH:
            height = tl.arange(0, WIDTH)
            at_a = (tl.maximum(slot, 0) * WIDTH + height).to(tl.int64)[:, None] * size0
            at_a += row[None, :]
            following = tl.zeros((TOKENS, WIDTH), tl.float32)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            at = tile * ROWS
            is_row = first + at + tl.arange(0, ROWS) < size
            inside = is_token[:, None] & is_row[None, :]
            base = tl.load(base_ptr + at_base + at, mask=inside, other=0.0)
            b = tl.load(b_ptr + at_b + at * b_stride, mask=is_row[:, None], other=0.0)
            found = tl.dot(x, tl.trans(b), base.to(tl.float32)).to(dtype)
            if SWIGLU:
                up = tl.load(base_ptr + at_base + size0 + at, mask=inside, other=0.0)
                up_b = b_ptr + at_b + (size0 + at).to(tl.int64) * b_stride
                b = tl.load(up_b, mask=is_row[:, None], other=0.0)
                found = swiglu(found, tl.dot(up_x, tl.trans(b), up.to(tl.float32)).to(dtype))
            tl.store(out_ptr + at_out + at, found, mask=inside)
            if WIDTH:
                a = tl.load(a_ptr + at_a + at, mask=is_row[None, :], other=0.0)
                following = tl.dot(found, tl.trans(a), following)
        if WIDTH:
            place = (part * num_tokens + token).to(tl.int64)[:, None] * WIDTH + height[None, :]
            tl.store(next_ptr + place, following, mask=is_token[:, None])


@triton.jit
def _own_products(
    own, known, stride, SPLITS: tl.constexpr, RANK: tl.constexpr, dtype: tl.constexpr
):
    """Returns the products `[TOKENS, RANK]` of each token's own slot."""
    places = own[:, None] + tl.arange(0, RANK)[None, :]
    total = tl.load(places, mask=known[:, None], other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(places + split * stride, mask=known[:, None], other=0.0)
    return total.to(dtype)
