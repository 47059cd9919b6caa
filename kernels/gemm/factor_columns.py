"""Blocks of columns of the factors `b` of all slots, and tokens' products at these columns."""

import triton
import triton.language as tl


@triton.jit
def load_factors(  # noqa: ANN201 - Triton blocks have no type
    b_ptr, row, is_row, column, used, b_stride
):
    """Loads a tile `[ROWS, CHUNK]` of `b`. Columns that are not used are zeros."""
    place = row.to(tl.int64)[:, None] * b_stride + column[None, :]
    return tl.load(b_ptr + place, mask=is_row[:, None] & used[None, :], other=0.0)


@triton.jit
def used_columns(slot, column, RANK: tl.constexpr):  # noqa: ANN201
    """Returns which columns `[CHUNK]` of `b` belong to the slot of a token, of `[TOKENS]` slots."""
    used = tl.max((slot[:, None] == (column // RANK)[None, :]).to(tl.int32), 0) > 0
    # All columns of a slot are used, or none. The compiler cannot know, and would load them one by
    # one.
    return tl.max_constancy(used, 16)  # the smallest rank


@triton.jit
def load_products(own, slot, column, RANK: tl.constexpr):  # noqa: ANN201
    """Returns the tokens' products `[TOKENS, CHUNK]` at columns of `b`.

    A token's products stand at the columns of its own slot. The others are zeros, and are not read.

    Args:
        own: pointers to each token's first product.
        slot: slot of each token, -1 for none.
        column: `[CHUNK]`, columns of `b`.
    """
    is_own = tl.max_constancy(slot[:, None] == (column // RANK)[None, :], [1, 16])
    # `.cg` bypasses L1, which is not coherent between SMs.
    places = own[:, None] + (column % RANK)[None, :]
    return tl.load(places, mask=is_own, other=0.0, cache_modifier=".cg")
