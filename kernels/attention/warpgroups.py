"""Attention steps of one warp group, in Gluon, for Hopper; both Gluon attention kernels share them.

The functions are device code: nothing calls them from Python. Compilation fails where Gluon has no
Hopper.
"""

# ruff: noqa: ANN201 - blocks and constants of the kernel's compiler
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
    """Threads share rows of `dim` elements of 16 bits, 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [num_warps, 1], [1, 0])


@gluon.jit
def allocate_tile_pair(tiles):
    """Shared memory for two tiles: a double buffer."""
    block: gl.constexpr = tiles.block_type.shape
    return gl.allocate_shared_memory(tiles.dtype, [2, block[0], block[1]], tiles.layout)


@gluon.jit
def make_mbarrier_pair():
    """One mbarrier per tile of a double buffer. `load_query` fences those made before it; otherwise
    the caller fences.
    """
    mbarriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(mbarriers.index(index), count=1)
    return mbarriers


@gluon.jit
def reset_mbarriers(mbarriers):
    """Back to the first phase, once all copies have arrived."""
    for index in gl.static_range(2):
        mbarrier.invalidate(mbarriers.index(index))
    debug_barrier()
    for index in gl.static_range(2):
        mbarrier.init(mbarriers.index(index), count=1)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def load_query(query, tiles, row, column):
    """Starts the TMA load of a query tile and returns its mbarrier. Its fence serves all mbarriers
    that were made before.
    """
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [row, column], arrived, query)
    return arrived


@gluon.jit
def zero_rows_from(tile, size):
    """Zeroes rows from `size` on: they are another sequence's and need not be finite."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    inside = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS)) < size
    tile.store(gl.where(inside[:, None], tile.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def start_scores(query, keys, SCORES: gl.constexpr):
    """Starts Q·Kᵀ as an asynchronous wgmma."""
    zeros = gl.full([query.shape[0], keys.shape[0]], 0.0, gl.float32, SCORES)
    return warpgroup_mma(query, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def softmax(score, scale, m_i, l_i, RUNNING: gl.constexpr):
    """One more tile of an online softmax in base 2, as `scale` is.

    Probabilities are relative to `m_i`: with RUNNING the row max so far, else that of the first
    tile, which takes a third fewer instructions. The exponent of a float has room for scores that
    are larger by far, and the quotient is the same; `overflows` tells where it has not.

    Returns:
        m_i; l_i in slices, see `sliced_row_sum`; the tile's probabilities p; what the accumulator
        of the tiles before is multiplied by, if RUNNING.
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
    """Row sums of p, as many per row as lie in different threads."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), axis=1)


@gluon.jit
def overflows(l_i, size, dtype: gl.constexpr):
    """Whether a row sum of the first `size` rows is beyond a bound that is far below where its
    type, or the accumulator, would overflow.
    """
    BOUND: gl.constexpr = 2.0**64 if dtype == gl.bfloat16 else 2.0**15
    row = gl.arange(0, l_i.shape[0], l_i.type.layout)
    return gl.min(((row >= size) | (l_i < BOUND)).to(gl.int32), axis=0) == 0


@gluon.jit
def as_dot_operand(p, dtype: gl.constexpr, ACC: gl.constexpr):
    """A tile's probabilities as the first operand of their wgmma with its values."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC, 2))
