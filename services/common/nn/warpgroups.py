"""Attention's steps by warp groups, in Gluon, for Hopper: what kernels of both engines share."""

# ruff: noqa: ANN001, ANN201 - blocks and constants of the kernel's compiler
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language import debug_barrier


@gluon.constexpr_function
def rows_layout(dim: int, num_warps: int) -> gl.BlockedLayout:
    """How the threads share rows of `dim`: 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [num_warps, 1], [1, 0])


@gluon.jit
def pair_of_tiles(tiles):
    """Memory for two tiles."""
    block: gl.constexpr = tiles.block_type.shape
    return gl.allocate_shared_memory(tiles.dtype, [2, block[0], block[1]], tiles.layout)


@gluon.jit
def pair_of_bars():
    """What says that copies have arrived; to be made before `fetch_query`, or to be fenced."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(bars.index(index), count=1)
    return bars


@gluon.jit
def rewind(bars):
    """As `pair_of_bars` has left them, once all copies have arrived."""
    for index in gl.static_range(2):
        mbarrier.invalidate(bars.index(index))
    debug_barrier()
    for index in gl.static_range(2):
        mbarrier.init(bars.index(index), count=1)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def fetch_query(query, tiles, row, column):
    """Asks for the block; returns what says that it has arrived. Its fence is for all barriers that
    were made before.
    """
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [row, column], bar, query)
    return bar


@gluon.jit
def clear(tile, size):
    """Zeros behind the first rows: what lies there, not the sequence's own, need not be finite."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    inside = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS)) < size
    tile.store(gl.where(inside[:, None], tile.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def scores(query, keys, SCORES: gl.constexpr):
    """The product of queries and keys, which has begun."""
    nothing = gl.full([query.shape[0], keys.shape[0]], 0.0, gl.float32, SCORES)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def softmax(score, scale, top, weights, RUNNING: gl.constexpr):
    """One tile more. In base 2, as `scale` is.

    Weights are relative to `top`, by row: with RUNNING to the largest score so far, else to that of
    the first tile, which takes a third fewer instructions. A float's exponent has room for scores
    that are larger by far, and the quotient is the same; `exceeds` says where it has not.

    Returns:
        What weights are relative to now; their sums, see `shares`; the tile's weights; what those
        before it are multiplied by, if RUNNING.
    """
    old = top
    if RUNNING:
        new_top = gl.maximum(top, gl.max(score, axis=1) * scale)
        old = gl.exp2(top - new_top)
        top = new_top
        weights *= gl.convert_layout(old, gl.SliceLayout(1, weights.type.layout))[:, None]
    weight = gl.exp2(score * scale - top[:, None])
    return top, weights + shares(weight), weight, old


@gluon.jit
def shares(weight):
    """Sums of a tile's weights, as many a row as lie in different threads."""
    return gl.sum(gl.reshape(weight, [weight.shape[0], weight.shape[1] // 8, 8]), axis=1)


@gluon.jit
def exceeds(weights, size, dtype: gl.constexpr):
    """Whether sums of weights of the first rows are beyond what is far from where their type, or
    sums of values times weights, would end.
    """
    ROOM: gl.constexpr = 2.0**64 if dtype == gl.bfloat16 else 2.0**15
    row = gl.arange(0, weights.shape[0], weights.type.layout)
    return gl.min(((row >= size) | (weights < ROOM)).to(gl.int32), axis=0) == 0


@gluon.jit
def first_operand(weight, dtype: gl.constexpr, SUMS: gl.constexpr):
    """A tile's weights as the first operand of their product with its values."""
    return gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
