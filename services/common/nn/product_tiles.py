"""Matrix products on Hopper whose tiles another warp group finishes, in Gluon.

There a tile's sums lie in the registers of those who multiply: whatever they do to them first, the
tensor cores wait. Here two warp groups leave a tile in shared memory, rounded, and go on with the
next one. A third group, whose function is the caller's, does the rest meanwhile and writes the
result. One program per processor goes through the tiles.

The sums are in the order of cuBLAS' kernels for Hopper: products were the same, bit for bit,
wherever they were compared.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - blocks and constants of the kernel's compiler
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

import functools
from typing import Any

import torch
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

from services.common.nn import launches

ROWS = gl.constexpr(256)  # of a tile: features
_TOKENS, _COLUMNS = gl.constexpr(128), gl.constexpr(64)
_STAGES = gl.constexpr(3)  # columns that are here or on their way
_GROUP = gl.constexpr(16)  # tiles of tokens that share rows of the weight in the second cache
_CHUNK = gl.constexpr(16)  # tokens that are finished together
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
FINISHING_WARPS, FINISHING_REGISTERS = gl.constexpr(4), gl.constexpr(128)
# All of a processor's registers, shared by the three groups at first.
OPTIONS: dict[str, Any] = {"num_warps": 8, "maxnreg": 168}
_LEAST_IN_USE = 1 / 1.12  # of the processors: with less, a product and another kernel gain


@functools.cache
def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether such a kernel takes less time than a product and another one: where tiles fill the
    processors, on Hopper.
    """
    num_tokens, num_columns = x.shape
    if x.itemsize != 2 or not x.is_contiguous() or not launches.are_free(num_tokens):
        return False
    if num_columns % _COLUMNS.value or len(weight) % ROWS.value:
        return False
    tiles = _count(num_tokens, len(weight))
    return _is_hopper() and launches.share_in_use(tiles) >= _LEAST_IN_USE


def grid(num_tokens: int, num_rows: int) -> tuple[int]:
    """The programs."""
    return (min(_count(num_tokens, num_rows), launches.PROCESSORS),)


def operands(x: Tensor, weight: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """How the copy engine finds tiles of `[T, K]` and `[N, K]`."""
    return (
        TensorDescriptor.from_tensor(x, [_TOKENS.value, _COLUMNS.value], _TILE),
        TensorDescriptor.from_tensor(weight, [ROWS.value, _COLUMNS.value], _TILE),
    )


def sizes(weight: Tensor) -> dict[str, int]:
    """What a kernel must know of it: tiles beside each other, and steps through its columns."""
    return {"WIDE": len(weight) // ROWS.value, "STEPS": weight.shape[1] // _COLUMNS.value}


def _count(num_tokens: int, num_rows: int) -> int:
    return -(-num_tokens // _TOKENS.value) * (num_rows // ROWS.value)


@gluon.jit
def make_place(x_tiles):
    """Memory for a tile between the groups, by chunks of tokens, and what says that it is full, or
    free again.
    """
    shape: gl.constexpr = [_TOKENS // _CHUNK, _CHUNK, ROWS]
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    place = gl.allocate_shared_memory(x_tiles.dtype, shape, layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(bars.index(index), count=1)
    return place, bars.index(0), bars.index(1)


@gluon.jit
def make_ring(x_tiles, weight_tiles):
    """Memory for what is multiplied next, and what says that it has arrived. Its fence is for all
    barriers that were made before.
    """
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [_STAGES, _TOKENS, _COLUMNS], x_tiles.layout)
    weight_ring = gl.allocate_shared_memory(
        weight_tiles.dtype, [_STAGES, ROWS, _COLUMNS], weight_tiles.layout
    )
    arrived = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(_STAGES):
        mbarrier.init(arrived.index(index), count=1)
    fence_async_shared()
    return x_ring, weight_ring, arrived


@gluon.jit
def count_tiles(num_tokens, WIDE: gl.constexpr):
    """How many this program has; `WIDE` lie beside each other."""
    all_tiles = (num_tokens + _TOKENS - 1) // _TOKENS * WIDE
    return (all_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def tile_at(index, num_tokens, WIDE: gl.constexpr):
    """First token and first row of this program's tile. A group of tiles of tokens goes through all
    rows of the weight together.
    """
    high = (num_tokens + _TOKENS - 1) // _TOKENS
    number = gl.program_id(0) + index * gl.num_programs(0)
    group = number // (_GROUP * WIDE)
    within = number % (_GROUP * WIDE)
    # Behind the last tile there is none, and who asks does not use it.
    size = gl.maximum(gl.minimum(high - group * _GROUP, _GROUP), 1)
    return (group * _GROUP + within % size) * _TOKENS, within // size * ROWS


@gluon.jit
def multiply(
    x_tiles, weight_tiles, bias_ptr, ring, place, num_tokens, WIDE: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """What the two groups do, with `STEPS` tiles of columns; `bias_ptr` may be None."""
    x_ring, weight_ring, arrived = ring
    parked, full, free = place
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    count = count_tiles(num_tokens, WIDE)
    for index in gl.static_range(_STAGES - 1):
        _fetch(index, count * STEPS, x_tiles, weight_tiles, ring, num_tokens, WIDE, STEPS)
    target = parked._reinterpret(x_tiles.dtype, [_TOKENS, ROWS], parked.layout)
    for index in range(count):
        sums = gl.full([_TOKENS, ROWS], 0.0, gl.float32, SUMS)
        for step in range(STEPS):
            at = index * STEPS + step
            slot = at % _STAGES
            mbarrier.wait(arrived.index(slot), at // _STAGES & 1)
            columns = weight_ring.index(slot).permute((1, 0))
            sums = warpgroup_mma(x_ring.index(slot), columns, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            debug_barrier()  # all warps are done with what is written over now
            ahead = at + _STAGES - 1
            _fetch(ahead, count * STEPS, x_tiles, weight_tiles, ring, num_tokens, WIDE, STEPS)
        if bias_ptr is not None:
            row = tile_at(index, num_tokens, WIDE)[1]
            bias = gl.load(bias_ptr + row + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)))
        sums = warpgroup_mma_wait(0, deps=[sums])
        if bias_ptr is not None:
            sums += bias.to(gl.float32)[None, :]
        mbarrier.wait(free, index & 1 ^ 1)
        target.store(sums.to(x_tiles.dtype))
        debug_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _fetch(
    at, total, x_tiles, weight_tiles, ring, num_tokens, WIDE: gl.constexpr, STEPS: gl.constexpr
):
    """Asks for the tiles of one step, if there are so many; the next tile's follow the last's."""
    x_ring, weight_ring, arrived = ring
    token, row = tile_at(at // STEPS, num_tokens, WIDE)
    column, slot = at % STEPS * _COLUMNS, at % _STAGES
    bar = arrived.index(slot)
    both: gl.constexpr = x_tiles.block_type.nbytes + weight_tiles.block_type.nbytes
    wanted = at < total
    mbarrier.expect(bar, both, pred=wanted)
    tma.async_copy_global_to_shared(x_tiles, [token, column], bar, x_ring.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(
        weight_tiles, [row, column], bar, weight_ring.index(slot), pred=wanted
    )


@gluon.jit
def release(free):
    """Lets the next tile into its place, once all warps have read the last one."""
    debug_barrier()
    mbarrier.arrive(free, count=1)


@gluon.constexpr_function
def pairs_layout(half: int) -> gl.DistributedLinearLayout:
    """How the finishing threads share a chunk of a tile, 16 tokens of 256 features: 8 elements of a
    row each, and those `half` further.
    """
    others = [[0, 1 << bit] for bit in range(3, 8) if 1 << bit != half]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, half], [8, 0]],
        lane_bases=[*others, [1, 0]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[16, 256],
    )


@gluon.constexpr_function
def angles_layout(half: int) -> gl.SliceLayout:
    """As they share rows of `half`, that go with each head of a chunk's rows."""
    others = [1 << bit for bit in range(3, 8) if 1 << bit != half]
    heads = [[0, 0, bit] if bit < half else [0, bit // (2 * half), 0] for bit in others]
    layout = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]],
        lane_bases=[*heads, [1, 0, 0]],
        warp_bases=[[2, 0, 0], [4, 0, 0]],
        block_bases=[],
        shape=[16, 128 // half, half],
    )
    return gl.SliceLayout(1, layout)


@gluon.jit
def rows_of(ptr, start, end, COUNT: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows from `start`, of which those before `end` are there: `[COUNT, WIDTH]`."""
    row = start + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(ptr + row * WIDTH + column, mask=row < end, other=0.0)


@gluon.jit
def over_heads(rows, half):
    """`rows_of` beside `[tokens, heads, HALF]` of `halves`."""
    return gl.convert_layout(rows[:, None, :], half.type.layout, assert_trivial=True)


@gluon.jit
def halves(product, HALF: gl.constexpr):
    """`[tokens, ROWS]` by heads: their first and second halves, `[tokens, heads, HALF]` each."""
    heads: gl.constexpr = product.shape[1] // (2 * HALF)
    split = product.reshape([product.shape[0], heads, 2, HALF]).permute((0, 1, 3, 2))
    return split.split()


@gluon.jit
def whole(first, second, LAYOUT: gl.constexpr):
    """What `halves` has taken apart."""
    both = gl.join(first, second).permute((0, 1, 3, 2))
    rows = both.reshape([both.shape[0], both.shape[1] * both.shape[2] * both.shape[3]])
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)
