"""Linear layers for one token, whose time is that of reading the weights.

cuBLAS reaches two thirds of the memory bandwidth for a GEMV. In this kernel, a CTA has a few rows
of the weight and fuses the operations around the GEMV: the RMSNorm before it, and SwiGLU or the
residual addition after it. With programmatic dependent launch, a kernel starts while the previous
kernel ends, and loads its first weights before its input is there. The reference implementations
in `kernels.plain` have the same rounding.

`Change` makes a GEMV add the change of a low-rank adapter before it rounds. The adapter's products
are those of `shrink`, a GEMV by the factor `a` of the token's slot. Its CTAs load the factor before
their input is there, and those of the next GEMV load their first weights meanwhile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import GemvConfig, gemv_config

_MODULES = 4  # modules of a layer with adapters at most


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one token's output by the adapter of its slot.

    Attributes:
        products: `[modules, rank]`, result of `shrink`.
        b: `[N, slots, rank]`, factors `b` of all slots.
        sizes: number of rows of each of the layer's modules.
        slots: `[1]` int64, slot of the token, -1 for none.
    """

    products: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    slots: Tensor


def shrink(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    a: Tensor,
    slots: Tensor,
    *,
    pdl: int = 0,
) -> Tensor:
    """Multiplies a token by the factors `a` of its slot: `[1, K]` → `[modules, rank]`.

    Each CTA computes a row of `a`, which its registers hold before the input is there. The products
    of a token without a slot are zeros.

    Args:
        x: input of the layer, before the norm if there is one.
        norm: `[K]`, weight of the norm. None if `x` is normalized.
        eps: constant of the norm.
        a: `[slots, modules, rank, K]`, factors `a` of all slots.
        slots: `[1]` int64, slot of the token, -1 for none.
        pdl: mode of dependent launch, see `wait_for_earlier`.
    """
    _, modules, rank, num_columns = a.shape
    out = x.new_empty(modules, rank)
    tile = triton.next_power_of_2(num_columns)
    config = GemvConfig(rows=1, tile=tile, stages=0, warps=8 if tile > 4096 else 4)
    _launch(x, a, out.view(1, -1), "linear", None, norm, eps, pdl, config, slots=slots)
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    pdl: int = 0,
    config: GemvConfig | None = None,
    change: Change | None = None,
) -> Tensor:
    """Computes `x @ weight.T + bias`: `[1, K]`, `[N, K]` → `[1, N]`.

    The result is written to `out` if it is given.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "linear", bias, None, 0.0, pdl, config, change)
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
    change: Change | None = None,
) -> Tensor:
    """Computes `rms_norm(x) @ weight.T + bias`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "norm_linear", bias, norm, eps, pdl, config, change)
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
    change: Change | None = None,
) -> Tensor:
    """Computes `silu_and_mul(rms_norm(x) @ weight.T + bias)`: `[1, K]`, `[2 * N, K]` → `[1, N]`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out, "norm_swiglu", bias, norm, eps, pdl, config, change)
    return out


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    pdl: int = 0,
    config: GemvConfig | None = None,
    change: Change | None = None,
) -> None:
    """Computes `residual += x @ weight.T + bias` in place."""
    _launch(x, weight, residual, "linear_residual", bias, None, 0.0, pdl, config, change)


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
    change: Change | None = None,
    slots: Tensor | None = None,
) -> None:
    """Launches the kernel. `slots` selects one of several weights, whose rows `out` has."""
    num_columns, num_rows = x.shape[1], out.shape[1]
    if config is None:
        config = gemv_config(kind, len(weight), num_columns)
    rows = config.rows
    sizes, rank = [0] * _MODULES, 0
    if change is not None:
        assert len(change.sizes) <= _MODULES, f"{len(change.sizes)} modules"
        sizes[: len(change.sizes)], rank, slots = change.sizes, change.b.shape[2], change.slots
    while any(size % rows for size in (num_rows, *sizes)):
        rows //= 2
    _gemv_kernel[(num_rows // rows,)](
        x,
        weight,
        out,
        norm,
        bias,
        num_rows,
        eps,
        slots,
        None if change is None else change.products,
        None if change is None else change.b,
        0 if change is None else change.b.stride(0),
        *sizes[:-1],
        WIDTH=num_columns,
        ROWS=rows,
        TILE=config.tile,
        NUM_TILES=triton.cdiv(num_columns, config.tile),
        STAGES=config.stages,
        NORM=norm is not None,
        BIAS=bias is not None,
        SWIGLU=kind == "norm_swiglu",
        ADD=kind == "linear_residual",
        RANK=rank,
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
    slots_ptr,
    products_ptr,
    b_ptr,
    b_stride,
    size0,
    size1,
    size2,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output.

    With RANK, it adds the products times the factors `b` of the token's slot. Without RANK but with
    slots, the weight is the slot's part of several, and the output of no slot is zeros.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    slot = 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr)
    first_row = row.to(tl.int64)
    if RANK == 0 and slots_ptr is not None:
        first_row += slot * num_rows
        inside &= slot >= 0
    weights = weight_ptr + first_row[:, None] * WIDTH + column[None, :]
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
        scale = inverse_rms(x, x_ptr, column, eps, WIDTH, TILE, NUM_TILES)
        x = normed(x, norm, scale, dtype)
    b, product, up_b, up_product = 0.0, 0.0, 0.0, 0.0
    if RANK:  # here, where the norm's registers are free: the sums below hide the loads
        rank = tl.broadcast_to(tl.arange(0, RANK)[None, :], (ROWS, RANK))
        places = b_ptr + row.to(tl.int64)[:, None] * b_stride + slot * RANK + rank
        b = tl.load(places, mask=slot >= 0, other=0.0)
        module = 0
        if not SWIGLU:  # a CTA has rows of one module
            first = tl.program_id(0) * ROWS
            module = (first >= size0).to(tl.int32) + (first >= size0 + size1).to(tl.int32)
            module += (first >= size0 + size1 + size2).to(tl.int32)
        product = tl.load(products_ptr + module * RANK + rank)
        if SWIGLU:
            up_b = tl.load(
                places + tl.cast(num_rows, tl.int64) * b_stride, mask=slot >= 0, other=0.0
            )
            up_product = tl.load(products_ptr + RANK + rank)
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
    if RANK:
        result += _change(product, b)
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        up = tl.sum(up_acc, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + row).to(tl.float32)
        if RANK:
            up += _change(up_product, up_b)
        result = swiglu(result.to(dtype), up.to(dtype)).to(tl.float32)
    out = out_ptr + row
    if ADD:
        result += tl.load(out).to(tl.float32)
    tl.store(out, result.to(dtype))


@triton.jit
def _change(product, b):
    """Returns the change `[ROWS]` by products and factors `b`, both `[ROWS, RANK]`."""
    return tl.sum(product.to(tl.float32) * b.to(tl.float32), axis=1)


@triton.jit
def inverse_rms(  # noqa: ANN201 - Triton blocks have no type
    x, x_ptr, column, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr
):
    """1 / RMS of a row, of which `x` is the first tile in float32."""
    squares = x * x
    for index in tl.static_range(1, NUM_TILES):
        at = index * TILE + column
        other = tl.load(x_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        squares += other * other
    return tl.rsqrt(tl.sum(squares) / WIDTH + eps)


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
