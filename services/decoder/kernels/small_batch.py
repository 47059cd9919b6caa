"""Linear layers for up to 64 tokens, where reading the weights is most of the work.

cuBLAS fills the device by splitting the sum over the input's columns, and adds the parts up in a
kernel of its own. Here the parts are left in float32 for the kernel that comes next anyway, a norm
or a rotation, which adds them in one order and rounds once (`load_product`). What the rounding
points are does not change.

SwiGLU's product is not split: half of a program's rows are the gate's and half the same rows of
up, so that it can apply the activation itself.

The plain twins are `linear_parts` and `linear_swiglu` of `services.decoder.kernels.ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.common.nn import launches
from services.decoder.kernels.overlap import overlaps
from services.decoder.kernels.silu_mul import swiglu

MAX_TOKENS = 64
# Measured on an H200 for the 2B's shapes: at most one program per processor.
_ROWS, _COLUMNS, _STAGES, _WARPS = 64, 128, 5, 4
_SWIGLU_STAGES = 3  # two programs per processor
_MAX_PARTS = 8


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, K]`, `[N, K]` → `[S, T, N]` float32, which add up to `x @ weight.T`."""
    num_tokens, num_rows = len(x), len(weight)
    parts = count_parts(num_rows, x.shape[1])
    out = torch.empty((parts, num_tokens, num_rows), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, parts, _STAGES, swiglu=False)
    return out


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_and_mul(x @ weight.T)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, out, 1, _SWIGLU_STAGES, swiglu=True)
    return out


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, parts: int, stages: int, *, swiglu: bool
) -> None:
    num_tokens, num_columns = x.shape
    num_rows = len(weight)
    _small_batch_kernel[(num_rows // _ROWS, parts)](
        x, weight, out, num_tokens, num_rows, num_columns,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)), ROWS=_ROWS, COLUMNS=_COLUMNS,
        SPAN=num_columns // parts, STAGES=stages, SWIGLU=swiglu, OVERLAP=overlaps(),
        num_warps=_WARPS, launch_pdl=overlaps(),
    )  # fmt: skip


def count_parts(num_rows: int, num_columns: int) -> int:
    """How many parts a product has; 0: it cannot be computed so."""
    if num_rows % _ROWS or num_columns % _COLUMNS:
        return 0
    parts = 1
    while (
        parts < _MAX_PARTS
        and num_rows // _ROWS * parts * 2 <= launches.PROCESSORS
        and num_columns % (parts * 2 * _COLUMNS) == 0
    ):
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def _small_batch_kernel(
    x_ptr, weight_ptr, out_ptr, num_tokens, num_rows, num_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, SWIGLU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROWS // 2
    index = tl.arange(0, ROWS)
    if SWIGLU:
        row = tl.program_id(0) * HALF + index % HALF + index // HALF * (num_rows // 2)
    else:
        row = tl.program_id(0) * ROWS + index
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
    if SWIGLU:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, HALF, TOKENS)), (2, 1, 0))
        gate, up = tl.split(halves)  # [TOKENS, HALF] each
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        place = token[:, None] * (num_rows // 2) + column[None, :]
        tl.store(out_ptr + place, swiglu(gate, up), mask=inside)
    else:
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
