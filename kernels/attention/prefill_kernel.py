"""Gluon device code of `prefill_attention`, which describes the algorithm."""

# Gluon's constants and launches have no types that pyright understands.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

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

from kernels.attention.fp8_codec import decode_e4m3
from kernels.attention.paged_decode_attention import merge_softmax
from kernels.attention.warpgroups import (
    allocate_tile_pair,
    as_dot_operand,
    load_query,
    make_mbarrier_pair,
    overflows,
    reset_mbarriers,
    rows_layout,
    sliced_row_sum,
    softmax,
    start_scores,
    zero_rows_from,
)


@gluon.jit
def prefill_kernel(  # noqa: ANN201 - a kernel returns nothing
    query_tiles,
    own_tiles,
    cache_ptr,
    scales_ptr,
    block_ids_ptr,
    work_ptr,
    acc_ptr,
    m_l_ptr,
    arrived_ptr,
    out_ptr,
    scale,
    SCRATCH: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    FIELDS: gl.constexpr,
    FP8: gl.constexpr,
    BESIDE_DECODE: gl.constexpr,
):
    """Computes one head of one work item, see `PrefillAttention.list_work`."""
    cta = gl.program_id(0)
    fields_ptr = work_ptr + cta // HEADS * FIELDS
    head = cta % HEADS
    # All loads are issued before the first use, so that their latencies overlap.
    first, size = gl.load(fields_ptr), gl.load(fields_ptr + 1)
    chunk, table_ptr = gl.load(fields_ptr + 2), block_ids_ptr + gl.load(fields_ptr + 3)
    begin, end = gl.load(fields_ptr + 4), gl.load(fields_ptr + 5)
    num_splits, split = gl.load(fields_ptr + 6), gl.load(fields_ptr + 7)
    if not BESIDE_DECODE:
        gdc_wait()
    if size > 0:
        query = gl.allocate_shared_memory(query_tiles.dtype, [TILE, DIM], query_tiles.layout)
        kv_head = head // (HEADS // KV_HEADS)
        keys_at = kv_head * DIM
        if FP8:
            scale *= gl.load(scales_ptr + kv_head)
        m_i, l_i, acc = _attend(
            query,
            query_tiles,
            head * DIM,
            own_tiles,
            keys_at,
            cache_ptr + keys_at,
            table_ptr,
            (first, size, chunk, begin, end),
            split == num_splits - 1,
            scale,
            KV_HEADS * DIM,
            BLOCK_SIZE,
        )
        if FP8:
            acc *= gl.load(scales_ptr + KV_HEADS + kv_head)
        ROWS: gl.constexpr = rows_layout(DIM, gl.num_warps())
        row = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
        column = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
        inside = (row < size)[:, None]
        offset = ((first + row) * HEADS + head)[:, None] * DIM + column[None, :]
        if num_splits == 1:
            query.store((acc / l_i[:, None]).to(query.dtype))
            gl.store(out_ptr + offset, query.load(ROWS), mask=inside)
        else:
            # `.cg` bypasses L1, which is not coherent between SMs.
            line = cta * TILE + gl.arange(0, TILE, m_i.type.layout)
            gl.store(m_l_ptr + line, m_i, cache_modifier=".cg")
            gl.store(m_l_ptr + SCRATCH + line, l_i, cache_modifier=".cg")
            within = gl.arange(0, DIM, gl.SliceLayout(0, acc.type.layout))
            acc_ptrs = acc_ptr + line[:, None] * DIM + within[None, :]
            gl.store(acc_ptrs, acc, cache_modifier=".cg")
            debug_barrier()
            first_cta = cta - split * HEADS
            if gl.atomic_add(arrived_ptr + first_cta, 1, sem="acq_rel") == num_splits - 1:
                debug_barrier()
                result = _merge_splits(
                    acc_ptr, m_l_ptr, first_cta, num_splits, row, column, SCRATCH, HEADS, DIM, TILE
                )
                gl.store(out_ptr + offset, result.to(query.dtype), mask=inside)
                gl.store(arrived_ptr + first_cta, 0)
    # The next kernel waits for all CTAs of this kernel, so it is enough if one CTA waits for the
    # previous kernel. Other waiting CTAs would occupy their SMs.
    if BESIDE_DECODE and cta == gl.num_programs(0) - 1:
        gdc_wait()


@gluon.jit
def _attend(
    query,
    query_tiles,
    query_column,
    own_tiles,
    column,
    keys_ptr,
    table_ptr,
    item,
    has_own,
    scale,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Computes row max, row sum and accumulator, in base 2, of one head of a work item.

    The row max may be that of the first tile only, see `warpgroups.softmax`.
    """
    keys, k_mbars = allocate_tile_pair(own_tiles), make_mbarrier_pair()
    values, v_mbars = allocate_tile_pair(own_tiles), make_mbarrier_pair()
    query_arrived = load_query(query, query_tiles, item[0], query_column)
    m_i, l_i, acc, overflowed = _attend_pass(
        query,
        query_arrived,
        keys,
        k_mbars,
        values,
        v_mbars,
        own_tiles,
        column,
        keys_ptr,
        table_ptr,
        item,
        has_own,
        scale,
        WIDTH,
        BLOCK_SIZE,
        RUNNING=False,
    )
    if overflowed:
        reset_mbarriers(k_mbars)
        reset_mbarriers(v_mbars)
        m_i, l_i, acc, overflowed = _attend_pass(
            query,
            query_arrived,
            keys,
            k_mbars,
            values,
            v_mbars,
            own_tiles,
            column,
            keys_ptr,
            table_ptr,
            item,
            has_own,
            scale,
            WIDTH,
            BLOCK_SIZE,
            RUNNING=True,
        )
    return m_i, l_i, acc


@gluon.jit
def _attend_pass(
    query,
    query_arrived,
    keys,
    k_mbars,
    values,
    v_mbars,
    own_tiles,
    column,
    keys_ptr,
    table_ptr,
    item,
    has_own,
    scale,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUNNING: gl.constexpr,
):
    """Makes one pass of `_attend`, and returns also whether a row sum has overflowed.

    `_attend` then repeats the pass with RUNNING. The tiles of the step itself come first, beginning
    with the diagonal tile, and then the cached tiles. Keys and values have a double buffer each.
    The next load is issued as soon as all warps have used a tile. `has_own` is False if another
    split has the tokens of the step itself.
    """
    TILE: gl.constexpr = query.shape[0]
    DIM: gl.constexpr = query.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 16])
    first, size, chunk, begin, end = item
    num_own = gl.where(has_own, (first - chunk) // TILE + 1, 1)
    for index in gl.static_range(2):
        _expect(k_mbars, index, own_tiles, num_own)
        _expect(v_mbars, index, own_tiles, num_own)
    for index in gl.static_range(2):
        at = first if index == 0 else chunk
        _load_own(keys, k_mbars, index, at, own_tiles, column, num_own)
        _load_own(values, v_mbars, index, at, own_tiles, WIDTH + column, num_own)

    # In the diagonal tile a token attends to itself and to earlier tokens.
    row = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    key = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    mbarrier.wait(query_arrived, 0)
    mbarrier.wait(k_mbars.index(0), 0)
    score = warpgroup_mma_wait(0, deps=[start_scores(query, keys.index(0), SCORES)])
    attended = (key[None, :] <= row[:, None]) & (key < size)[None, :] & has_own
    score = gl.where(attended, score, float("-inf"))
    m_i = gl.maximum(gl.max(score, axis=1) * scale, -1e30)
    p = gl.exp2(score * scale - m_i[:, None])
    l_i = sliced_row_sum(p)
    if size < TILE:
        mbarrier.wait(v_mbars.index(0), 0)
        zero_rows_from(values.index(0), size)
    debug_barrier()
    _expect(k_mbars, 2, own_tiles, num_own)
    _load_own(keys, k_mbars, 2, chunk + TILE, own_tiles, column, num_own)

    acc = gl.full([TILE, DIM], 0.0, gl.float32, ACC)
    p_op = as_dot_operand(p, query.dtype, ACC)
    m_i, l_i, acc, p_op = _attend_own(
        query,
        keys,
        k_mbars,
        values,
        v_mbars,
        own_tiles,
        column,
        chunk,
        num_own,
        scale,
        m_i,
        l_i,
        acc,
        p_op,
        SCORES,
        ACC,
        WIDTH,
        RUNNING,
    )
    overflowed = False
    if not RUNNING:
        overflowed = overflows(gl.sum(l_i, axis=1), size, query.dtype)
    if begin < end:
        if keys_ptr.dtype.element_ty == gl.uint8:
            m_i, l_i, acc, p_op, num_own = _attend_fp8(
                query,
                keys,
                values,
                keys_ptr,
                table_ptr,
                begin,
                end,
                num_own,
                scale,
                m_i,
                l_i,
                acc,
                p_op,
                SCORES,
                ACC,
                WIDTH,
                BLOCK_SIZE,
            )
        else:
            m_i, l_i, acc, p_op, num_own = _attend_cached(
                query,
                keys,
                values,
                keys_ptr,
                table_ptr,
                begin,
                end,
                num_own,
                scale,
                m_i,
                l_i,
                acc,
                p_op,
                SCORES,
                ACC,
                WIDTH,
                BLOCK_SIZE,
            )
    acc = warpgroup_mma(p_op, values.index((num_own - 1) % 2), acc)
    m_i = gl.convert_layout(m_i, gl.SliceLayout(1, ACC))
    return m_i, gl.convert_layout(gl.sum(l_i, axis=1), gl.SliceLayout(1, ACC)), acc, overflowed


@gluon.jit
def _attend_own(
    query,
    keys,
    k_mbars,
    values,
    v_mbars,
    own_tiles,
    column,
    chunk,
    num_own,
    scale,
    m_i,
    l_i,
    acc,
    p_op,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
    WIDTH: gl.constexpr,
    RUNNING: gl.constexpr,
):
    """Continues with the chunk's tokens before the diagonal tile.

    The GEMM of probabilities and values is one tile late: `p_op` has the probabilities of the
    previous tile, both as argument and as result.
    """
    TILE: gl.constexpr = query.shape[0]
    for index in range(1, num_own):
        before = index - 1
        at = chunk + before * TILE
        mbarrier.wait(k_mbars.index(index % 2), index // 2 & 1)
        score = start_scores(query, keys.index(index % 2), SCORES)
        mbarrier.wait(v_mbars.index(before % 2), before // 2 & 1)
        acc = warpgroup_mma(p_op, values.index(before % 2), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        m_i, l_i, p, alpha = softmax(score, scale, m_i, l_i, RUNNING)
        acc, p_op = warpgroup_mma_wait(0, deps=[acc, p_op])
        debug_barrier()
        _expect(k_mbars, index + 2, own_tiles, num_own)
        _expect(v_mbars, index + 1, own_tiles, num_own)
        _load_own(keys, k_mbars, index + 2, at + 2 * TILE, own_tiles, column, num_own)
        _load_own(values, v_mbars, index + 1, at + TILE, own_tiles, WIDTH + column, num_own)
        if RUNNING:
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        p_op = as_dot_operand(p, query.dtype, ACC)
    mbarrier.wait(v_mbars.index((num_own - 1) % 2), (num_own - 1) // 2 & 1)
    return m_i, l_i, acc, p_op


@gluon.jit
def _attend_cached(
    query,
    keys,
    values,
    keys_ptr,
    table_ptr,
    begin,
    end,
    turn,
    scale,
    m_i,
    l_i,
    acc,
    p_op,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Continues with the cached tokens [begin, end), after `turn` tiles."""
    TILE: gl.constexpr = query.shape[0]
    key = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    values_ptr = keys_ptr + BLOCK_SIZE * WIDTH
    after = begin + TILE
    _load_cached(keys.index(turn % 2), keys_ptr, table_ptr, begin, end, WIDTH, BLOCK_SIZE)
    _load_cached(values.index(turn % 2), values_ptr, table_ptr, begin, end, WIDTH, BLOCK_SIZE)
    _load_cached(keys.index((turn + 1) % 2), keys_ptr, table_ptr, after, end, WIDTH, BLOCK_SIZE)
    for at in range(begin, end, TILE):
        next_keys, last_values = keys.index(turn % 2), values.index((turn + 1) % 2)
        async_copy.wait_group(2)  # this tile's values and the next tile's keys may be in flight
        fence_async_shared()
        debug_barrier()
        score = start_scores(query, next_keys, SCORES)
        acc = warpgroup_mma(p_op, last_values, acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        score = gl.where((at + key < end)[None, :], score, float("-inf"))
        m_i, l_i, p, alpha = softmax(score, scale, m_i, l_i, RUNNING=True)
        acc, p_op = warpgroup_mma_wait(0, deps=[acc, p_op])
        debug_barrier()
        after = at + TILE
        _load_cached(next_keys, keys_ptr, table_ptr, after + TILE, end, WIDTH, BLOCK_SIZE)
        _load_cached(last_values, values_ptr, table_ptr, after, end, WIDTH, BLOCK_SIZE)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        p_op = as_dot_operand(p, query.dtype, ACC)
        turn += 1
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()
    return m_i, l_i, acc, p_op, turn


@gluon.jit
def _attend_fp8(
    query,
    keys,
    values,
    keys_ptr,
    table_ptr,
    begin,
    end,
    turn,
    scale,
    m_i,
    l_i,
    acc,
    p_op,
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Continues with the cached tokens [begin, end) of an e4m3 cache, see `_attend_cached`.

    The bytes of a tile are loaded to registers while the GEMMs of the previous tile run.
    """
    TILE: gl.constexpr = query.shape[0]
    DIM: gl.constexpr = query.shape[1]
    key = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    values_ptr = keys_ptr + BLOCK_SIZE * WIDTH
    next_keys = _load_bytes(keys_ptr, table_ptr, begin, end, TILE, DIM, WIDTH, BLOCK_SIZE)
    next_values = _load_bytes(values_ptr, table_ptr, begin, end, TILE, DIM, WIDTH, BLOCK_SIZE)
    keys.index(turn % 2).store(decode_e4m3(next_keys, query.dtype))
    values.index(turn % 2).store(decode_e4m3(next_values, query.dtype))
    for at in range(begin, end, TILE):
        after, other = at + TILE, (turn + 1) % 2
        next_keys = _load_bytes(keys_ptr, table_ptr, after, end, TILE, DIM, WIDTH, BLOCK_SIZE)
        next_values = _load_bytes(values_ptr, table_ptr, after, end, TILE, DIM, WIDTH, BLOCK_SIZE)
        fence_async_shared()
        debug_barrier()
        score = start_scores(query, keys.index(turn % 2), SCORES)
        acc = warpgroup_mma(p_op, values.index(other), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        score = gl.where((at + key < end)[None, :], score, float("-inf"))
        m_i, l_i, p, alpha = softmax(score, scale, m_i, l_i, RUNNING=True)
        acc, p_op = warpgroup_mma_wait(0, deps=[acc, p_op])
        debug_barrier()
        keys.index(other).store(decode_e4m3(next_keys, query.dtype))
        values.index(other).store(decode_e4m3(next_values, query.dtype))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        p_op = as_dot_operand(p, query.dtype, ACC)
        turn += 1
    fence_async_shared()
    debug_barrier()
    return m_i, l_i, acc, p_op, turn


@gluon.jit
def _load_bytes(
    rows_ptr,
    table_ptr,
    at,
    end,
    TILE: gl.constexpr,
    DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Loads a tile of the KV cache to registers. Rows from `end` on are zeros."""
    ROWS: gl.constexpr = rows_layout(DIM, gl.num_warps())
    ptr, inside = _cached_rows(rows_ptr, table_ptr, at, end, TILE, DIM, ROWS, WIDTH, BLOCK_SIZE)
    return gl.load(ptr, mask=inside, other=0)


@gluon.jit
def _cached_rows(
    rows_ptr,
    table_ptr,
    at,
    end,
    TILE: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Returns the pointers to a tile of the KV cache, and which of its rows are before `end`."""
    token = at + gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
    inside = token < end
    block = gl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0).to(gl.int64)
    row = block * (2 * BLOCK_SIZE) + token % BLOCK_SIZE
    return rows_ptr + (row * WIDTH)[:, None] + column[None, :], inside[:, None]


@gluon.jit
def _expect(mbars, index, tiles, count):
    """Arms the mbarrier of a load. Called before `_load_own`."""
    mbarrier.expect(mbars.index(index % 2), tiles.block_type.nbytes, pred=index < count)


@gluon.jit
def _load_own(buffers, mbars, index, row, tiles, column, count):
    """Starts the TMA load of tile `index` of the step's keys or values, of `count` tiles."""
    tile, mbar = buffers.index(index % 2), mbars.index(index % 2)
    tma.async_copy_global_to_shared(tiles, [row, column], mbar, tile, pred=index < count)


@gluon.jit
def _load_cached(tile, rows_ptr, table_ptr, at, end, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Starts the gather of a tile from the KV cache. Rows from `end` on become zeros."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    ptr, inside = _cached_rows(
        rows_ptr, table_ptr, at, end, tile.shape[0], tile.shape[1], ROWS, WIDTH, BLOCK_SIZE
    )
    async_copy.async_copy_global_to_shared(tile, ptr, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _merge_splits(
    acc_ptr,
    m_l_ptr,
    first_cta,
    num_splits,
    row,
    column,
    SCRATCH: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
):
    """Merges the splits of one head of a work item, in their order."""
    LINE: gl.constexpr = row.type.layout
    m_i = gl.full([TILE], -1e30, gl.float32, LINE)
    l_i = gl.full([TILE], 0.0, gl.float32, LINE)
    acc = gl.full([TILE, DIM], 0.0, gl.float32, LINE.parent)
    for split in range(num_splits):
        line = (first_cta + split * HEADS) * TILE + row
        part_m = gl.load(m_l_ptr + line, cache_modifier=".cg")
        part_l = gl.load(m_l_ptr + SCRATCH + line, cache_modifier=".cg")
        part_acc = gl.load(acc_ptr + line[:, None] * DIM + column[None, :], cache_modifier=".cg")
        m_i, l_i, acc = merge_softmax(m_i, l_i, acc, part_m, part_l, part_acc)
    return acc / l_i[:, None]
