"""Triton kernel for `silu(gate) * up` of SwiGLU.

The reference implementation is `kernels.plain.silu_and_mul`, with the same rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier

_BLOCK = 1024
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


def silu_and_mul(gate_up: Tensor, *, pdl: int = 0) -> Tensor:
    """Implements `plain.silu_and_mul`: `[T, 2 * n]` → `[T, n]`."""
    num_tokens, width = gate_up.shape
    width //= 2
    out = gate_up.new_empty(num_tokens, width)
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, BLOCK=_BLOCK, PDL=pdl, launch_pdl=pdl > 0
    )
    return out


@triton.jit
def swiglu(gate, up):  # noqa: ANN201 - Triton blocks have no type
    """Computes `silu(gate) * up`. SiLU and the product are rounded to the inputs' dtype."""
    wide = gate.to(tl.float32)
    # 1 / x is computed as the square of 1 / sqrt(x) in two instructions; a division takes eight.
    root = tl.rsqrt(1.0 + tl.exp2(wide * _MINUS_LOG2_E))
    activated = (wide * (root * root)).to(up.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = gate_up_ptr + token * 2 * width
    wait_for_earlier(PDL)
    gate = tl.load(row + column, mask=inside, other=0.0)
    up = tl.load(row + width + column, mask=inside, other=0.0)
    tl.store(out_ptr + token * width + column, swiglu(gate, up), mask=inside)
