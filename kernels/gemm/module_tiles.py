"""Tiles of the rows of a layer with up to four modules, none of which has rows of two modules."""

import triton
import triton.language as tl


@triton.jit
def part_of_module(  # noqa: ANN201 - Triton blocks have no type
    part, size0, size1, size2, size3, ROWS: tl.constexpr
):
    """Returns the first row of a part within its module, and the module's size, start and index."""
    second_part = (size0 + ROWS - 1) // ROWS
    third_part = second_part + (size1 + ROWS - 1) // ROWS
    fourth_part = third_part + (size2 + ROWS - 1) // ROWS
    second, third, fourth = part >= second_part, part >= third_part, part >= fourth_part
    module = second.to(tl.int32) + third.to(tl.int32) + fourth.to(tl.int32)
    before = tl.where(
        fourth, fourth_part, tl.where(third, third_part, tl.where(second, second_part, 0))
    )
    start = tl.where(third, size0 + size1, tl.where(second, size0, 0))
    start = tl.where(fourth, size0 + size1 + size2, start)
    size = tl.where(third, size2, tl.where(second, size1, size0))
    size = tl.where(fourth, size3, size)
    return (part - before) * ROWS, size, start, module


@triton.jit
def rows_of_tile(  # noqa: ANN201
    tile,
    size0,
    size1,
    size2,
    size3,
    ROWS: tl.constexpr,
):
    """Returns a tile's rows, which of them exist, and the tile's module. No tile has two."""
    first, size, start, module = part_of_module(tile, size0, size1, size2, size3, ROWS)
    row = first + tl.arange(0, ROWS)
    return row + start, row < size, module
