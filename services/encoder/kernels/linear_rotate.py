"""The projection to queries, keys and values with their rotation, as one kernel for Hopper.

The rotation alone would read queries and keys from memory and write them again, which takes a fifth
of the projection's time. The plain twins are `F.linear` and `rope.rotate`; the rounding points are
the same.
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


def gains(x: Tensor, weight: Tensor, head_dim: int) -> bool:
    """Whether it is the faster one, for heads that fit in tiles."""
    return (
        head_dim in (32, 64, 128)
        and 2 * len(weight) // 3 % ROWS.value == 0
        and product_tiles.gains(x, weight)
    )


def linear_rotate(x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ops.Ops.linear_rotate`."""
    num_tokens, num_rows, head_dim = len(x), len(weight), 2 * cos.shape[1]
    out = x.new_empty(num_tokens, 3, num_rows // 3 // head_dim, head_dim)
    _linear_rotate_kernel[product_tiles.grid(num_tokens, num_rows)](
        *product_tiles.operands(x, weight), bias, cos, sin, out, num_tokens, HALF=head_dim // 2,
        **product_tiles.sizes(weight), **product_tiles.OPTIONS,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["num_tokens"])
def _linear_rotate_kernel(
    x_tiles, weight_tiles, bias_ptr, cos_ptr, sin_ptr, out_ptr, num_tokens, WIDE: gl.constexpr,
    STEPS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    place, ring = make_place(x_tiles), make_ring(x_tiles, weight_tiles)
    gl.warp_specialize(
        [
            (
                multiply,
                (x_tiles, weight_tiles, bias_ptr, ring, place, num_tokens, WIDE, STEPS),
            ),
            (_finish, (place, cos_ptr, sin_ptr, out_ptr, num_tokens, WIDE, HALF)),
        ],
        [FINISHING_WARPS],
        [FINISHING_REGISTERS],
    )


@gluon.jit
def _finish(place, cos_ptr, sin_ptr, out_ptr, num_tokens, WIDE: gl.constexpr, HALF: gl.constexpr):
    """Turns the tiles of queries and keys, and writes all."""
    parked, full, free = place
    LAYOUT: gl.constexpr = pairs_layout(HALF)
    ANGLES: gl.constexpr = angles_layout(HALF)
    CHUNK: gl.constexpr = parked.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    for index in range(count_tiles(num_tokens, WIDE)):
        first, row = tile_at(index, num_tokens, WIDE)
        # Before they are wanted, as each chunk's are: the last tile's end is behind nothing.
        cos = rows_of(cos_ptr, first, num_tokens, CHUNK, HALF, ANGLES)
        sin = rows_of(sin_ptr, first, num_tokens, CHUNK, HALF, ANGLES)
        mbarrier.wait(full, index & 1)
        for chunk in range(parked.shape[0]):
            start = first + chunk * CHUNK
            next_cos = rows_of(cos_ptr, start + CHUNK, num_tokens, CHUNK, HALF, ANGLES)
            next_sin = rows_of(sin_ptr, start + CHUNK, num_tokens, CHUNK, HALF, ANGLES)
            product = parked.index(chunk).load(LAYOUT)
            if row < WIDE * ROWS // 3 * 2:
                one, two = halves(product.to(gl.float32), HALF)
                wide_cos, wide_sin = over_heads(cos, one), over_heads(sin, one)
                turned = whole(
                    one * wide_cos - two * wide_sin, two * wide_cos + one * wide_sin, LAYOUT
                )
                product = turned.to(dtype)
            token = start + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
            column = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
            to = token.to(gl.int64)[:, None] * (WIDE * ROWS) + column[None, :]
            gl.store(out_ptr + to, product, mask=(token < num_tokens)[:, None])
            cos, sin = next_cos, next_sin
        release(free)
