"""Triton kernel that gates a shared expert's output and adds it to the residual stream.

The reference implementation is `kernels.plain.shared_gate`, with the same rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced


def add(out: Tensor, x: Tensor, gate: Tensor, residual: Tensor, *, pdl: int = 0) -> None:
    """Computes `residual += out * sigmoid(x @ gate.T)` in place.

    Args:
        out: output of the shared expert, `[T, hidden]` or split-K partials of it.
        x: input of the expert, `[T, hidden]`.
        gate: weight of the gate, `[1, hidden]`.
        residual: residual stream `[T, hidden]`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tokens, width = residual.shape
    _shared_gate_kernel[(num_tokens,)](
        out,
        x,
        gate,
        residual,
        width,
        residual.numel(),
        SPLITS=len(out) if out.dim() == 3 else 0,
        BLOCK=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=4 if width <= 2048 else 8,
        launch_pdl=pdl > 0,
    )


@triton.jit(do_not_specialize=["stride"])
def _shared_gate_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    residual_ptr,
    width,
    stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    score = tl.sum(x * gate).to(dtype).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-score))).to(dtype).to(tl.float32)
    out = load_reduced(out_ptr, row + column, inside, stride, SPLITS, dtype).to(tl.float32)
    residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    total = residual + (out * share).to(dtype).to(tl.float32)
    tl.store(residual_ptr + row + column, total.to(dtype), mask=inside)
