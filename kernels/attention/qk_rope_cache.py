"""Triton kernel for q/k norm, rotation and the write to the KV cache.

Plain torch would launch about twenty small kernels between the fused q/k/v projection and
attention, each of which reads and writes q, k and v. This kernel reads them once. The reference
implementation is `kernels.plain.qk_rope_cache`, with the same rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.fp8_codec import encode_e4m3, round_to_e4m3
from kernels.attention.fp8_pages import as_bytes
from kernels.attention.heads import ProjectedHeads
from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced
from kernels.tuning import qk_rope_config


def qk_rope_cache(
    heads: ProjectedHeads,
    keys_values: Tensor | None = None,
    gates: Tensor | None = None,
    *,
    pdl: int = 0,
) -> Tensor:
    """Implements `plain.qk_rope_cache` for contiguous tensors."""
    assert heads.is_contiguous
    num_kv_heads, head_dim = heads.kv_cache.shape[-2:]
    num_tokens, num_heads = heads.num_tokens, heads.num_heads
    query = heads.rope[0].new_empty(num_tokens, num_heads, head_dim)
    config = qk_rope_config(num_tokens, head_dim)
    norms, half = heads.norms or (query, query), heads.rope[0].shape[-1]
    rest = head_dim - 2 * half
    parts = triton.cdiv(num_heads, config.heads) + 2 * triton.cdiv(num_kv_heads, config.heads)
    _qk_rope_cache_kernel[(num_tokens, parts)](
        heads.qkv,
        *norms,
        *heads.rope,
        heads.rows,
        as_bytes(heads.kv_cache),
        query if heads.kv_scales is None else heads.kv_scales,
        query,
        query if keys_values is None else keys_values,
        query if gates is None else gates,
        num_tokens,
        num_heads,
        num_kv_heads,
        heads.eps,
        heads.qkv[0].numel(),
        HALF=half,
        COLUMNS=triton.next_power_of_2(half),
        REST=rest,
        REST_COLUMNS=triton.next_power_of_2(max(rest, 1)),
        WHOLE_COLUMNS=triton.next_power_of_2(head_dim),
        BLOCK=config.heads,
        NORM=heads.norms is not None,
        SPLITS=heads.num_splits,
        KEEP=keys_values is not None,
        GATED=heads.gated,
        FP8=heads.kv_scales is not None,
        PDL=pdl,
        num_warps=config.warps,
        maxnreg=config.registers,
        launch_pdl=pdl > 0,
    )
    return query


@triton.jit
def _product(a, b):
    """Multiplies a and b and rounds the product, as torch does.

    The compiler would contract a multiplication in the narrow type and an addition after it to an
    FMA, which does not round the product.
    """
    return tl.fma(a.to(tl.float32), b.to(tl.float32), 0.0).to(a.dtype)


@triton.jit
def normed(  # noqa: ANN201 - Triton blocks have no type
    first, second, weight_first, weight_second, eps, HALF: tl.constexpr
):
    """RMSNorm of heads, whose halves are `[heads, columns]` with zeros from column HALF on."""
    squares = _squares(first) + _squares(second)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    return _scaled(first, scale, weight_first), _scaled(second, scale, weight_second)


@triton.jit
def _squares(x):
    """Sums the squares of each head's elements."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _scaled(x, scale, weight):
    """Multiplies heads by `scale`, rounds to the weight's dtype and multiplies by the weight."""
    return _product((x.to(tl.float32) * scale).to(weight.dtype), weight).to(x.dtype)


@triton.jit
def turned(one, two, cos, sin):  # noqa: ANN201 - Triton blocks have no type
    """Rotates heads, given by halves, with the rounding of torch."""
    first = _product(one, cos).to(tl.float32) - _product(two, sin).to(tl.float32)
    second = _product(two, cos).to(tl.float32) + _product(one, sin).to(tl.float32)
    return first.to(one.dtype), second.to(one.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_rope_cache_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    cache_ptr,
    scales_ptr,
    query_ptr,
    kept_ptr,
    gate_ptr,
    num_tokens,
    num_heads,
    num_kv_heads,
    eps,
    stride,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    KEEP: tl.constexpr,
    GATED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Processes BLOCK heads of a token, which are all queries, all keys or all values.

    A head consists of two halves of HALF elements that are rotated, and REST further elements. Each
    query head is followed by its gate, if it has one. Padding has negative rows, which torch counts
    from the end of the cache. It is not written to the cache.

    All loads come before the first store, which the compiler would not let them pass. Threads have
    at most 8 adjacent elements, also of bytes, and rotations and weights are read for each head, so
    that threads exchange few elements.
    """
    DIM: tl.constexpr = 2 * HALF + REST
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_parts, key_parts = tl.cdiv(num_heads, BLOCK), tl.cdiv(num_kv_heads, BLOCK)
    is_query, is_value = part < query_parts, part >= query_parts + key_parts
    count = tl.where(is_query, num_heads, num_kv_heads)
    part -= tl.where(is_query, 0, query_parts + tl.where(is_value, key_parts, 0))
    head = part * BLOCK + tl.arange(0, BLOCK)[:, None]
    is_head = head < count
    column = tl.max_contiguous(tl.arange(0, COLUMNS)[None, :], [1, 8])
    rest_column = tl.max_contiguous(tl.arange(0, REST_COLUMNS)[None, :], [1, 8])
    known = column < HALF
    each = tl.broadcast_to(column, [BLOCK, COLUMNS])
    if NORM:
        norm_ptr = tl.where(is_query, q_norm_ptr, k_norm_ptr)
        weight_first = tl.load(norm_ptr + each, mask=known, other=0.0)
        weight_second = tl.load(norm_ptr + HALF + each, mask=known, other=0.0)
        if REST > 0:
            at = norm_ptr + 2 * HALF + rest_column
            weight_rest = tl.load(at, mask=rest_column < REST, other=0.0)
    wait_for_earlier(PDL)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    kv_head = head + tl.where(is_value, num_kv_heads, 0)  # keys, and then values
    slots = num_heads + num_heads if GATED else num_heads
    slot = tl.where(is_query, head + head if GATED else head, slots + kv_head)
    place = (token * (slots + 2 * num_kv_heads) + slot) * DIM
    first = load_reduced(qkv_ptr, place + column, is_head & known, stride, SPLITS, dtype)
    second = load_reduced(qkv_ptr, place + HALF + column, is_head & known, stride, SPLITS, dtype)
    rest = first
    if REST > 0:
        at = place + 2 * HALF + rest_column
        rest = load_reduced(qkv_ptr, at, is_head & (rest_column < REST), stride, SPLITS, dtype)
    if GATED:
        whole = tl.arange(0, WHOLE_COLUMNS)[None, :]
        is_gate = is_head & is_query & (whole < DIM)
        gate = load_reduced(qkv_ptr, place + DIM + whole, is_gate, stride, SPLITS, dtype)
    cos = tl.load(cos_ptr + token * HALF + each, mask=known, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + each, mask=known, other=0.0)
    if FP8:
        kv_scale = tl.load(scales_ptr + kv_head, mask=is_head & ~is_query, other=1.0)
    # `rows` is [2, T]: rows of the cache for the tokens' keys, and rows for the tokens' values.
    key_row = tl.load(rows_ptr + token)
    row = tl.load(rows_ptr + tl.where(is_value, num_tokens, 0) + token)
    one, two = first, second
    if NORM and REST > 0:
        squares = _squares(first) + _squares(second) + _squares(rest)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        one, two = _scaled(first, scale, weight_first), _scaled(second, scale, weight_second)
        rest = tl.where(is_value, rest, _scaled(rest, scale, weight_rest))
    elif NORM:
        one, two = normed(first, second, weight_first, weight_second, eps, HALF)
    one, two = turned(one, two, cos, sin)
    first, second = tl.where(is_value, first, one), tl.where(is_value, second, two)
    if is_query:
        place = (token * num_heads + head) * DIM
        _store(query_ptr + place, first, second, rest, column, rest_column, is_head, HALF, REST)
        if GATED:
            tl.store(gate_ptr + place + whole, gate, mask=is_gate)
    else:
        kept = kept_ptr + (token * (2 * num_kv_heads) + kv_head) * DIM
        stored = (first, second, rest)
        if FP8:
            stored = _rounded(first, second, rest, kv_scale)
        if KEEP:
            _store(kept, *stored, column, rest_column, is_head, HALF, REST)
        if FP8:
            stored = encode_e4m3(stored[0]), encode_e4m3(stored[1]), encode_e4m3(stored[2])
        keep = is_head & (key_row >= 0)
        out = cache_ptr + (row * num_kv_heads + head) * DIM
        _store(out, *stored, column, rest_column, keep, HALF, REST)


@triton.jit
def _rounded(first, second, rest, scale):
    """Rounds the parts of heads to values of e4m3, in float32."""
    first = round_to_e4m3(first.to(tl.float32), scale)
    second = round_to_e4m3(second.to(tl.float32), scale)
    return first, second, round_to_e4m3(rest.to(tl.float32), scale)


@triton.jit
def _store(
    out, first, second, rest, column, rest_column, inside, HALF: tl.constexpr, REST: tl.constexpr
):
    """Writes the heads that `inside` selects."""
    tl.store(out + column, first, mask=inside & (column < HALF))
    tl.store(out + HALF + column, second, mask=inside & (column < HALF))
    if REST > 0:
        tl.store(out + 2 * HALF + rest_column, rest, mask=inside & (rest_column < REST))
