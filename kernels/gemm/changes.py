"""The second step of adapters, for kernels that add changes to the output of a linear layer."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a linear layer's output by adapters.

    Attributes:
        products: `[S, T, modules, rank]` float32, partial products of the tokens by the first
            factors (`kernels.adapters.shrink_expand.shrink_adapters`).
        b: `[N, slots, rank]`, second factors of all slots.
        sizes: number of rows of each of the layer's modules.
        slots: `[T]` int64, slot of each token, -1 for none.
        first, last: range [first, last) of the slots that may occur.
    """

    products: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    slots: Tensor
    first: int
    last: int


@triton.jit
def load_factors(  # noqa: ANN201 - Triton blocks have no type
    b_ptr, row, is_row, column, used, b_stride
):
    """Loads a tile `[ROWS, CHUNK]` of `b`. Columns that are not used are zeros."""
    place = row.to(tl.int64)[:, None] * b_stride + column[None, :]
    return tl.load(b_ptr + place, mask=is_row[:, None] & used[None, :], other=0.0)


@triton.jit
def load_products(  # noqa: ANN201
    own,
    slot,
    at,
    stride,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns the tokens' products `[TOKENS, CHUNK]` at columns of `b` from `at` on.

    Products stand at the columns of the token's own slot. Elsewhere are zeros.

    Args:
        own: pointers to each token's first product.
        slot: slot of each token, -1 for none.
        at: first column, a multiple of CHUNK or of the rank.
        stride: elements between two splits.
        SPLITS: number of partial products.
        RANK: rank of the factors.
        CHUNK: number of columns.
        dtype: data type of the result.
    """
    column = at + tl.arange(0, CHUNK)
    places = own[:, None] + (column % RANK)[None, :]
    # Products of other slots are not loaded. All columns of a slot are, or none.
    is_own = tl.max_constancy(slot[:, None] == (column // RANK)[None, :], [1, 16])
    total = tl.load(places, mask=is_own, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(places + split * stride, mask=is_own, other=0.0)
    return total.to(dtype)
