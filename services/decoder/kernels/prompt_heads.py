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
    angles_layout,
    count_tiles,
    halves,
    make_place,
    make_ring,
    multiply,
    over_heads,
    pairs_layout,
    release,
    rows_of,
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
        and product_tiles.gains(x, weight)
    )


def linear_qk_rope_cache(
    x: Tensor, weight: Tensor, transform: HeadTransform, keys_values: Tensor
) -> Tensor:
    """See `ops.Ops.linear_qk_rope_cache`."""
    num_tokens, num_rows = len(x), len(weight)
    num_kv_heads, head_dim = transform.kv_cache.shape[-2:]
    kv_size = num_kv_heads * head_dim
    query = x.new_empty(num_tokens, num_rows // head_dim - 2 * num_kv_heads, head_dim)
    _prompt_heads_kernel[product_tiles.grid(num_tokens, num_rows)](
        *product_tiles.operands(x, weight), *transform.norms, *transform.rope, transform.rows,
        transform.kv_cache, query, keys_values, num_tokens, transform.eps,
        HALF=head_dim // 2, KV_SIZE=kv_size, **product_tiles.sizes(weight),
        # A product must not become one with the sum after it: each is rounded by itself.
        enable_fp_fusion=False, **product_tiles.OPTIONS,
    )  # fmt: skip
    return query


@gluon.jit(do_not_specialize=["num_tokens"])
def _prompt_heads_kernel(
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
    ANGLES: gl.constexpr = angles_layout(HALF)
    CHUNK: gl.constexpr = parked.shape[1]
    QUERY_SIZE: gl.constexpr = WIDE * ROWS - 2 * KV_SIZE
    for index in range(count_tiles(num_tokens, WIDE)):
        first, row = tile_at(index, num_tokens, WIDE)
        is_query, is_value = row < QUERY_SIZE, row >= QUERY_SIZE + KV_SIZE
        # Before they are wanted, as each chunk's are: the last tile's end is behind nothing.
        norm_ptr = gl.where(is_query, norms[0], norms[1])
        weights = (
            rows_of(norm_ptr, 0, 1, 1, HALF, ANGLES),
            rows_of(norm_ptr + HALF, 0, 1, 1, HALF, ANGLES),
        )
        cos = rows_of(angles[0], first, num_tokens, CHUNK, HALF, ANGLES)
        sin = rows_of(angles[1], first, num_tokens, CHUNK, HALF, ANGLES)
        # rows: [2, T], the cache's row of the token's keys, then of its values. Padding has
        # negative ones, and goes nowhere.
        lines_ptr = rows_ptr + gl.where(is_value, num_tokens, 0)
        line = _lines(lines_ptr, first, num_tokens, CHUNK, LAYOUT)
        mbarrier.wait(full, index & 1)
        for chunk in range(parked.shape[0]):
            start = first + chunk * CHUNK
            following = start + CHUNK
            next_cos = rows_of(angles[0], following, num_tokens, CHUNK, HALF, ANGLES)
            next_sin = rows_of(angles[1], following, num_tokens, CHUNK, HALF, ANGLES)
            next_line = _lines(lines_ptr, following, num_tokens, CHUNK, LAYOUT)
            product = parked.index(chunk).load(LAYOUT)
            if not is_value:
                product = _turned(product, weights, cos, sin, eps, HALF, LAYOUT)
            token = start + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
            inside, wide = (token < num_tokens)[:, None], token.to(gl.int64)[:, None]
            column = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
            if is_query:
                gl.store(query_ptr + (wide * QUERY_SIZE + column), product, mask=inside)
            else:
                to = wide * (2 * KV_SIZE) + column - QUERY_SIZE
                gl.store(kept_ptr + to, product, mask=inside)
                of_kind = column - QUERY_SIZE - gl.where(is_value, KV_SIZE, 0)
                to = line[:, None] * KV_SIZE + of_kind
                gl.store(cache_ptr + to, product, mask=line[:, None] >= 0)
            cos, sin, line = next_cos, next_sin, next_line
        release(free)


@gluon.jit
def _lines(ptr, start, end, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    token = start + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    return gl.load(ptr + token, mask=token < end, other=-1)


@gluon.jit
def _turned(product, weights, cos, sin, eps, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Heads of a chunk normalised and rotated, rounded as in torch."""
    dtype: gl.constexpr = product.dtype
    first, second = halves(product, HALF)
    one, two = first.to(gl.float32), second.to(gl.float32)
    squares = gl.sum(one * one + two * two, axis=2)
    scale = gl.rsqrt(squares / (2 * HALF) + eps)[:, :, None]
    first = _product((one * scale).to(dtype), over_heads(weights[0], first))
    second = _product((two * scale).to(dtype), over_heads(weights[1], second))
    wide_cos, wide_sin = over_heads(cos, first), over_heads(sin, first)
    one = _product(first, wide_cos).to(gl.float32) - _product(second, wide_sin).to(gl.float32)
    two = _product(second, wide_cos).to(gl.float32) + _product(first, wide_sin).to(gl.float32)
    return whole(one.to(dtype), two.to(dtype), LAYOUT)


@gluon.jit
def _product(a, b):
    return (a.to(gl.float32) * b.to(gl.float32)).to(a.dtype)
