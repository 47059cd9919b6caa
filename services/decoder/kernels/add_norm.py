"""Residual addition and RMSNorm in one pass over the row, as one Triton kernel.

The plain twins are `rms_norm` of `services.common.nn.layers` and `ops.add_rms_norm`; the rounding
points are the same, the order of the sum is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.overlap import overlaps
from services.decoder.kernels.small_batch import load_product


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `layers.rms_norm`."""
    out = torch.empty_like(x)
    _launch(x, x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`. `residual` is updated in place and returned."""
    out = torch.empty_like(residual)
    _launch(x, residual, residual, weight, out, eps, add=True)
    return out, residual


def _launch(
    x: Tensor,
    residual: Tensor,
    total: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    num_tokens, width = residual.shape
    _add_norm_kernel[(num_tokens,)](
        x, residual, total, weight, out, width, residual.numel(), eps,
        ADD=add, PARTS=len(x) if x.dim() == 3 else 0, BLOCK=triton.next_power_of_2(width),
        OVERLAP=overlaps(), num_warps=4 if width <= 2048 else 8, launch_pdl=overlaps(),
    )  # fmt: skip


@triton.jit
def _add_norm_kernel(
    x_ptr, residual_ptr, total_ptr, weight_ptr, out_ptr, width, stride, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = load_product(x_ptr, row + column, inside, stride, PARTS, out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        # Rounded to the stored dtype before it is normalised, as in the plain twin.
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    normed = (wide * scale).to(total.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row + column, normed.to(total.dtype), mask=inside)
