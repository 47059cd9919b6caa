"""The change of one token by an adapter, which the first programs of a GEMV compute."""

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.changes import LEAST_PART
from kernels.gemm.module_tiles import part_of_module
from kernels.hand_over import hand_over, take, take_rest

_ELEMENTS = 64  # elements of `b` that a thread has


def part_rows(rank: int, warps: int) -> int:
    """Number of rows of `b` of a part, which a program of some warps multiplies."""
    return max(LEAST_PART, _ELEMENTS * 32 * warps // rank)


@triton.jit
def hand_to_parts(  # noqa: ANN201 - nothing
    product,
    index,
    products_ptr,
    size0,
    size1,
    size2,
    size3,
    RANK: tl.constexpr,
    PART: tl.constexpr,
):
    """Hands the product by a row of `a` to all parts of the row's module.

    Args:
        product: float32 product.
        index: index of the row among those of all modules.
        products_ptr: words `[parts, RANK]`.
        size0, size1, size2, size3: number of rows of `b` of each module.
        RANK: rank of the factors.
        PART: rows of `b` of a part.
    """
    module = index // RANK
    first, size = 0, size0
    if module >= 1:
        first, size = tl.cdiv(size0, PART), size1
    if module >= 2:
        first, size = first + tl.cdiv(size1, PART), size2
    if module >= 3:
        first, size = first + tl.cdiv(size2, PART), size3
    count = tl.cdiv(size, PART)
    for at in range(0, count, 32):
        part = at + tl.arange(0, 32)
        place = (first + part) * RANK + index % RANK
        value = tl.zeros((32,), tl.float32) + product
        hand_over(products_ptr + place, value, part < count)


@triton.jit
def expand_part(  # noqa: ANN201 - nothing
    part,
    b_ptr,
    words_ptr,
    products_ptr,
    slots_ptr,
    b_stride,
    size0,
    size1,
    size2,
    size3,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies the products of a module by PART rows of the slot's `b`."""
    slot = tl.load(slots_ptr)
    first, size, start, _ = part_of_module(part, size0, size1, size2, size3, PART)
    within, rank = first + tl.arange(0, PART), tl.arange(0, RANK)
    row = start + within
    places = row.to(tl.int64)[:, None] * b_stride + (tl.maximum(slot, 0) * RANK + rank)[None, :]
    b = tl.load(b_ptr + places, mask=(within < size)[:, None], other=0.0)
    wait_for_earlier(PDL)
    own = products_ptr + part * RANK + rank
    product = take_rest(own, take(own))
    change = tl.sum(b.to(tl.float32) * product[None, :], axis=1)
    hand_over(words_ptr + row, tl.where(slot >= 0, change, 0.0), within < size)
