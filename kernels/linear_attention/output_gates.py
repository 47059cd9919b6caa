"""Triton kernels for the output gates of attention and of linear attention.

The reference implementations are `plain.output_gate` and `delta_rule.gated_norm`, with the same
rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier

_BLOCK = 1024
_HEADS = 4  # heads of a CTA


def output_gate(attended: Tensor, gates: Tensor, *, pdl: int = 0) -> Tensor:
    """Implements `plain.output_gate` for contiguous tensors."""
    size = attended.numel()
    _output_gate_kernel[(triton.cdiv(size, _BLOCK),)](
        attended, gates, size, BLOCK=_BLOCK, PDL=pdl, launch_pdl=pdl > 0
    )
    return attended


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: int = 0) -> Tensor:
    """Implements `delta_rule.gated_norm`."""
    num_tokens, num_heads, width = x.shape
    out = x.new_empty(num_tokens, num_heads * width)
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        num_heads,
        eps,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        HEADS=_HEADS,
        PDL=pdl,
        num_warps=_HEADS // 2,
        launch_pdl=pdl > 0,
    )
    return out


@triton.jit
def _output_gate_kernel(x_ptr, gate_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0)
    gate = tl.load(gate_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype).to(tl.float32)
    tl.store(x_ptr + place, (x.to(tl.float32) * gate).to(x.dtype), mask=place < size)


@triton.jit
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    num_heads,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < num_heads) & (column < WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    place = head * WIDTH + column
    x = tl.load(x_ptr + token * num_heads * WIDTH + place, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    normed = ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype).to(tl.float32)
    gated = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + token * num_heads * WIDTH + place, gated.to(x.dtype), mask=inside)
