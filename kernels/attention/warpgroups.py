"""Gluon device code for attention in a warp group on Hopper, shared by both Gluon kernels.

Compilation fails if the installed Gluon does not support Hopper.
"""

# ruff: noqa: ANN201 - Gluon blocks and constants have no type
# pyright: reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language import debug_barrier

NUM_WARPS = 4  # one warp group
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
LOG2_E = 1.4426950408889634


@gluon.constexpr_function
def rows_layout(dim: int, num_warps: int) -> gl.BlockedLayout:
    """Layout in which threads share rows of `dim` 16-bit elements, with 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [num_warps, 1], [1, 0])


@gluon.jit
def allocate_tile_pair(tiles):
    """Allocates shared memory for a double buffer of two tiles."""
    block: gl.constexpr = tiles.block_type.shape
    return gl.allocate_shared_memory(tiles.dtype, [2, block[0], block[1]], tiles.layout)


@gluon.jit
def make_mbarrier_pair():
    """Makes one mbarrier per tile of a double buffer.

    The mbarriers need a fence before their first use. `load_query` has one; a kernel that makes
    mbarriers after it has to fence itself.
    """
    mbarriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(mbarriers.index(index), count=1)
    return mbarriers


@gluon.jit
def reset_mbarriers(mbarriers):
    """Resets mbarriers to the first phase, after all copies have arrived."""
    for index in gl.static_range(2):
        mbarrier.invalidate(mbarriers.index(index))
    debug_barrier()
    for index in gl.static_range(2):
        mbarrier.init(mbarriers.index(index), count=1)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def load_query(query, tiles, row, column):
    """Starts the TMA load of a query tile and returns its mbarrier.

    The fence in it also covers all mbarriers that were made before.
    """
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [row, column], arrived, query)
    return arrived


@gluon.jit
def zero_rows_from(tile, size):
    """Zeroes the rows from `size` on, which belong to another sequence and may not be finite."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    inside = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS)) < size
    tile.store(gl.where(inside[:, None], tile.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def start_scores(query, keys, SCORES: gl.constexpr):
    """Starts an asynchronous wgmma that computes Q·Kᵀ."""
    zeros = gl.full([query.shape[0], keys.shape[0]], 0.0, gl.float32, SCORES)
    return warpgroup_mma(query, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def softmax(score, scale, m_i, l_i, RUNNING: gl.constexpr):
    """Continues an online softmax with another tile of scores. Exponentials are in base 2.

    Probabilities are relative to `m_i`, which is the row max so far if RUNNING, and otherwise the
    row max of the first tile. The latter takes a third fewer instructions. The quotient of
    accumulator and row sum is the same, since the exponent range of floats is large enough for much
    larger scores than those of the first tile. `overflows` detects the rows in which it is not.

    Args:
        score: scores of the tile.
        scale: factor of the scores, in base 2.
        m_i: row max.
        l_i: row sums in slices, see `sliced_row_sum`.
        RUNNING: True if `m_i` is the running row max.

    Returns:
        New `m_i`, new `l_i`, the tile's probabilities, and the factor of the accumulator of earlier
        tiles, which is only meaningful if RUNNING.
    """
    alpha = m_i
    if RUNNING:
        new_m = gl.maximum(m_i, gl.max(score, axis=1) * scale)
        alpha = gl.exp2(m_i - new_m)
        m_i = new_m
        l_i *= gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
    p = gl.exp2(score * scale - m_i[:, None])
    return m_i, l_i + sliced_row_sum(p), p, alpha


@gluon.jit
def sliced_row_sum(p):
    """Sums each row of p in slices, with a partial sum for each thread that has some elements."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), axis=1)


@gluon.jit
def overflows(l_i, size, dtype: gl.constexpr):
    """Returns whether a row sum of the first `size` rows exceeds a bound.

    The bound is far below the value at which the row sum or the accumulator would overflow.
    """
    BOUND: gl.constexpr = 2.0**64 if dtype == gl.bfloat16 else 2.0**15
    row = gl.arange(0, l_i.shape[0], l_i.type.layout)
    return gl.min(((row >= size) | (l_i < BOUND)).to(gl.int32), axis=0) == 0


@gluon.jit
def as_dot_operand(p, dtype: gl.constexpr, ACC: gl.constexpr):
    """Converts a tile's probabilities to the first operand of the wgmma with its values."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC, 2))
