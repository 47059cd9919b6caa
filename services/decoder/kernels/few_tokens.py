"""Linear layers for one or two tokens, where a decode step is nothing but reading weights.

cuBLAS reaches two thirds of the memory bandwidth on a matrix-vector product. Here a program takes a
few whole rows of the weight, and the product's neighbours with them: the RMSNorm before it, the
SwiGLU or the residual addition after it. A kernel starts while the one before it ends (see
`overlap`), and its weights, which depend on nothing, are on their way when its input is there.
Rounding points are the plain twins'.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.overlap import overlaps
from services.decoder.kernels.silu_mul import swiglu

MAX_TOKENS = 2
MAX_WIDTH = 16384  # a program holds whole rows in registers
# (rows per program, warps), measured on an H200 for the 2B's shapes.
_NORM_LINEAR = {1: (8, 8), 2: (2, 2)}
_NORM_SWIGLU = {1: (2, 4), 2: (2, 4)}
_LINEAR_ADD = {1: (4, 8), 2: (4, 4)}


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T`: `[T, K]`, `[N, K]` → `[T, N]`; to `out`, if there is one."""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, None, 0.0, _NORM_LINEAR)
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`rms_norm(x) @ weight.T`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, norm, eps, _NORM_LINEAR)
    return out


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`silu_and_mul(rms_norm(x) @ weight.T)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out, norm, eps, _NORM_SWIGLU, swiglu=True)
    return out


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """`residual += x @ weight.T`, in place."""
    _launch(x, weight, residual, None, 0.0, _LINEAR_ADD, add=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: Tensor | None,
    eps: float,
    shapes: dict[int, tuple[int, int]],
    *,
    swiglu: bool = False,
    add: bool = False,
) -> None:
    num_tokens, width = x.shape
    num_rows = out.shape[1]
    rows, warps = shapes[num_tokens]
    while num_rows % rows:
        rows //= 2
    block = triton.next_power_of_2(width)
    _few_tokens_kernel[(num_rows // rows,)](
        x, weight, out, norm, num_rows, eps,
        WIDTH=width, TOKENS=num_tokens, ROWS=rows, BLOCK=block, NORM=norm is not None,
        SWIGLU=swiglu, ADD=add, OVERLAP=overlaps(), num_warps=warps, launch_pdl=overlaps(),
    )  # fmt: skip


@triton.jit
def _few_tokens_kernel(
    x_ptr, weight_ptr, out_ptr, norm_ptr, num_rows, eps,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = weight_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    # All that no kernel before has written is read before the wait.
    weight = tl.load(place, mask=inside[None, :], other=0.0)
    if SWIGLU:
        up_place = place + tl.cast(num_rows, tl.int64) * WIDTH
        up_weight = tl.load(up_place, mask=inside[None, :], other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    dtype = out_ptr.dtype.element_ty
    for token in tl.static_range(TOKENS):
        x = tl.load(x_ptr + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
            x = ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
        result = tl.sum(weight.to(tl.float32) * x[None, :], axis=1).to(dtype).to(tl.float32)
        if SWIGLU:
            up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1).to(dtype)
            result = swiglu(result.to(dtype), up).to(tl.float32)
        out = out_ptr + token * num_rows + row
        if ADD:
            result += tl.load(out).to(tl.float32)
        tl.store(out, result.to(dtype))


def fits(*widths: int) -> bool:
    """Whether rows of these widths can be held, on this device."""
    return overlaps() and all(width <= MAX_WIDTH for width in widths)
