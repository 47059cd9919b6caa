"""Ragged attention for Hopper in Gluon. A CTA computes one head of one block of queries.

The dispatch table chooses it on Hopper for 16-bit data types. The reference implementation is
`tower.plain.ragged_attention`.

The pipeline is that of FlashAttention-3 (https://arxiv.org/abs/2407.08608, section 3.2): the GEMM
of one tile's probabilities with its values overlaps the softmax of the next tile. In contrast to
FlashAttention-3, probabilities are relative to the row max of the first tile instead of a running
row max, which takes a third fewer instructions (`warpgroups.softmax`). A block whose row sums
overflow is computed again with a running max.

A head of more than 64 elements consists of two TMA tiles, with 64 and 16 columns. The second tile
of a head of 72 elements also has 8 columns of the next head. These columns of the query are set to
zero before Q·Kᵀ, and these columns of the output are not stored.
"""

# Gluon's constants and launches have no types that pyright understands.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from kernels.attention.attention_tuning import HOPPER_HEAD_DIMS
from kernels.attention.segments import Segments
from kernels.attention.warpgroups import (
    LOG2_E,
    NUM_WARPS,
    TILE_LAYOUT,
    allocate_tile_pair,
    as_dot_operand,
    make_mbarrier_pair,
    overflows,
    reset_mbarriers,
    rows_layout,
    sliced_row_sum,
    softmax,
    start_scores,
    zero_rows_from,
)

_MAIN, _TAIL = 64, 16  # columns of the two tiles of a head
_BLOCK_M, _SMALL_BLOCK_M = 128, 64  # queries of a CTA
_BLOCK_N = 64  # keys of a tile
_ITEM_BYTES = gl.constexpr(2)  # bfloat16 or float16
_TAIL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)


class HopperAttention:
    """Implements `Ops.ragged_attention` for heads of `HOPPER_HEAD_DIMS` in bfloat16 or float16.

    Args:
        num_sms: number of SMs of the device. With few rows, a CTA has 64 queries instead of 128, so
            that no SM is idle.
    """

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        assert head_dim in HOPPER_HEAD_DIMS
        block_m = self.block_m(num_rows, num_heads)
        work = segments.work_list(block_m, num_rows)
        out = query.new_empty(query.shape)
        operands = ((query, block_m), (key, _BLOCK_N), (value, _BLOCK_N))
        main = [_tiles(x, rows, _MAIN) for x, rows in operands]
        tail = [_tiles(x, rows, _TAIL) for x, rows in operands] if head_dim > _MAIN else main
        ragged_attention_kernel[(work.max_blocks * num_heads,)](
            *main,
            *tail,
            work.items,
            out,
            head_dim**-0.5 * LOG2_E,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_M=block_m,
            TAIL_TILE=_TAIL if head_dim > _MAIN else 0,
            num_warps=NUM_WARPS,
        )
        return out

    def block_m(self, num_rows: int, num_heads: int) -> int:
        """Number of queries of a CTA."""
        few_rows = self._num_sms // num_heads * _BLOCK_M
        return _SMALL_BLOCK_M if num_rows <= few_rows else _BLOCK_M


def _tiles(x: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Describes `[N, heads, head_dim]` as TMA tiles of `[num_rows, num_columns]`."""
    flat = x.flatten(1)
    layout = TILE_LAYOUT if num_columns == _MAIN else _TAIL_LAYOUT
    return TensorDescriptor(
        flat, list(flat.shape), list(flat.stride()), [num_rows, num_columns], layout
    )


@gluon.jit
def ragged_attention_kernel(  # noqa: ANN201 - a kernel returns nothing
    query_tiles,
    key_tiles,
    value_tiles,
    query_tails,
    key_tails,
    value_tails,
    work_ptr,
    out_ptr,
    scale,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TAIL_TILE: gl.constexpr,
):
    """Computes one head of one block of queries.

    CTAs of the same head and segment have consecutive numbers, so that keys and values stay in L2.

    Args:
        query_tiles: TMA descriptor of query tiles `[BLOCK_M, 64]`.
        key_tiles, value_tiles: TMA descriptors of tiles `[_BLOCK_N, 64]`.
        query_tails: TMA descriptor of tails `[BLOCK_M, TAIL_TILE]`. Not used if TAIL_TILE is 0.
        key_tails, value_tails: TMA descriptors of tails `[_BLOCK_N, TAIL_TILE]`.
        work_ptr: work list, see `segments.list_work`.
        out_ptr: output `[N, HEADS, HEAD_DIM]`.
        scale: factor of the scores, in base 2.
    """
    MAIN: gl.constexpr = query_tiles.block_type.shape[1]
    TAIL: gl.constexpr = HEAD_DIM - MAIN
    program, count = gl.program_id(0), gl.load(work_ptr)
    head = program // count
    if head < HEADS:
        fields_ptr = work_ptr + (1 + program % count) * 4
        first, size = gl.load(fields_ptr), gl.load(fields_ptr + 1)
        begin, end = gl.load(fields_ptr + 2), gl.load(fields_ptr + 3)
        query = gl.allocate_shared_memory(query_tiles.dtype, [BLOCK_M, MAIN], query_tiles.layout)
        keys, values = allocate_tile_pair(key_tiles), allocate_tile_pair(value_tiles)
        if TAIL_TILE > 0:
            query_tail = gl.allocate_shared_memory(
                query_tails.dtype, [BLOCK_M, TAIL_TILE], query_tails.layout
            )
            keys_tail, values_tail = allocate_tile_pair(key_tails), allocate_tile_pair(value_tails)
        else:
            query_tail, keys_tail, values_tail = query, keys, values
        mbarriers = make_mbarrier_pair()
        query_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(query_arrived, count=1)
        fence_async_shared()
        column = head * HEAD_DIM
        mbarrier.expect(query_arrived, BLOCK_M * (MAIN + TAIL_TILE) * _ITEM_BYTES)
        if TAIL_TILE > 0:
            tma.async_copy_global_to_shared(
                query_tails, [first, column + MAIN], query_arrived, query_tail
            )
        tma.async_copy_global_to_shared(query_tiles, [first, column], query_arrived, query)
        descriptors = (key_tiles, value_tiles, key_tails, value_tails)
        tiles = (keys, values, keys_tail, values_tail)
        l_i, acc, acc_tail = _attend(
            query,
            query_tail,
            query_arrived,
            tiles,
            mbarriers,
            descriptors,
            column,
            begin,
            end,
            scale,
            TAIL,
            TAIL_TILE,
            RUNNING=False,
        )
        if overflows(l_i, size, query.dtype):
            reset_mbarriers(mbarriers)
            l_i, acc, acc_tail = _attend(
                query,
                query_tail,
                query_arrived,
                tiles,
                mbarriers,
                descriptors,
                column,
                begin,
                end,
                scale,
                TAIL,
                TAIL_TILE,
                RUNNING=True,
            )
        debug_barrier()
        place = (first.to(gl.int64) * HEADS + head) * HEAD_DIM
        query.store((acc / l_i[:, None]).to(query.dtype))
        if TAIL_TILE > 0:
            l_tail = gl.convert_layout(l_i, gl.SliceLayout(1, acc_tail.type.layout))
            query_tail.store((acc_tail / l_tail[:, None]).to(query.dtype))
        debug_barrier()
        _store(query, out_ptr + place, HEADS * HEAD_DIM, size, MAIN)
        if TAIL_TILE > 0:
            _store(query_tail, out_ptr + place + MAIN, HEADS * HEAD_DIM, size, TAIL)


@gluon.jit
def _zero_columns(tile, first: gl.constexpr):
    """Zeroes the columns of a tile in shared memory from `first` on."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    inside = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS)) < first
    tile.store(gl.where(inside[None, :], tile.load(ROWS), 0.0))
    debug_barrier()


@gluon.jit
def _store(tile, out_ptr, stride: gl.constexpr, size, COLUMNS: gl.constexpr):
    """Stores the first `size` rows and COLUMNS columns of a tile in shared memory."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS))[None, :]
    inside = (row < size) & (column < COLUMNS)
    gl.store(out_ptr + row.to(gl.int64) * stride + column, tile.load(ROWS), mask=inside)


@gluon.jit
def _attend(
    query,
    query_tail,
    query_arrived,
    tiles,
    mbarriers,
    descriptors,
    column,
    begin,
    end,
    scale,
    TAIL: gl.constexpr,
    TAIL_TILE: gl.constexpr,
    RUNNING: gl.constexpr,
):
    """Computes row sums and unnormalized outputs of one head over the segment [begin, end).

    The last tile of keys comes first, and then the other tiles in order. The keys of a tile and the
    values of the previous tile share an mbarrier; the next keys and values arrive while these are
    used. If RUNNING, probabilities are relative to the running row max instead of that of the first
    tile.
    """
    keys, values, _, values_tail = tiles
    BLOCK_M: gl.constexpr = query.shape[0]
    MAIN: gl.constexpr = query.shape[1]
    BLOCK_N: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 16])
    ACC_TAIL: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, query_tail.shape[1], 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    dtype: gl.constexpr = query.dtype
    count = (end - begin + BLOCK_N - 1) // BLOCK_N
    remaining = begin + (count - 1) * BLOCK_N
    # A whole tile if the segment is long enough, so that the row max covers many keys.
    last = gl.maximum(begin, end - BLOCK_N)
    mbarrier.expect(mbarriers.index(0), BLOCK_N * (MAIN + TAIL_TILE) * _ITEM_BYTES)
    _fetch_keys(tiles, mbarriers.index(0), descriptors, column, last, 0, True, TAIL_TILE)
    _fetch(tiles, mbarriers, descriptors, column, 1, count, begin, last, TAIL_TILE)
    mbarrier.wait(query_arrived, 0)
    if TAIL < TAIL_TILE:
        _zero_columns(query_tail, TAIL)
    q = query.load(OPERAND)
    q_tail = query_tail.load(OPERAND)
    mbarrier.wait(mbarriers.index(0), 0)
    score = warpgroup_mma_wait(0, deps=[_scores(q, q_tail, tiles, 0, SCORES, TAIL_TILE)])
    place = last + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    score = gl.where((place < end)[None, :], score, float("-inf"))
    m_i = gl.max(score, axis=1) * scale
    score = gl.where((place >= remaining)[None, :], score, float("-inf"))
    p = gl.exp2(score * scale - m_i[:, None])
    l_i = sliced_row_sum(p)
    acc = gl.full([BLOCK_M, MAIN], 0.0, gl.float32, ACC)
    acc_tail = gl.full([BLOCK_M, query_tail.shape[1]], 0.0, gl.float32, ACC_TAIL)
    if last + BLOCK_N > end:
        mbarrier.wait(mbarriers.index(1), 0)
        zero_rows_from(values.index(1), end - last)
        if TAIL_TILE > 0:
            zero_rows_from(values_tail.index(1), end - last)
    debug_barrier()
    _fetch(tiles, mbarriers, descriptors, column, 2, count, begin, last, TAIL_TILE)
    p = as_dot_operand(p, dtype, ACC)
    for index in range(1, count):
        slot = index % 2
        mbarrier.wait(mbarriers.index(slot), index // 2 & 1)
        score = _scores(q, q_tail, tiles, slot, SCORES, TAIL_TILE)
        acc = warpgroup_mma(p, values.index(slot), acc, is_async=True)
        if TAIL_TILE > 0:
            p_tail = gl.convert_layout(p, gl.DotOperandLayout(0, ACC_TAIL, 2))
            acc_tail = warpgroup_mma(p_tail, values_tail.index(slot), acc_tail, is_async=True)
            score = warpgroup_mma_wait(2, deps=[score])
        else:
            score = warpgroup_mma_wait(1, deps=[score])
        m_i, l_i, next_p, alpha = softmax(score, scale, m_i, l_i, RUNNING)
        if TAIL_TILE > 0:
            acc, acc_tail, p = warpgroup_mma_wait(0, deps=[acc, acc_tail, p])
        else:
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        debug_barrier()
        _fetch(tiles, mbarriers, descriptors, column, index + 2, count, begin, last, TAIL_TILE)
        if RUNNING:
            acc *= gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
            if TAIL_TILE > 0:
                acc_tail *= gl.convert_layout(alpha, gl.SliceLayout(1, ACC_TAIL))[:, None]
        p = as_dot_operand(next_p, dtype, ACC)
    slot = count % 2
    mbarrier.wait(mbarriers.index(slot), count // 2 & 1)
    acc = warpgroup_mma(p, values.index(slot), acc)
    if TAIL_TILE > 0:
        p_tail = gl.convert_layout(p, gl.DotOperandLayout(0, ACC_TAIL, 2))
        acc_tail = warpgroup_mma(p_tail, values_tail.index(slot), acc_tail)
    return gl.convert_layout(gl.sum(l_i, axis=1), gl.SliceLayout(1, ACC)), acc, acc_tail


@gluon.jit
def _scores(q, q_tail, tiles, slot, SCORES: gl.constexpr, TAIL_TILE: gl.constexpr):
    """Starts Q·Kᵀ with a tile of keys, and returns the scores in flight."""
    keys, _, keys_tail, _ = tiles
    score = start_scores(q, keys.index(slot), SCORES)
    if TAIL_TILE > 0:
        columns = keys_tail.index(slot).permute((1, 0))
        score = warpgroup_mma(q_tail, columns, score, is_async=True)
    return score


@gluon.jit
def _fetch(
    tiles, mbarriers, descriptors, column, index, count, begin, last, TAIL_TILE: gl.constexpr
):
    """Starts the copies of a tile's keys and of the previous tile's values, if they exist."""
    keys, values, _, values_tail = tiles
    _, value_tiles, _, value_tails = descriptors
    slot = index % 2
    arrived = mbarriers.index(slot)
    at = begin + (index - 1) * keys.shape[1]
    before = gl.where(index == 1, last, at - keys.shape[1])
    TILE_BYTES: gl.constexpr = keys.shape[1] * (keys.shape[2] + TAIL_TILE) * _ITEM_BYTES
    mbarrier.expect(arrived, 2 * TILE_BYTES, pred=index < count)
    mbarrier.expect(arrived, TILE_BYTES, pred=index == count)
    _fetch_keys(tiles, arrived, descriptors, column, at, slot, index < count, TAIL_TILE)
    tma.async_copy_global_to_shared(
        value_tiles, [before, column], arrived, values.index(slot), pred=index <= count
    )
    if TAIL_TILE > 0:
        tma.async_copy_global_to_shared(
            value_tails,
            [before, column + keys.shape[2]],
            arrived,
            values_tail.index(slot),
            pred=index <= count,
        )


@gluon.jit
def _fetch_keys(tiles, arrived, descriptors, column, at, slot, wanted, TAIL_TILE: gl.constexpr):
    """Starts the copies of a tile's keys."""
    keys, _, keys_tail, _ = tiles
    key_tiles, _, key_tails, _ = descriptors
    tma.async_copy_global_to_shared(key_tiles, [at, column], arrived, keys.index(slot), pred=wanted)
    if TAIL_TILE > 0:
        tma.async_copy_global_to_shared(
            key_tails, [at, column + keys.shape[2]], arrived, keys_tail.index(slot), pred=wanted
        )
