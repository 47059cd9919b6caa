"""The vision tower's rotary embedding as one Triton kernel; the plain twin is `rope.rotate`."""

import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the plain twin. Turns `x` in place and returns it.

    A row's `[2, num_heads, head_dim]` are contiguous; rows need not be: queries and keys turn where
    the fused projection left them, beside the values.
    """
    num_rows, pair, num_heads, head_dim = x.shape
    assert x[:1].is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    _rotate_kernel[(num_rows,)](
        x, cos, sin, x.stride(0), pair * num_heads, head_dim // 2,
        HEADS=triton.next_power_of_2(pair * num_heads),
        HALF=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, row_stride, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads) & (column < half)
    place = x_ptr + row * row_stride + head * 2 * half + column
    dtype = x_ptr.dtype.element_ty
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + column, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + row * half + column, mask=column < half, other=0.0)
    tl.store(place, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(dtype), mask=inside)
