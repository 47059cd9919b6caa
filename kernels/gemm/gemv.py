"""Linear layers for one token, whose time is that of reading the weights.

cuBLAS reaches two thirds of the memory bandwidth for a GEMV. In this kernel, a CTA has a few rows
of the weight and fuses the operations around the GEMV: the RMSNorm before it, and SwiGLU or the
residual addition after it. With programmatic dependent launch, a kernel starts while the previous
kernel ends, and loads its first weights before its input is there. The reference implementations
in `kernels.plain` have the same rounding.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import GemvConfig, gemv_config


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    pdl: int = 0,
    config: GemvConfig | None = None,
) -> Tensor:
    """Computes `x @ weight.T + bias`: `[1, K]`, `[N, K]` → `[1, N]`.

    The result is written to `out` if it is given.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "linear", bias, None, 0.0, pdl, config)
    return out


def norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: int = 0,
    config: GemvConfig | None = None,
) -> Tensor:
    """Computes `rms_norm(x) @ weight.T + bias`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "norm_linear", bias, norm, eps, pdl, config)
    return out


def norm_swiglu(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: int = 0,
    config: GemvConfig | None = None,
) -> Tensor:
    """Computes `silu_and_mul(rms_norm(x) @ weight.T + bias)`: `[1, K]`, `[2 * N, K]` → `[1, N]`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out, "norm_swiglu", bias, norm, eps, pdl, config)
    return out


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    pdl: int = 0,
    config: GemvConfig | None = None,
) -> None:
    """Computes `residual += x @ weight.T + bias` in place."""
    _launch(x, weight, residual, "linear_residual", bias, None, 0.0, pdl, config)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    kind: str,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    pdl: int,
    config: GemvConfig | None,
) -> None:
    num_columns, num_rows = x.shape[1], out.shape[1]
    if config is None:
        config = gemv_config(kind, len(weight), num_columns)
    rows = config.rows
    while num_rows % rows:
        rows //= 2
    _gemv_kernel[(num_rows // rows,)](
        x,
        weight,
        out,
        norm,
        bias,
        num_rows,
        eps,
        WIDTH=num_columns,
        ROWS=rows,
        TILE=config.tile,
        NUM_TILES=triton.cdiv(num_columns, config.tile),
        STAGES=config.stages,
        NORM=norm is not None,
        BIAS=bias is not None,
        SWIGLU=kind == "norm_swiglu",
        ADD=kind == "linear_residual",
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
    )


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    weights = weight_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    up_weights = weights + tl.cast(num_rows, tl.int64) * WIDTH
    # The weights are read before the wait, because no earlier kernel writes them.
    weight = tl.load(weights, mask=inside[None, :], other=0.0)
    up_weight = weight
    if SWIGLU:
        up_weight = tl.load(up_weights, mask=inside[None, :], other=0.0)
    norm = column.to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        squares = x * x
        for index in tl.static_range(1, NUM_TILES):
            at = index * TILE + column
            other = tl.load(x_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            squares += other * other
        scale = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        x = normed(x, norm, scale, dtype)
    acc = weight.to(tl.float32) * x[None, :]
    up_acc = up_weight.to(tl.float32) * x[None, :]
    if NUM_TILES > 1:
        if STAGES == 0:
            for index in tl.static_range(1, NUM_TILES):
                acc, up_acc = _add_tile(
                    acc,
                    up_acc,
                    x_ptr,
                    weights,
                    up_weights,
                    norm_ptr,
                    scale,
                    index,
                    dtype,
                    column,
                    WIDTH,
                    TILE,
                    NORM,
                    SWIGLU,
                )
        else:
            for index in tl.range(1, NUM_TILES, num_stages=STAGES):
                acc, up_acc = _add_tile(
                    acc,
                    up_acc,
                    x_ptr,
                    weights,
                    up_weights,
                    norm_ptr,
                    scale,
                    index,
                    dtype,
                    column,
                    WIDTH,
                    TILE,
                    NORM,
                    SWIGLU,
                )
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        up = tl.sum(up_acc, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + row).to(tl.float32)
        result = swiglu(result.to(dtype), up.to(dtype)).to(tl.float32)
    out = out_ptr + row
    if ADD:
        result += tl.load(out).to(tl.float32)
    tl.store(out, result.to(dtype))


@triton.jit
def normed(x, norm, scale, dtype: tl.constexpr):  # noqa: ANN201 - Triton blocks have no type
    """RMSNorm in float32 with the rounding of `plain.rms_norm`. `scale` is 1 / RMS."""
    scaled = (x * scale).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)
    return scaled.to(dtype).to(tl.float32)


@triton.jit
def _add_tile(
    acc,
    up_acc,
    x_ptr,
    weights,
    up_weights,
    norm_ptr,
    scale,
    index,
    dtype: tl.constexpr,
    column,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Adds a tile of K element by element. The sum over columns is computed at the end."""
    at = index * TILE
    inside = at + column < WIDTH
    weight = tl.load(weights + at, mask=inside[None, :], other=0.0)
    x = tl.load(x_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + at + column, mask=inside, other=0.0)
        x = normed(x, norm, scale, dtype)
    acc += weight.to(tl.float32) * x[None, :]
    if SWIGLU:
        up_weight = tl.load(up_weights + at, mask=inside[None, :], other=0.0)
        up_acc += up_weight.to(tl.float32) * x[None, :]
    return acc, up_acc
