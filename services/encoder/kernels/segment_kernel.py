"""What a program of `HopperAttention` does, in Gluon: one head of a block of queries.

As in FlashAttention-3 (https://arxiv.org/abs/2407.08608, section 3.2), one tile's weights are
multiplied with its values while the softmax of the next tile is computed. Other than there, weights
are relative to the largest score of the first tile instead of a running one (see `softmax`); should
a row's sum leave the room that this has, its block is done again with a running one.
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (of what is a constant to the kernel's compiler)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from services.common.nn.warpgroups import (
    clear,
    exceeds,
    fetch_query,
    first_operand,
    pair_of_bars,
    pair_of_tiles,
    rewind,
    rows_layout,
    scores,
    shares,
    softmax,
)


@gluon.jit
def segment_kernel(  # noqa: ANN201 - nothing
    query_tiles, key_tiles, value_tiles, items_ptr, out_ptr, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Programs of one head and segment follow each other, so that they find its keys and values in
    the second cache.

    Args:
        query_tiles: of `[BLOCK, DIM]`.
        key_tiles: of as many keys as go together; `value_tiles` as well.
        items_ptr: see `HopperAttention`.
        out_ptr: `[N, HEADS, DIM]`.
        scale: of the scores, in base 2.
    """
    ROWS: gl.constexpr = rows_layout(DIM, gl.num_warps())
    program, count = gl.program_id(0), gl.load(items_ptr)
    head = program // count
    if head < HEADS:
        fields_ptr = items_ptr + (1 + program % count) * 4
        first, size = gl.load(fields_ptr), gl.load(fields_ptr + 1)
        begin, end = gl.load(fields_ptr + 2), gl.load(fields_ptr + 3)
        query = gl.allocate_shared_memory(query_tiles.dtype, [BLOCK, DIM], query_tiles.layout)
        keys, values = pair_of_tiles(key_tiles), pair_of_tiles(value_tiles)
        bars = pair_of_bars()
        query_bar = fetch_query(query, query_tiles, first, head * DIM)
        weights, sums = _attend(
            query, query_bar, keys, values, bars, key_tiles, value_tiles, head * DIM, begin, end,
            scale, RUNNING=False,
        )  # fmt: skip
        if exceeds(weights, size, query.dtype):
            rewind(bars)
            weights, sums = _attend(
                query, query_bar, keys, values, bars, key_tiles, value_tiles, head * DIM, begin,
                end, scale, RUNNING=True,
            )  # fmt: skip
        debug_barrier()
        query.store((sums / weights[:, None]).to(query.dtype))
        debug_barrier()
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, ROWS))
        column = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
        place = ((first + row).to(gl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
        gl.store(out_ptr + place, query.load(ROWS), mask=(row < size)[:, None])


@gluon.jit
def _attend(
    query, query_bar, keys, values, bars, key_tiles, value_tiles, column, begin, end, scale,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """Sums of weights and weighted sums of values of one head, over the segment [begin, end).

    The last keys come first, and then the others in their order. Keys of a tile and values of the
    one before arrive together, and while they are used the next ones do. `RUNNING`: weights are
    relative to the largest score so far instead of the largest of the first tile.
    """
    BLOCK: gl.constexpr = query.shape[0]
    DIM: gl.constexpr = query.shape[1]
    KEYS: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 16])
    count = (end - begin + KEYS - 1) // KEYS
    remaining = begin + (count - 1) * KEYS
    last = gl.maximum(begin, end - KEYS)  # a whole tile, if the segment has one: for its maximum
    mbarrier.expect(bars.index(0), key_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(key_tiles, [last, column], bars.index(0), keys.index(0))
    _fetch(keys, values, bars, key_tiles, value_tiles, column, 1, count, begin, last)
    mbarrier.wait(query_bar, 0)
    queries = query.load(gl.DotOperandLayout(0, SCORES, 2))
    mbarrier.wait(bars.index(0), 0)
    score = warpgroup_mma_wait(0, deps=[scores(queries, keys.index(0), SCORES)])
    place = last + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    score = gl.where((place < end)[None, :], score, float("-inf"))
    top = gl.max(score, axis=1) * scale
    score = gl.where((place >= remaining)[None, :], score, float("-inf"))
    weight = gl.exp2(score * scale - top[:, None])
    weights = shares(weight)
    sums = gl.full([BLOCK, DIM], 0.0, gl.float32, SUMS)
    if last + KEYS > end:
        mbarrier.wait(bars.index(1), 0)
        clear(values.index(1), end - last)
    debug_barrier()
    _fetch(keys, values, bars, key_tiles, value_tiles, column, 2, count, begin, last)
    ready = first_operand(weight, query.dtype, SUMS)
    for index in range(1, count):
        mbarrier.wait(bars.index(index % 2), index // 2 & 1)
        score = scores(queries, keys.index(index % 2), SCORES)
        sums = warpgroup_mma(ready, values.index(index % 2), sums, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        top, weights, weight, old = softmax(score, scale, top, weights, RUNNING)
        sums, ready = warpgroup_mma_wait(0, deps=[sums, ready])
        debug_barrier()
        _fetch(keys, values, bars, key_tiles, value_tiles, column, index + 2, count, begin, last)
        if RUNNING:
            sums *= gl.convert_layout(old, gl.SliceLayout(1, SUMS))[:, None]
        ready = first_operand(weight, query.dtype, SUMS)
    mbarrier.wait(bars.index(count % 2), count // 2 & 1)
    sums = warpgroup_mma(ready, values.index(count % 2), sums)
    return gl.convert_layout(gl.sum(weights, axis=1), gl.SliceLayout(1, SUMS)), sums


@gluon.jit
def _fetch(keys, values, bars, key_tiles, value_tiles, column, index, count, begin, last):
    """Asks for the keys of a tile and the values of the one before, if there are so many."""
    slot = index % 2
    bar = bars.index(slot)
    at = begin + (index - 1) * keys.shape[1]
    before = gl.where(index == 1, last, at - keys.shape[1])
    both: gl.constexpr = key_tiles.block_type.nbytes + value_tiles.block_type.nbytes
    mbarrier.expect(bar, both, pred=index < count)
    mbarrier.expect(bar, value_tiles.block_type.nbytes, pred=index == count)
    tma.async_copy_global_to_shared(
        key_tiles, [at, column], bar, keys.index(slot), pred=index < count
    )
    tma.async_copy_global_to_shared(
        value_tiles, [before, column], bar, values.index(slot), pred=index <= count
    )
