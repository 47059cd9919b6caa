"""What a program of `PromptAttention` does, in Gluon, for Hopper.

It goes through the step's own keys and values, which `qk_rope_cache` has left in order beside the
cache, a tile by one instruction, and then through what the cache has from before the step, gathered
from the pool. As in FlashAttention-3 (https://arxiv.org/abs/2407.08608, section 3.2), one tile's
weights are multiplied with its values while the softmax of the next tile is computed, which
Triton's own compiler does not do.

Nothing weighs, not even by zero, that is not the sequence's own: another's may not be finite.
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (of what is a constant to the kernel's compiler)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_wait

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
from services.decoder.kernels.many_attention import joined


@gluon.jit
def prompt_kernel(  # noqa: ANN201 - nothing
    query_tiles, own_tiles, cache_ptr, block_ids_ptr, items_ptr, sums_ptr, scales_ptr, arrived_ptr,
    out_ptr, scale,
    PLACES: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    POOL_BLOCK: gl.constexpr, BLOCK: gl.constexpr, FIELDS: gl.constexpr, ACCOMPANIES: gl.constexpr,
):  # fmt: skip
    """One head of one item, see `PromptAttention`."""
    program = gl.program_id(0)
    fields_ptr = items_ptr + program // HEADS * FIELDS
    head = program % HEADS
    # All at once and early: who waits for one of them waits for the others, too.
    first, size = gl.load(fields_ptr), gl.load(fields_ptr + 1)
    chunk, table_ptr = gl.load(fields_ptr + 2), block_ids_ptr + gl.load(fields_ptr + 3)
    begin, end = gl.load(fields_ptr + 4), gl.load(fields_ptr + 5)
    parts, part = gl.load(fields_ptr + 6), gl.load(fields_ptr + 7)
    if not ACCOMPANIES:
        gdc_wait()
    if size > 0:
        query = gl.allocate_shared_memory(query_tiles.dtype, [BLOCK, DIM], query_tiles.layout)
        keys_at = head // (HEADS // KV_HEADS) * DIM
        top, weights, sums = _attend(
            query, query_tiles, head * DIM, own_tiles, keys_at, cache_ptr + keys_at, table_ptr,
            (first, size, chunk, begin, end), part == parts - 1, scale, KV_HEADS * DIM, POOL_BLOCK,
        )  # fmt: skip
        ROWS: gl.constexpr = rows_layout(DIM, gl.num_warps())
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, ROWS))
        column = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
        inside = (row < size)[:, None]
        place = ((first + row) * HEADS + head)[:, None] * DIM + column[None, :]
        if parts == 1:
            query.store((sums / weights[:, None]).to(query.dtype))
            gl.store(out_ptr + place, query.load(ROWS), mask=inside)
        else:
            # Past the first cache, which other processors do not see.
            line = program * BLOCK + gl.arange(0, BLOCK, top.type.layout)
            gl.store(scales_ptr + line, top, cache_modifier=".cg")
            gl.store(scales_ptr + PLACES + line, weights, cache_modifier=".cg")
            within = gl.arange(0, DIM, gl.SliceLayout(0, sums.type.layout))
            parts_place = sums_ptr + line[:, None] * DIM + within[None, :]
            gl.store(parts_place, sums, cache_modifier=".cg")
            debug_barrier()
            opener = program - part * HEADS
            if gl.atomic_add(arrived_ptr + opener, 1, sem="acq_rel") == parts - 1:
                debug_barrier()
                result = _merged(
                    sums_ptr, scales_ptr, opener, parts, row, column, PLACES, HEADS, DIM, BLOCK
                )
                gl.store(out_ptr + place, result.to(query.dtype), mask=inside)
                gl.store(arrived_ptr + opener, 0)
    # Who waits for this kernel waits for all of its programs, so that one's wait is enough; others
    # would hold their places for as long.
    if ACCOMPANIES and program == gl.num_programs(0) - 1:
        gdc_wait()


@gluon.jit
def _attend(
    query, query_tiles, query_column, own_tiles, column, keys_ptr, table_ptr, places, has_own,
    scale, WIDTH: gl.constexpr, POOL_BLOCK: gl.constexpr,
):  # fmt: skip
    """The softmax, in base 2, of one head of an item's block: what weights are relative to, their
    sums, weighted sums of values.
    """
    keys, key_bars = pair_of_tiles(own_tiles), pair_of_bars()
    values, value_bars = pair_of_tiles(own_tiles), pair_of_bars()
    query_bar = fetch_query(query, query_tiles, places[0], query_column)
    top, weights, sums, again = _attend_once(
        query, query_bar, keys, key_bars, values, value_bars, own_tiles, column, keys_ptr,
        table_ptr, places, has_own, scale, WIDTH, POOL_BLOCK, RUNNING=False,
    )  # fmt: skip
    if again:
        rewind(key_bars)
        rewind(value_bars)
        top, weights, sums, again = _attend_once(
            query, query_bar, keys, key_bars, values, value_bars, own_tiles, column, keys_ptr,
            table_ptr, places, has_own, scale, WIDTH, POOL_BLOCK, RUNNING=True,
        )  # fmt: skip
    return top, weights, sums


@gluon.jit
def _attend_once(
    query, query_bar, keys, key_bars, values, value_bars, own_tiles, column, keys_ptr, table_ptr,
    places, has_own, scale, WIDTH: gl.constexpr, POOL_BLOCK: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """See `_attend`; and whether it must be done again, with RUNNING (see `softmax`).

    The step's own tiles come first, the block itself before the others, and then the cache's. Two
    of keys and two of values are here or on their way, and the next one is asked for as soon as all
    warps are done with one. `has_own`: else the step's tokens are another part's.
    """
    BLOCK: gl.constexpr = query.shape[0]
    DIM: gl.constexpr = query.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 16])
    first, size, chunk, begin, end = places
    own = gl.where(has_own, (first - chunk) // BLOCK + 1, 1)
    for index in gl.static_range(2):
        _expect(key_bars, index, own_tiles, own)
        _expect(value_bars, index, own_tiles, own)
    for index in gl.static_range(2):
        at = first if index == 0 else chunk
        _fetch_own(keys, key_bars, index, at, own_tiles, column, own)
        _fetch_own(values, value_bars, index, at, own_tiles, WIDTH + column, own)

    # The block itself, where each token sees itself and those before it.
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    place = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    mbarrier.wait(query_bar, 0)
    mbarrier.wait(key_bars.index(0), 0)
    score = warpgroup_mma_wait(0, deps=[scores(query, keys.index(0), SCORES)])
    seen = (place[None, :] <= row[:, None]) & (place < size)[None, :] & has_own
    score = gl.where(seen, score, float("-inf"))
    top = gl.maximum(gl.max(score, axis=1) * scale, -1e30)
    weight = gl.exp2(score * scale - top[:, None])
    weights = shares(weight)
    if size < BLOCK:
        mbarrier.wait(value_bars.index(0), 0)
        clear(values.index(0), size)
    debug_barrier()
    _expect(key_bars, 2, own_tiles, own)
    _fetch_own(keys, key_bars, 2, chunk + BLOCK, own_tiles, column, own)

    sums = gl.full([BLOCK, DIM], 0.0, gl.float32, SUMS)
    ready = first_operand(weight, query.dtype, SUMS)
    top, weights, sums, ready = _attend_own(
        query, keys, key_bars, values, value_bars, own_tiles, column, chunk, own, scale,
        top, weights, sums, ready, SCORES, SUMS, WIDTH, RUNNING,
    )  # fmt: skip
    again = False
    if not RUNNING:
        again = exceeds(gl.sum(weights, axis=1), size, query.dtype)
    if begin < end:
        top, weights, sums, ready, own = _attend_cached(
            query, keys, values, keys_ptr, table_ptr, begin, end, own, scale,
            top, weights, sums, ready, SCORES, SUMS, WIDTH, POOL_BLOCK,
        )  # fmt: skip
    sums = warpgroup_mma(ready, values.index((own - 1) % 2), sums)
    top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
    return top, gl.convert_layout(gl.sum(weights, axis=1), gl.SliceLayout(1, SUMS)), sums, again


@gluon.jit
def _attend_own(
    query, keys, key_bars, values, value_bars, own_tiles, column, chunk, own, scale,
    top, weights, sums, ready, SCORES: gl.constexpr, SUMS: gl.constexpr, WIDTH: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """Goes on with the chunk's tokens before the block, all of which see. The values of the tile
    before are still to be weighed by `ready`; so are those of the last one after it.
    """
    BLOCK: gl.constexpr = query.shape[0]
    for index in range(1, own):
        before = index - 1
        at = chunk + before * BLOCK
        mbarrier.wait(key_bars.index(index % 2), index // 2 & 1)
        score = scores(query, keys.index(index % 2), SCORES)
        mbarrier.wait(value_bars.index(before % 2), before // 2 & 1)
        sums = warpgroup_mma(ready, values.index(before % 2), sums, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        top, weights, weight, old = softmax(score, scale, top, weights, RUNNING)
        sums, ready = warpgroup_mma_wait(0, deps=[sums, ready])
        debug_barrier()
        _expect(key_bars, index + 2, own_tiles, own)
        _expect(value_bars, index + 1, own_tiles, own)
        _fetch_own(keys, key_bars, index + 2, at + 2 * BLOCK, own_tiles, column, own)
        _fetch_own(values, value_bars, index + 1, at + BLOCK, own_tiles, WIDTH + column, own)
        if RUNNING:
            sums *= gl.convert_layout(old, gl.SliceLayout(1, SUMS))[:, None]
        ready = first_operand(weight, query.dtype, SUMS)
    mbarrier.wait(value_bars.index((own - 1) % 2), (own - 1) // 2 & 1)
    return top, weights, sums, ready


@gluon.jit
def _attend_cached(
    query, keys, values, keys_ptr, table_ptr, begin, end, turn, scale, top, weights, sums, ready,
    SCORES: gl.constexpr, SUMS: gl.constexpr, WIDTH: gl.constexpr, POOL_BLOCK: gl.constexpr,
):  # fmt: skip
    """Goes on likewise with the sequence's tokens [begin, end) in the pool, after `turn` tiles."""
    BLOCK: gl.constexpr = query.shape[0]
    place = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    values_ptr = keys_ptr + POOL_BLOCK * WIDTH
    after = begin + BLOCK
    _fetch(keys.index(turn % 2), keys_ptr, table_ptr, begin, end, WIDTH, POOL_BLOCK)
    _fetch(values.index(turn % 2), values_ptr, table_ptr, begin, end, WIDTH, POOL_BLOCK)
    _fetch(keys.index((turn + 1) % 2), keys_ptr, table_ptr, after, end, WIDTH, POOL_BLOCK)
    for at in range(begin, end, BLOCK):
        next_keys, last_values = keys.index(turn % 2), values.index((turn + 1) % 2)
        async_copy.wait_group(2)  # all but the keys after these and the values of these
        fence_async_shared()
        debug_barrier()
        score = scores(query, next_keys, SCORES)
        sums = warpgroup_mma(ready, last_values, sums, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        score = gl.where((at + place < end)[None, :], score, float("-inf"))
        top, weights, weight, old = softmax(score, scale, top, weights, RUNNING=True)
        sums, ready = warpgroup_mma_wait(0, deps=[sums, ready])
        debug_barrier()
        after = at + BLOCK
        _fetch(next_keys, keys_ptr, table_ptr, after + BLOCK, end, WIDTH, POOL_BLOCK)
        _fetch(last_values, values_ptr, table_ptr, after, end, WIDTH, POOL_BLOCK)
        sums = sums * gl.convert_layout(old, gl.SliceLayout(1, SUMS))[:, None]
        ready = first_operand(weight, query.dtype, SUMS)
        turn += 1
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()
    return top, weights, sums, ready, turn


@gluon.jit
def _expect(bars, index, tiles, count):
    """Before `_fetch_own`."""
    mbarrier.expect(bars.index(index % 2), tiles.block_type.nbytes, pred=index < count)


@gluon.jit
def _fetch_own(ring, bars, index, row, tiles, column, count):
    """Asks for a tile of the step's own, if there are so many."""
    place = ring.index(index % 2)
    bar = bars.index(index % 2)
    tma.async_copy_global_to_shared(tiles, [row, column], bar, place, pred=index < count)


@gluon.jit
def _fetch(tile, rows_ptr, table_ptr, at, end, WIDTH: gl.constexpr, POOL_BLOCK: gl.constexpr):
    """Asks for a tile of the cache; behind the end zeros arrive."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    token = at + gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS))
    inside = token < end
    block = gl.load(table_ptr + token // POOL_BLOCK, mask=inside, other=0).to(gl.int64)
    row = block * (2 * POOL_BLOCK) + token % POOL_BLOCK
    place = rows_ptr + (row * WIDTH)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(tile, place, mask=inside[:, None])
    async_copy.commit_group()


@gluon.jit
def _merged(
    sums_ptr, scales_ptr, opener, parts, row, column,
    PLACES: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The parts of one block's head, in their order."""
    LINE: gl.constexpr = row.type.layout
    top = gl.full([BLOCK], -1e30, gl.float32, LINE)
    weights = gl.full([BLOCK], 0.0, gl.float32, LINE)
    sums = gl.full([BLOCK, DIM], 0.0, gl.float32, LINE.parent)
    for part in range(parts):
        line = (opener + part * HEADS) * BLOCK + row
        part_top = gl.load(scales_ptr + line, cache_modifier=".cg")
        part_weights = gl.load(scales_ptr + PLACES + line, cache_modifier=".cg")
        part_sums = gl.load(sums_ptr + line[:, None] * DIM + column[None, :], cache_modifier=".cg")
        top, weights, sums = joined(top, weights, sums, part_top, part_weights, part_sums)
    return sums / weights[:, None]
