"""The changes of adapters within the grid of a skinny GEMM, which then needs no other launch.

The first programs of the grid multiply the tokens by tiles of rows of the factors `a` of all slots,
as the others multiply them by rows of the weight. There are few tiles, so their columns are split
among programs, too. The last program of a tile to arrive adds the partial products in a fixed
order, rounds them once, and increments a count for each CTA of the GEMM. The first programs ask the
L2 cache for `a` before the layer's input is there, because later the first weights of all CTAs of
the GEMM would be ahead of `a`.

A CTA of the GEMM loads its part of the factors `b` of all slots before its main loop. After the
loop, it waits until all tiles are counted, which they mostly are, and multiplies the products by
`b` in one more step of the loop. With split-K, each split adds the changes of some of the slots. A
token's products stand at the columns of its own slot, and zeros at all others. Factors that are not
finite are refused (`Adapters.load`), so no token depends on another token's adapter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.changes import LEAST_RANK, MODULES, Changes
from kernels.gemm.factor_columns import load_factors, load_products, used_columns
from kernels.hand_over import prefetch, wait_for_count
from kernels.tuning import SkinnyConfig

_PART_TILES = 8  # pipeline stages' worth of columns of `a` of a program
_BLOCK = 128  # columns of `b` that a CTA multiplies at the same time
_COUNTS = tl.constexpr(128)  # counts that a program increments at the same time


@dataclass(frozen=True, slots=True)
class ChangesLaunch:
    """Grid and arguments of a launch of the skinny GEMM with changes.

    Attributes:
        programs: number of programs before those of the GEMM.
        arguments: arguments of the kernel.
        constants: constants of the kernel.
    """

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, int]

    @classmethod
    def of(
        cls, changes: Changes | None, x: Tensor, config: SkinnyConfig, splits: int
    ) -> "ChangesLaunch":
        """Prepares a launch, and allocates the memory of products.

        Args:
            changes: the changes. None if the launch has none.
            x: `[T, K]`, input of the layer.
            config: configuration of the GEMM.
            splits: number of splits of K.
        """
        if changes is None:
            names = "MODULES", "RANK", "PARTS", "PART_SPAN", "BLOCK", "BLOCKS"
            return cls(0, (None,) * 6 + (0,) * 6, dict.fromkeys(names, 0))
        slots, modules, rank, num_columns = changes.a.shape
        assert modules <= MODULES, f"{modules} modules"
        height, span = modules * rank, _PART_TILES * config.tile
        parts = triton.cdiv(num_columns, span)
        tiles = triton.cdiv((changes.last - changes.first) * height, config.rows)
        width = triton.cdiv(slots * rank, splits)
        block = min(_BLOCK, max(LEAST_RANK, triton.next_power_of_2(width)))
        return cls(
            tiles * parts,
            (
                changes.a,
                changes.b,
                changes.slots,
                changes.words,
                torch.empty(parts, len(x), height, dtype=torch.float32, device=x.device),
                x.new_empty(len(x), height),
                changes.b.stride(0),
                changes.first,
                changes.last,
                *[*changes.sizes, 0, 0, 0][:3],
            ),
            {
                "MODULES": modules,
                "RANK": rank,
                "PARTS": parts,
                "PART_SPAN": span,
                "BLOCK": block,
                "BLOCKS": triton.cdiv(width, block),
            },
        )


@triton.jit
def num_tiles(  # noqa: ANN201 - Triton blocks have no type
    first_slot, last_slot, HEIGHT: tl.constexpr, ROWS: tl.constexpr
):
    """Number of tiles of ROWS rows of the factors `a` of a range of slots, each of HEIGHT rows."""
    return tl.cdiv((last_slot - first_slot) * HEIGHT, ROWS)


@triton.jit
def shrink_tile(  # noqa: ANN201 - nothing
    program,
    x_ptr,
    a_ptr,
    slots_ptr,
    words_ptr,
    partials_ptr,
    products_ptr,
    num_tokens,
    num_columns,
    num_counts,
    first_slot,
    last_slot,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies the tokens by a part of the columns of a tile of rows of `a`.

    Args:
        program: index of the part of a tile.
        x_ptr: `[T, K]`, input of the layer.
        a_ptr: `[slots, HEIGHT, K]`, factors.
        slots_ptr: `[T]`, slot of each token.
        words_ptr: counts of the GEMM's CTAs, then counts of the tiles.
        partials_ptr: `[PARTS, T, HEIGHT]`, partial products of each token's slot.
        products_ptr: `[T, HEIGHT]`, products of each token's slot.
        num_tokens, num_columns: T and K.
        num_counts: number of CTAs of the GEMM.
        first_slot, last_slot: range of slots that may occur.
        TOKENS: power of two, at least T.
        ROWS: number of rows of a tile.
        TILE: columns of a pipeline stage.
        STAGES: pipeline stages.
        HEIGHT: number of rows of a slot, of all modules.
        PARTS: number of parts.
        SPAN: columns of a part.
        PDL: mode of dependent launch.
    """
    tiles = num_tiles(first_slot, last_slot, HEIGHT, ROWS)
    tile, part = program % tiles, program // tiles
    row = first_slot * HEIGHT + tile * ROWS + tl.arange(0, ROWS)  # of all slots
    token = tl.arange(0, TOKENS)
    slot = slots_of(slots_ptr, token, num_tokens)
    own = tl.max_constancy(slot[:, None] == (row // HEIGHT)[None, :], [1, 16])  # the smallest rank
    is_row = tl.max(own.to(tl.int32), 0) > 0
    is_token = tl.max(own.to(tl.int32), 1) > 0
    is_used = tl.max(is_row.to(tl.int32), 0) > 0
    # Rows of slots without tokens are not read.
    read_row = tl.where(is_row, row, tl.max(tl.where(is_row, row, 0), 0))
    weights = a_ptr + read_row.to(tl.int64)[:, None] * num_columns
    if is_used:
        LINE: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth
        line = part * SPAN + tl.arange(0, SPAN // LINE) * LINE
        prefetch(weights + tl.minimum(line, num_columns - 1)[None, :], PDL)
    wait_for_earlier(PDL)
    is_last = part == 0  # of a tile without tokens
    if is_used:
        column = part * SPAN + tl.arange(0, TILE)
        inputs = x_ptr + token[:, None] * num_columns
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in tl.range(0, SPAN, TILE, num_stages=STAGES):
            here = (column + at)[None, :]
            inside = here < num_columns
            weight = tl.load(weights + here, mask=is_row[:, None] & inside, other=0.0)
            x = tl.load(inputs + here, mask=is_token[:, None] & inside, other=0.0)
            acc = tl.dot(weight, tl.trans(x), acc)
        place = token[:, None] * HEIGHT + (row % HEIGHT)[None, :]
        stride = num_tokens * HEIGHT
        own_partial = partials_ptr + part * stride + place
        # `.cg` bypasses L1, which is not coherent between SMs.
        tl.store(own_partial, tl.trans(acc), mask=own, cache_modifier=".cg")
        tl.debug_barrier()
        arrived = words_ptr + num_counts + tile
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            tl.debug_barrier()
            tl.store(arrived, 0)
            total = tl.zeros((TOKENS, ROWS), tl.float32)
            for each in tl.range(PARTS, loop_unroll_factor=2):
                partial = partials_ptr + each * stride + place
                total += tl.load(partial, mask=own, other=0.0, cache_modifier=".cg")
            found = total.to(products_ptr.dtype.element_ty)
            tl.store(products_ptr + place, found, mask=own, cache_modifier=".cg")
    if is_last:
        tl.debug_barrier()
        count = tl.arange(0, _COUNTS)
        # The fence of the first counts also precedes the others.
        tl.atomic_add(words_ptr + count, 1, mask=count < num_counts, sem="release")
        for at in range(_COUNTS, num_counts, _COUNTS):
            inside = at + count < num_counts
            tl.atomic_add(words_ptr + at + count, 1, mask=inside, sem="relaxed")


@triton.jit
def slots_of(slots_ptr, token, num_tokens):  # noqa: ANN201 - Triton blocks have no type
    """Returns the slots of tokens, -1 for none."""
    return tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int32)


@triton.jit
def first_factors(  # noqa: ANN201 - Triton blocks have no type
    b_ptr,
    row,
    slot,
    split,
    b_stride,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Loads the first block of columns of a split's part of `b`, `[ROWS, BLOCK]`."""
    column = split * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    return load_factors(b_ptr, row, row >= 0, column, used_columns(slot, column, RANK), b_stride)


@triton.jit
def add_changes(  # noqa: ANN201 - Triton blocks have no type
    acc,
    b,
    b_ptr,
    slots_ptr,
    products_ptr,
    count_ptr,
    row,
    token,
    split,
    module,
    num_tokens,
    tiles,
    b_stride,
    SWIGLU: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Adds the changes of a split's part of the slots to `acc`, `[ROWS, TOKENS]`.

    Args:
        acc: the output.
        b: result of `first_factors`.
        b_ptr: `[N, slots * RANK]`, factors of all slots.
        slots_ptr: `[T]`, slot of each token.
        products_ptr: `[T, MODULES * RANK]`, products of each token's slot.
        count_ptr: count of the CTA.
        row: rows of the layer. With SWIGLU, the first half belongs to gate, and the other to up.
        token: index of each token.
        split: index of the split.
        module: module of the rows, 0 with SWIGLU.
        num_tokens: T.
        tiles: number of tiles of `a` that are counted.
        b_stride: elements between two rows of the factors.
    """
    slot = slots_of(slots_ptr, token, num_tokens)  # again, to hold no registers during the loop
    found = wait_for_count(count_ptr, tiles)
    # Always true. Otherwise, `b` would be moved to shared memory before the loop over the weight.
    b = tl.where(found == tiles, b, 0.0)
    own = products_ptr + token * (MODULES * RANK) + module * RANK
    first = split * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    acc = _add_block(acc, b, own, slot, first, SWIGLU, RANK)
    for block in tl.range(1, BLOCKS, num_stages=1):
        column = first + block * BLOCK
        used = used_columns(slot, column, RANK)
        b = load_factors(b_ptr, row, row >= 0, column, used, b_stride)
        acc = _add_block(acc, b, own, slot, column, SWIGLU, RANK)
    return acc


@triton.jit
def _add_block(acc, b, own, slot, column, SWIGLU: tl.constexpr, RANK: tl.constexpr):
    """Adds the products at some columns times these columns of `b`."""
    x = load_products(own, slot, column, RANK)
    if SWIGLU:
        up = load_products(own + RANK, slot, column, RANK)
        is_gate = (tl.arange(0, acc.shape[0]) < acc.shape[0] // 2)[:, None]
        acc += tl.where(is_gate, tl.dot(b, tl.trans(x)), 0.0)
        acc += tl.where(is_gate, 0.0, tl.dot(b, tl.trans(up)))
    else:
        acc = tl.dot(b, tl.trans(x), acc)
    return acc
