"""Loads weights into the L2 cache while a small kernel leaves the memory idle.

The kernel that runs before a GEMM has a few CTAs more, each of which asks for pieces of the GEMM's
weight and ends. They do not wait for earlier kernels, because no kernel writes weights.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_SPLITS_BYTES = 16 << 20  # of a weight that is read by all CTAs at the same time
_ROWS_BYTES = 8 << 20  # of a weight whose first part waiting CTAs hold in registers
_LEAST_PIECE, _PIECE = 512, 2048  # bytes
_THREADS = 128  # pieces for which a CTA asks


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Pieces of a weight.

    Piece i begins at element `start + i // inner * outer + i % inner * step`.

    Attributes:
        weight: the weight.
        count: number of pieces.
        start: first element of the first piece.
        inner, outer, step: layout of the pieces, see above.
        size: bytes of a piece, a multiple of 16.
    """

    weight: Tensor
    count: int
    start: int
    inner: int
    outer: int
    step: int
    size: int

    @property
    def num_ctas(self) -> int:
        """Number of CTAs that ask for the pieces."""
        return -(-self.count // _THREADS)

    @property
    def arguments(self) -> tuple[Tensor, int, int, int, int, int, int]:
        """Arguments of `ask`, after the index."""
        layout = self.inner, self.outer, self.step
        return self.weight, self.count, self.start, *layout, self.size


NOTHING = None, 0, 0, 0, 0, 0, 0  # arguments of kernels that ask for nothing


def first_columns(weight: Tensor, span: int) -> Prefetch:
    """Returns the first columns of each row in each split, for a GEMM all of whose CTAs start at
    the same time.

    Args:
        weight: `[N, K]`.
        span: columns of a split.
    """
    num_rows, num_columns = weight.shape
    splits = triton.cdiv(num_columns, span)
    count = min(num_rows * splits, _SPLITS_BYTES // _LEAST_PIECE)
    most = min(span, num_columns - (splits - 1) * span) * weight.itemsize
    size = _LEAST_PIECE
    while size < _PIECE and 2 * size * count <= _SPLITS_BYTES:
        size *= 2
    return Prefetch(weight, count, 0, splits, num_columns, span, min(size, most) // 16 * 16)


def behind(weight: Tensor, num_rows: int, num_columns: int, halves: int = 1) -> Prefetch | None:
    """Returns what follows the part of a weight that the waiting CTAs of a GEMV hold already.

    Args:
        weight: `[N, K]`.
        num_rows: number of rows of each half of which the CTAs hold columns.
        num_columns: number of columns in registers, from the first column on.
        halves: 2 for gate and up, whose rows are read together.
    """
    rows, columns = len(weight) // halves, weight.shape[1]
    if num_columns < columns:  # the next columns of each row
        size = min(_PIECE, (columns - num_columns) * weight.itemsize) // 16 * 16
        count = min(len(weight), _ROWS_BYTES // _PIECE)
        return Prefetch(weight, count, num_columns, 1, columns, 0, size)
    elements = _PIECE // weight.itemsize
    most = max(0, rows - num_rows) * columns // elements
    count = min(most, _ROWS_BYTES // _PIECE // halves) * halves
    if count == 0:
        return None
    return Prefetch(weight, count, num_rows * columns, halves, elements, rows * columns, _PIECE)


@triton.jit
def ask(index, ptr, count, start, inner, outer, step, size):  # noqa: ANN201 - nothing
    """Asks for the pieces of a CTA of four warps, which is the `index`-th of those that ask."""
    piece = tl.minimum(index * 128 + tl.arange(0, 128), count - 1)
    place = start + (piece // inner).to(tl.int64) * outer + (piece % inner).to(tl.int64) * step
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [(ptr + place).to(tl.int64), tl.zeros((128,), tl.int32) + size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
