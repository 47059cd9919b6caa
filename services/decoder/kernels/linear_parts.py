"""Linear layers for up to 64 tokens, where reading the weights is most of the work.

cuBLAS fills the device by splitting the sum over the input's columns, and adds the parts up in a
kernel of its own. Here the parts are left in float32 for the kernel that comes next anyway, a norm
or a rotation, which adds them in one order and rounds once (`load_product`). What the rounding
points are does not change.

The plain twin is `services.decoder.kernels.ops.linear_parts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.overlap import overlaps

MAX_TOKENS = 64
# Measured on an H200 for the 2B's shapes: about one program per processor.
_ROWS, _COLUMNS, _STAGES, _WARPS = 64, 128, 5, 4
_MOST_PROGRAMS = 132
_MAX_PARTS = 8


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, K]`, `[N, K]` → `[S, T, N]` float32, which add up to `x @ weight.T`."""
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    parts = count_parts(num_rows, num_columns)
    out = torch.empty((parts, num_tokens, num_rows), dtype=torch.float32, device=x.device)
    _kernel[(num_rows // _ROWS, parts)](
        x, weight, out, num_tokens, num_rows, num_columns,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)), ROWS=_ROWS, COLUMNS=_COLUMNS,
        SPAN=num_columns // parts, STAGES=_STAGES, OVERLAP=overlaps(),
        num_warps=_WARPS, launch_pdl=overlaps(),
    )  # fmt: skip
    return out


def count_parts(num_rows: int, num_columns: int) -> int:
    """How many parts a product has; 0: it cannot be computed so."""
    if num_rows % _ROWS or num_columns % _COLUMNS:
        return 0
    parts = 1
    while (
        parts < _MAX_PARTS
        and num_rows // _ROWS * parts * 2 <= _MOST_PROGRAMS
        and num_columns % (parts * 2 * _COLUMNS) == 0
    ):
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    x_ptr, weight_ptr, out_ptr, num_tokens, num_rows, num_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    token, column = tl.arange(0, TOKENS), part * SPAN + tl.arange(0, COLUMNS)
    inside = (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    # The tensor cores want at least 64 rows on one side, which tokens need not have.
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        weight = tl.load(weights + at)
        x = tl.load(inputs + at, mask=inside, other=0.0)
        sums = tl.dot(weight, tl.trans(x), sums)
    place = (part * num_tokens + token)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + place, tl.trans(sums), mask=inside)


@triton.jit
def load_product(  # noqa: ANN201 - a block of the dtype
    ptr, place, inside, stride, PARTS: tl.constexpr, dtype: tl.constexpr
):
    """Values of a product; with PARTS, the sums of its parts, which lie `stride` apart."""
    if PARTS == 0:
        values = tl.load(ptr + place, mask=inside, other=0.0)
    else:
        total = tl.load(ptr + place, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(ptr + part * stride + place, mask=inside, other=0.0)
        values = total.to(dtype)
    return values
