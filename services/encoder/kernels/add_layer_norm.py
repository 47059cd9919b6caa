"""Residual addition and LayerNorm in one pass over the row, as one Triton kernel.

The plain twin is `PlainOps.add_layer_norm`; the rounding points are the same, the order of the sums
is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program's: as many warps as rows, so that no sum goes from warp to warp. On an H200 more rows
# gain nothing, and a row by itself takes up to a quarter longer.
_ROWS = 2


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.add_layer_norm`. The sum takes the memory of `x`."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    return _launch(x, residual, weight, bias, eps, add=True), x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Ops.layer_norm`."""
    assert x.is_contiguous()
    return _launch(x, x, weight, bias, eps, add=False)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, add: bool
) -> Tensor:
    num_rows, width = x.shape
    normed = torch.empty_like(x)
    _add_layer_norm_kernel[(triton.cdiv(num_rows, _ROWS),)](
        x, residual, weight, bias, normed, num_rows, width, eps,
        ADD=add, ROWS=_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=_ROWS,
    )  # fmt: skip
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _add_layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, normed_ptr, num_rows, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    known = column < width
    place, inside = row * width + column, (row < num_rows) & known
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0)
        # Rounded to the stored dtype before it is normalised, as in the plain twin.
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(x_ptr + place, total, mask=inside)
    wide = total.to(tl.float32)
    centered = tl.where(known, wide - (tl.sum(wide, axis=1) / width)[:, None], 0.0)
    variance = tl.sum(centered * centered, axis=1) / width
    normed = centered * tl.rsqrt(variance + eps)[:, None] * weight + bias
    tl.store(normed_ptr + place, normed.to(total.dtype), mask=inside)
