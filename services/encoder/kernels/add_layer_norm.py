"""Residual addition and LayerNorm in one pass over the row, as one Triton kernel.

The plain twin is `PlainOps.add_layer_norm`; the rounding points are the same, the order of the sums
is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    _kernel[(num_rows,)](
        x, residual, weight, bias, normed, width, eps,
        ADD=add, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return normed


@triton.jit
def _kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, normed_ptr, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        # Rounded to the stored dtype before it is normalised, as in the plain twin.
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(x_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    centered = tl.where(inside, wide - tl.sum(wide) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered) / width + eps)
    normed = centered * scale * weight + bias
    tl.store(normed_ptr + row + column, normed.to(total.dtype), mask=inside)
