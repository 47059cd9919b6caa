"""Adds the changes of adapters to a linear layer's output, in two launches for all slots.

The first kernel, *shrink*, multiplies each token by the factor `a` of its own slot. It runs before
the base layer's GEMM. The second, *expand*, multiplies the product by `b` and adds it to the output
of the GEMM. The launches depend neither on the number of adapters nor on which token has which, so
that a CUDA graph serves any adapters.

Which kernel computes the change depends on the number of tokens of the step:

- One token: the GEMV of the layer itself, see `kernels.gemm.gemv`.
- 2 to 64 tokens: the skinny GEMM of the layer itself, see `kernels.gemm.skinny_changes`.
- More tokens: shrink and expand of `kernels.adapters.grouped`, whose tiles of tokens have one slot.
  The expand of gate and up also applies SwiGLU and does the shrink of the down projection.
- The kernels of this file compute the rest: up to 64 tokens of quantized layers, and DoRA and
  ranks of more than 64 for any number of tokens. A CTA has a tile of tokens and finds out on the
  device which slots occur in it. CTAs without such a token do nothing.

Few tokens leave most SMs idle during shrink, so its columns are split among CTAs, each of which
writes a partial product. Expand adds the partial products, and loads `b` before it waits for them.

A variant of a kernel takes up to a second to compile, so constants depend on classes of token
counts, on the rank and on the number of slots, but neither on the sizes of a layer nor on the slots
that occur in a step. A model needs about 18 variants, all of which run during warm-up.

The reference implementations are in `kernels.adapters.plain`. Here, the change is added before the
output is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters import grouped
from kernels.adapters.adapter_tuning import FEW_TOKENS, MOST_RANK
from kernels.adapters.factors import AdapterRows, Norm, SlotFactors
from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.add_norm import rms_norm
from kernels.gemm.changes import LEAST_RANK, MODULES
from kernels.gemm.factor_columns import load_factors, used_columns
from kernels.gemm.gemv import normed
from kernels.gemm.module_tiles import rows_of_tile
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_gemm import load_reduced

_SHRINK_COLUMNS = 128  # columns of a pipeline stage of shrink
_SPLITS = 8  # parts of the columns of shrink, each of which costs expand a pass over the products
_CHUNK = 256  # columns of `b`, of all slots together, that expand multiplies at the same time
_MANY_CHUNK = 64  # the same for many tokens with a large rank or DoRA


def expand_adapters(
    out: Tensor,
    products: Tensor,
    factors: SlotFactors,
    rows: AdapterRows,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
) -> Tensor:
    """Implements `plain.expand_adapters` in place. Adds to the first of split-K partials."""
    _expand(out, out, products, factors, rows, shared_memory_bytes, pdl, is_swiglu=False)
    return out


def expand_adapters_swiglu(
    out: Tensor,
    products: Tensor,
    factors: SlotFactors,
    rows: AdapterRows,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
) -> Tensor:
    """Implements `plain.expand_adapters_swiglu`."""
    found = factors.b.new_empty(out.shape[-2], out.shape[-1] // 2)
    _expand(out, found, products, factors, rows, shared_memory_bytes, pdl, is_swiglu=True)
    return found


def expand_swiglu_shrink(
    out: Tensor,
    products: Tensor,
    factors: SlotFactors,
    consumer: SlotFactors,
    rows: AdapterRows,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
) -> tuple[Tensor, Tensor] | None:
    """Implements `plain.expand_swiglu_shrink`, with partial products in float32.

    Returns None if the kernel for many tokens does not compute this step.
    """
    _, modules, width, _ = consumer.a.shape
    if not grouped.takes(out, products, factors) or modules > 1 or width > MOST_RANK:
        return None
    found = factors.b.new_empty(out.shape[-2], out.shape[-1] // 2)
    next_products = grouped.expand(
        out,
        found,
        products,
        factors,
        rows,
        is_swiglu=True,
        shared_memory_bytes=shared_memory_bytes,
        consumer=consumer,
        pdl=pdl,
    )
    return found, next_products


def shrink_adapters(
    x: Tensor,
    norm: Norm | None,
    factors: SlotFactors,
    rows: AdapterRows,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
) -> Tensor:
    """Implements `plain.shrink_adapters`, with partial products in float32.

    The kernel normalizes a single token itself, because a separate norm would add a launch.
    """
    if norm is not None and len(x) > 1:
        x, norm = rms_norm(x, norm.weight, norm.eps, pdl=pdl), None
    x = x.contiguous()
    num_tokens, num_columns = x.shape
    if num_tokens > FEW_TOKENS:
        room = shared_memory_bytes
        return grouped.shrink(x, factors, rows, shared_memory_bytes=room, pdl=pdl)
    _, modules, rank, _ = factors.a.shape
    height = modules * rank
    splits = min(_SPLITS, triton.cdiv(num_columns, _SHRINK_COLUMNS))
    span = triton.cdiv(triton.cdiv(num_columns, splits), _SHRINK_COLUMNS) * _SHRINK_COLUMNS
    splits = triton.cdiv(num_columns, span)
    out = torch.empty(splits, num_tokens, modules, rank, dtype=torch.float32, device=x.device)
    tokens, tile = _tile_of_tokens(num_tokens), LEAST_RANK
    tiles = triton.cdiv(height, tile)
    _shrink_kernel[(rows.last - rows.first) * tiles, triton.cdiv(num_tokens, tokens), splits](
        x,
        factors.a,
        rows.slots,
        out,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        num_tokens,
        rows.first,
        num_columns,
        height,
        span,
        TOKENS=tokens,
        ROWS=tile,
        TILE=_SHRINK_COLUMNS,
        WIDTH=triton.next_power_of_2(num_columns) if norm is not None else 0,
        PDL=pdl,
        num_warps=4,
        num_stages=4,
        launch_pdl=pdl > 0,
    )
    return out


def _tile_of_tokens(num_tokens: int) -> int:
    return 16 if num_tokens <= 16 else FEW_TOKENS


def _expand(
    base: Tensor,
    out: Tensor,
    products: Tensor,
    factors: SlotFactors,
    rows: AdapterRows,
    shared_memory_bytes: int,
    pdl: int,
    *,
    is_swiglu: bool,
) -> None:
    splits, num_tokens, modules, rank = products.shape
    assert modules <= MODULES, f"{modules} modules"
    tokens = _tile_of_tokens(num_tokens)
    is_few = num_tokens <= FEW_TOKENS
    if grouped.takes(base, products, factors):
        grouped.expand(
            base,
            out,
            products,
            factors,
            rows,
            is_swiglu=is_swiglu,
            shared_memory_bytes=shared_memory_bytes,
            pdl=pdl,
        )
        return
    tile = 64 if is_few else 128
    if is_swiglu:
        tile //= 2  # of gate, and as many of up
        if is_few:  # several CTAs fit an SM, whose registers would hold one with 64 tokens
            tokens = LEAST_RANK
    is_scaled = factors.factor is not None
    sizes = (*factors.sizes, *[0] * (MODULES - modules))
    tiles = sum(triton.cdiv(size, tile) for size in sizes[: 1 if is_swiglu else MODULES])
    # The range of a step's slots is no constant: a step must not wait for a compilation.
    width = rows.count * rank
    most = _MANY_CHUNK if not is_few else _CHUNK if tokens < FEW_TOKENS else _CHUNK // 2
    chunk = min(most, triton.next_power_of_2(width))
    _expand_kernel[tiles, triton.cdiv(num_tokens, tokens)](
        base,
        out,
        products,
        factors.b,
        rows.slots,
        factors.factor,
        factors.bias,
        num_tokens,
        rows.first,
        rows.last,
        factors.b.stride(0),
        *sizes,
        modules,
        # Without SwiGLU and DoRA, the other partials of the base layer's output are not read.
        BASE_SPLITS=len(base) if base.dim() == 3 and (is_swiglu or is_scaled) else 0,
        SPLITS=splits,
        RANK=rank,
        TOKENS=tokens,
        ROWS=tile,
        CHUNK=chunk,
        ALONE=width <= chunk,
        SWIGLU=is_swiglu,
        DORA=is_scaled,
        BIAS=factors.bias is not None,
        PDL=pdl,
        num_warps=8 if tokens == FEW_TOKENS else 4,
        launch_pdl=pdl > 0,
    )


@triton.jit(do_not_specialize=["num_tokens", "first_slot"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    slots_ptr,
    out_ptr,
    norm_ptr,
    eps,
    num_tokens,
    first_slot,
    num_columns,
    height,
    span,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile of rows of a slot's `a`, `[height, num_columns]`, for a tile of tokens.

    WIDTH is 0 if the kernel does not normalize its input.
    """
    tiles = (height + ROWS - 1) // ROWS
    slot = first_slot + tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    is_row = row < height
    own = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    column = split * span + tl.arange(0, TILE)
    weights = a_ptr + (slot.to(tl.int64) * height + row)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token.to(tl.int64)[:, None] * num_columns + column[None, :]
    # A CTA without tokens waits, too: the next kernel waits for this one alone.
    wait_for_earlier(PDL)
    if tl.max(own.to(tl.int32), 0) > 0:
        scale = 1.0
        if WIDTH:
            each = tl.arange(0, WIDTH)
            values = tl.load(x_ptr + each, mask=each < num_columns, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values) / num_columns + eps)
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
        for at in tl.range(0, span, TILE):
            inside = column + at < num_columns
            weight = tl.load(weights + at, mask=is_row[:, None] & inside[None, :], other=0.0)
            x = tl.load(inputs + at, mask=own[:, None] & inside[None, :], other=0.0)
            if WIDTH:
                norm = tl.load(norm_ptr + column + at, mask=inside, other=0.0)
                x = normed(x.to(tl.float32), norm[None, :], scale, weight.dtype)
                x = x.to(weight.dtype)
            acc = tl.dot(x, tl.trans(weight), acc)
        place = (split * num_tokens + token).to(tl.int64)[:, None] * height + row[None, :]
        tl.store(out_ptr + place, acc, mask=own[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_slot", "last_slot", "modules"])
def _expand_kernel(
    base_ptr,
    out_ptr,
    products_ptr,
    b_ptr,
    slots_ptr,
    factor_ptr,
    bias_ptr,
    num_tokens,
    first_slot,
    last_slot,
    b_stride,
    size0,
    size1,
    size2,
    size3,
    modules,
    BASE_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALONE: tl.constexpr,
    SWIGLU: tl.constexpr,
    DORA: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile of rows of one module, or of gate and up, for a tile of tokens.

    A layer has M modules of `size0` to `size3` rows, N in all, and a step has T tokens. `base` is
    `[T, N]`, or partials `[BASE_SPLITS, T, N]`, and `products` are `[SPLITS, T, M, RANK]`. `slots`
    is `[T]`, -1 for a token without an adapter. `factor` is `[slots, N]` and `bias` `[N]`. `out` is
    `[T, N]`. With SwiGLU, gate and up are the two modules, and `out` is `[T, size0]`.

    The columns of `b`, `[N, slots * RANK]`, are those of all slots, and the kernel reads those of
    `first_slot` up to `last_slot`. A token's products stand at the columns of its own slot, and
    elsewhere are zeros. ALONE says that all of these columns are one chunk.
    """
    num_rows = size0 + size1 + size2 + size3
    tile = tl.program_id(0)
    row, is_row, module = tile * ROWS + tl.arange(0, ROWS), tl.full((ROWS,), True, tl.int1), 0
    if SWIGLU:
        is_row = row < size0
    else:
        row, is_row, module = rows_of_tile(tile, size0, size1, size2, size3, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int32)
    known = slot >= 0
    has_any = tl.max(slot, 0) >= 0
    first = first_slot * RANK
    b = tl.zeros((ROWS, CHUNK), b_ptr.dtype.element_ty)
    up_b = b
    if ALONE:  # no earlier kernel of the step writes factors
        column = first + tl.arange(0, CHUNK)
        used = used_columns(slot, column, RANK)
        b = load_factors(b_ptr, row, is_row, column, used, b_stride)
        if SWIGLU:
            up_b = load_factors(b_ptr, row + size0, is_row, column, used, b_stride)
    wait_for_earlier(PDL)
    if SWIGLU or has_any:
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
        up_acc = acc
        stride = num_tokens.to(tl.int64) * (modules * RANK)
        own = products_ptr + token.to(tl.int64) * (modules * RANK) + module * RANK
        if ALONE:
            if has_any:
                x = _products(own, slot, first, stride, SPLITS, RANK, CHUNK, b.dtype)
                acc = tl.dot(x, tl.trans(b), acc)
                if SWIGLU:
                    x = _products(own + RANK, slot, first, stride, SPLITS, RANK, CHUNK, b.dtype)
                    up_acc = tl.dot(x, tl.trans(up_b), up_acc)
        else:
            for at in range(first, last_slot * RANK, CHUNK):
                hits = (slot >= at // RANK) & (slot <= (at + CHUNK - 1) // RANK)
                if tl.max(hits.to(tl.int32), 0) > 0:
                    column = at + tl.arange(0, CHUNK)
                    used = column < last_slot * RANK
                    b = load_factors(b_ptr, row, is_row, column, used, b_stride)
                    x = _products(own, slot, at, stride, SPLITS, RANK, CHUNK, b.dtype)
                    acc = tl.dot(x, tl.trans(b), acc)
                    if SWIGLU:
                        b = load_factors(b_ptr, row + size0, is_row, column, used, b_stride)
                        x = _products(own + RANK, slot, at, stride, SPLITS, RANK, CHUNK, b.dtype)
                        up_acc = tl.dot(x, tl.trans(b), up_acc)
        inside = is_token[:, None] & is_row[None, :]
        at_base = token.to(tl.int64)[:, None] * num_rows + row[None, :]
        scale = known[:, None] & is_row[None, :]
        at_factor = slot.to(tl.int64)[:, None] * num_rows + row[None, :]
        whole = num_tokens.to(tl.int64) * num_rows
        if SWIGLU:
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            gate = load_reduced(base_ptr, at_base, inside, whole, BASE_SPLITS, dtype)
            at_up = at_base + size0
            up = load_reduced(base_ptr, at_up, inside, whole, BASE_SPLITS, dtype)
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            if DORA:
                factor = tl.load(factor_ptr + at_factor, mask=scale, other=1.0)
                gate = _scaled(gate, factor, bias_ptr, row, is_row, BIAS)
                factor = tl.load(factor_ptr + at_factor + size0, mask=scale, other=1.0)
                up = _scaled(up, factor, bias_ptr, row + size0, is_row, BIAS)
            found = swiglu((gate + acc).to(dtype), (up + up_acc).to(dtype))
            place = token.to(tl.int64)[:, None] * size0 + row[None, :]
            tl.store(out_ptr + place, found, mask=inside)
        else:
            inside &= known[:, None]
            base = tl.load(base_ptr + at_base, mask=inside, other=0.0).to(tl.float32)
            if DORA:
                factor = tl.load(factor_ptr + at_factor, mask=scale, other=1.0).to(tl.float32)
                base = _scaled(base, factor, bias_ptr, row, is_row, BIAS)
                for split in tl.static_range(1, BASE_SPLITS):
                    other = base_ptr + split * whole + at_base
                    part = tl.load(other, mask=inside & scale, other=0.0)
                    tl.store(other, part * factor, mask=inside & scale)
            tl.store(out_ptr + at_base, (base + acc).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _products(
    own,
    slot,
    at,
    stride,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns the tokens' products `[TOKENS, CHUNK]` at columns of `b` from `at` on.

    Args:
        own: pointers to each token's first product.
        slot: slot of each token.
        at: first column, a multiple of CHUNK or of the rank.
        stride: elements between two splits.
    """
    WIDTH: tl.constexpr = min(RANK, CHUNK)
    GROUP: tl.constexpr = CHUNK // WIDTH
    column = tl.arange(0, WIDTH)
    if RANK > CHUNK:
        column += tl.multiple_of(at % RANK, CHUNK)
    places = own[:, None] + column[None, :]
    chosen = (slot >= at // RANK) & (slot < at // RANK + GROUP)
    total = tl.load(places, mask=chosen[:, None], other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(places + split * stride, mask=chosen[:, None], other=0.0)
    total = total.to(dtype)
    if GROUP > 1:
        group = at // RANK + tl.arange(0, GROUP)
        is_own = slot[:, None, None] == group[None, :, None]
        spread = tl.where(is_own, total[:, None, :], 0.0)
        total = tl.reshape(spread, (total.shape[0], CHUNK))
    return total


@triton.jit
def _scaled(base, factor, bias_ptr, row, is_row, BIAS: tl.constexpr):
    """Scales the base layer's output without its bias."""
    factor = factor.to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        base = (base - bias) * factor + bias
    else:
        base = base * factor
    return base
