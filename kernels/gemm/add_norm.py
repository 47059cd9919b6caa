"""Triton kernel for residual addition and RMSNorm in one pass over the row.

The reference implementations are `rms_norm` and `add_rms_norm` of `kernels.plain`. The rounding is
the same, but the order of the sum is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: int = 0) -> Tensor:
    """Implements `plain.rms_norm` for `[T, hidden]`."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, eps, add=False, pdl=pdl)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: int = 0
) -> tuple[Tensor, Tensor]:
    """Implements `plain.add_rms_norm`. The sum is written to the memory of `residual`.

    Args:
        x: `[T, hidden]`, or split-K partials of it.
        residual: `[T, hidden]`.
        weight: weight of the norm, `[hidden]`.
        eps: constant of the norm.
        pdl: see `dependent_launch.wait_for_earlier`.

    Returns:
        Norm of the sum, and the sum.
    """
    out = torch.empty_like(residual)
    _launch(x, residual, weight, out, eps, add=True, pdl=pdl)
    return out, residual


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool, pdl: int
) -> None:
    num_tokens, width = residual.shape
    _add_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        width,
        residual.numel(),
        eps,
        ADD=add,
        SPLITS=len(x) if x.dim() == 3 else 0,
        BLOCK=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=4 if width <= 2048 else 8,
        launch_pdl=pdl > 0,
    )


@triton.jit
def _add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    stride,
    eps,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    total = load_reduced(x_ptr, row + column, inside, stride, SPLITS, out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        # The sum is rounded before it is normalized, as in the reference implementation.
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(residual_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    normed = (wide * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row + column, normed.to(total.dtype), mask=inside)
