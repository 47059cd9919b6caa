"""q/k norm, rotation and the write to the KV cache as one Triton kernel.

Between the fused q/k/v projection and attention, plain torch launches a score of small kernels that
each read and write q, k and v. This one reads them once. Its plain twin is
`services.decoder.kernels.plain.qk_rope_cache`; the rounding points are the same.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.heads import ProjectedHeads
from services.decoder.kernels.skinny_gemm import load_reduced
from services.decoder.kernels.tuning import qk_rope_config


def qk_rope_cache(
    heads: ProjectedHeads, keys_values: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """Implements `plain.qk_rope_cache` where heads rotate whole and all tensors are contiguous."""
    assert heads.is_contiguous
    num_kv_heads, head_dim = heads.kv_cache.shape[-2:]
    num_tokens, num_heads = heads.num_tokens, heads.num_heads
    query = heads.kv_cache.new_empty(num_tokens, num_heads, head_dim)
    block, num_warps = qk_rope_config(num_tokens)
    norms = heads.norms or (query, query)
    _qk_rope_cache_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block))](
        heads.qkv, *norms, *heads.rope, heads.rows, heads.kv_cache, query,
        query if keys_values is None else keys_values,
        num_tokens, num_heads, num_kv_heads, heads.eps, heads.qkv[0].numel(),
        HALF=head_dim // 2, COLUMNS=triton.next_power_of_2(head_dim // 2), BLOCK=block,
        NORM=heads.norms is not None, SPLITS=heads.num_splits, KEEP=keys_values is not None,
        PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return query


@triton.jit
def _product(a, b):
    """Product of a and b with one rounding, as in torch. The compiler would contract a
    multiplication in the narrow type and the addition after it to an FMA, which does not round the
    product.
    """
    return tl.fma(a.to(tl.float32), b.to(tl.float32), 0.0).to(a.dtype)


@triton.jit
def normed(  # noqa: ANN201 - two of the inputs' kind
    first, second, weight_first, weight_second, eps, HALF: tl.constexpr
):
    """RMSNorm of heads, by halves: `[heads, columns]` each, zeros behind the HALF columns."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    one = _product((wide_first * scale).to(first.dtype), weight_first)
    two = _product((wide_second * scale).to(first.dtype), weight_second)
    return one, two


@triton.jit
def turned(one, two, cos, sin):  # noqa: ANN201 - two of the inputs' kind
    """Heads rotated, by halves, rounded as in torch."""
    first = _product(one, cos).to(tl.float32) - _product(two, sin).to(tl.float32)
    second = _product(two, cos).to(tl.float32) + _product(one, sin).to(tl.float32)
    return first.to(one.dtype), second.to(one.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_rope_cache_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, rows_ptr, cache_ptr, query_ptr,
    kept_ptr, num_tokens, num_heads, num_kv_heads, eps, stride, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SPLITS: tl.constexpr,
    KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    all_heads = num_heads + 2 * num_kv_heads
    column = tl.arange(0, COLUMNS)[None, :]
    known = column < HALF
    inside = (head < all_heads)[:, None] & known
    is_query = (head < num_heads)[:, None] & known
    is_value = (head >= num_heads + num_kv_heads)[:, None]

    if NORM:
        weights = (
            tl.where(
                is_query,
                tl.load(q_norm_ptr + column, mask=known, other=0.0),
                tl.load(k_norm_ptr + column, mask=known, other=0.0),
            ),
            tl.where(
                is_query,
                tl.load(q_norm_ptr + HALF + column, mask=known, other=0.0),
                tl.load(k_norm_ptr + HALF + column, mask=known, other=0.0),
            ),
        )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = (token * all_heads + head)[:, None] * (2 * HALF) + column
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    first = load_reduced(qkv_ptr, place, inside, stride, SPLITS, dtype)
    second = load_reduced(qkv_ptr, place + HALF, inside, stride, SPLITS, dtype)
    cos = tl.load(cos_ptr + token * HALF + column, mask=known, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + column, mask=known, other=0.0)
    if NORM:
        one, two = normed(first, second, weights[0], weights[1], eps, HALF)
    else:
        one, two = first, second
    one, two = turned(one, two, cos, sin)
    first = tl.where(is_value, first, one)
    second = tl.where(is_value, second, two)

    out = query_ptr + (token * num_heads + head)[:, None] * (2 * HALF) + column
    tl.store(out, first, mask=is_query)
    tl.store(out + HALF, second, mask=is_query)
    if KEEP:
        kept = token * (2 * num_kv_heads) + head[:, None] - num_heads
        out = kept_ptr + kept * (2 * HALF) + column
        tl.store(out, first, mask=inside & ~is_query)
        tl.store(out + HALF, second, mask=inside & ~is_query)
    # rows: [2, T], the cache's row of the token's keys, then of its values.
    key_row = tl.load(rows_ptr + token)
    value_row = tl.load(rows_ptr + num_tokens + token)
    kv_head = head[:, None] - num_heads - tl.where(is_value, num_kv_heads, 0)
    row = tl.where(is_value, value_row, key_row) * num_kv_heads + kv_head
    # Padding has negative rows: they count from the cache's end in torch, and go nowhere here.
    keep = inside & (head >= num_heads)[:, None] & (key_row >= 0)
    out = cache_ptr + row * (2 * HALF) + column
    tl.store(out, first, mask=keep)
    tl.store(out + HALF, second, mask=keep)
