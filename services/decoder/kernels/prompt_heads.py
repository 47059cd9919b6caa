"""The projection of prompts' tokens with `qk_rope_cache`, as one kernel for Hopper.

Norm, rotation and the write to the cache by themselves read queries, keys and values from memory
and write them again, which takes a quarter of the projection's time. The plain twins are
`F.linear` and `models.rope.qk_rope_cache`; the rounding points are the same.
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (of what is a constant to the kernel's compiler)

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from services.common.nn import product_tiles
from services.common.nn.product_tiles import (
    FINISHING_REGISTERS,
    FINISHING_WARPS,
    ROWS,
    count_tiles,
    halves,
    make_place,
    make_ring,
    multiply,
    pairs_layout,
    release,
    tile_at,
    whole,
)
from services.decoder.models.rope import HeadTransform


def gains(x: Tensor, weight: Tensor, transform: HeadTransform) -> bool:
    """Whether it is the faster one, for heads that fit in tiles."""
    num_kv_heads, head_dim = transform.kv_cache.shape[-2:]
    return (
        head_dim in (32, 64, 128)
        and num_kv_heads * head_dim % ROWS.value == 0
        and product_tiles.gain(x, weight)
    )


def linear_qk_rope_cache(
    x: Tensor, weight: Tensor, transform: HeadTransform, keys_values: Tensor
) -> Tensor:
    """See `ops.Ops.linear_qk_rope_cache`."""
    (num_tokens, num_columns), num_rows = x.shape, len(weight)
    num_kv_heads, head_dim = transform.kv_cache.shape[-2:]
    kv_size = num_kv_heads * head_dim
    query = x.new_empty(num_tokens, num_rows // head_dim - 2 * num_kv_heads, head_dim)
    _kernel[product_tiles.grid(num_tokens, num_rows)](
        *product_tiles.operands(x, weight), *transform.norms, *transform.rope, transform.rows,
        transform.kv_cache, query, keys_values, num_tokens, transform.eps,
        WIDE=num_rows // ROWS.value, STEPS=num_columns // 64, HALF=head_dim // 2, KV_SIZE=kv_size,
        # A product must not become one with the sum after it: each is rounded by itself.
        enable_fp_fusion=False, **product_tiles.OPTIONS,
    )  # fmt: skip
    return query


@gluon.jit(do_not_specialize=["num_tokens"])
def _kernel(
    x_tiles, weight_tiles, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, rows_ptr, cache_ptr,
    query_ptr, kept_ptr, num_tokens, eps, WIDE: gl.constexpr, STEPS: gl.constexpr,
    HALF: gl.constexpr, KV_SIZE: gl.constexpr,
):  # fmt: skip
    place, ring = make_place(x_tiles), make_ring(x_tiles, weight_tiles)
    norms = (q_weight_ptr, k_weight_ptr)
    angles = (cos_ptr, sin_ptr)
    outs = (query_ptr, kept_ptr, cache_ptr)
    gl.warp_specialize(
        [
            (
                multiply,
                (x_tiles, weight_tiles, None, ring, place, num_tokens, WIDE, STEPS),
            ),
            (
                _finish,
                (place, norms, angles, rows_ptr, outs, num_tokens, eps, WIDE, HALF, KV_SIZE),
            ),
        ],
        [FINISHING_WARPS],
        [FINISHING_REGISTERS],
    )


@gluon.jit
def _finish(
    place, norms, angles, rows_ptr, outs, num_tokens, eps, WIDE: gl.constexpr, HALF: gl.constexpr,
    KV_SIZE: gl.constexpr,
):  # fmt: skip
    """Normalises and turns the tiles of queries and keys, and writes all where they go."""
    parked, full, free = place
    query_ptr, kept_ptr, cache_ptr = outs
    LAYOUT: gl.constexpr = pairs_layout(HALF)
    CHUNK: gl.constexpr = parked.shape[1]
    QUERY_SIZE: gl.constexpr = WIDE * ROWS - 2 * KV_SIZE
    for index in range(count_tiles(num_tokens, WIDE)):
        first, row = tile_at(index, num_tokens, WIDE)
        is_query, is_value = row < QUERY_SIZE, row >= QUERY_SIZE + KV_SIZE
        mbarrier.wait(full, index & 1)
        for chunk in range(parked.shape[0]):
            start = first + chunk * CHUNK
            product = parked.index(chunk).load(LAYOUT)
            if not is_value:
                norm_ptr = gl.where(is_query, norms[0], norms[1])
                product = _turned(product, start, norm_ptr, angles, num_tokens, eps, HALF, LAYOUT)
            token = start + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
            inside = token < num_tokens
            column = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
            wide = token.to(gl.int64)[:, None]
            if is_query:
                to = wide * QUERY_SIZE + column
                gl.store(query_ptr + to, product, mask=inside[:, None])
            else:
                to = wide * (2 * KV_SIZE) + column - QUERY_SIZE
                gl.store(kept_ptr + to, product, mask=inside[:, None])
                # rows: [2, T], the cache's row of the token's keys, then of its values. Padding has
                # negative ones, and goes nowhere.
                line_ptr = rows_ptr + token + gl.where(is_value, num_tokens, 0)
                line = gl.load(line_ptr, mask=inside, other=-1)[:, None]
                to = line * KV_SIZE + column - QUERY_SIZE - gl.where(is_value, KV_SIZE, 0)
                gl.store(cache_ptr + to, product, mask=line >= 0)
        release(free)


@gluon.jit
def _turned(
    product, start, norm_ptr, angles, num_tokens, eps, HALF: gl.constexpr, LAYOUT: gl.constexpr
):
    """Heads of a chunk normalised and rotated, rounded as in torch."""
    dtype: gl.constexpr = product.dtype
    first, second = halves(product, HALF)
    ANGLES: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    column = gl.arange(0, HALF, gl.SliceLayout(0, ANGLES))[None, :]
    token = start + gl.arange(0, product.shape[0], gl.SliceLayout(1, ANGLES))[:, None]
    place = token * HALF + column
    cos = gl.load(angles[0] + place, mask=token < num_tokens, other=0.0)[:, None, :]
    sin = gl.load(angles[1] + place, mask=token < num_tokens, other=0.0)[:, None, :]
    one, two = first.to(gl.float32), second.to(gl.float32)
    squares = gl.sum(one * one + two * two, axis=2)
    scale = gl.rsqrt(squares / (2 * HALF) + eps)[:, :, None]
    first = _product((one * scale).to(dtype), gl.load(norm_ptr + column)[:, None, :])
    second = _product((two * scale).to(dtype), gl.load(norm_ptr + HALF + column)[:, None, :])
    one = _product(first, cos).to(gl.float32) - _product(second, sin).to(gl.float32)
    two = _product(second, cos).to(gl.float32) + _product(first, sin).to(gl.float32)
    return whole(one.to(dtype), two.to(dtype), LAYOUT)


@gluon.jit
def _product(a, b):
    return (a.to(gl.float32) * b.to(gl.float32)).to(a.dtype)
