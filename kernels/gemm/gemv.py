"""Linear layers for one token, whose time is that of reading the weights.

cuBLAS reaches two thirds of the memory bandwidth for a GEMV. In this kernel, a CTA has a few rows
of the weight and fuses the operations around the GEMV: the RMSNorm before it, and SwiGLU or the
residual addition after it. With programmatic dependent launch, a kernel starts while the previous
kernel ends, and loads its first weights before its input is there. The reference implementations
in `kernels.plain` have the same rounding.

With `Changes`, a GEMV adds the change of a low-rank adapter before it rounds, without a launch for
it. The first programs of the grid multiply the token by the factor `a` of its slot, a row each. The
next programs multiply the products by parts of the factor `b`. Both load their factors before their
input is there. All other programs are those of the GEMV. They take the changes of their rows from
the programs before them, see `kernels.hand_over`. Only the first wave of programs has to wait for a
change. Later programs find it while they wait for the input.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.changes import MODULES, Changes
from kernels.gemm.gemv_change import expand_part, hand_to_parts, part_rows
from kernels.gemm.silu_mul import swiglu
from kernels.hand_over import take, take_rest
from kernels.tuning import GemvConfig, gemv_config


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    pdl: int = 0,
    config: GemvConfig | None = None,
    changes: Changes | None = None,
) -> Tensor:
    """Computes `x @ weight.T + bias`: `[1, K]`, `[N, K]` → `[1, N]`.

    The result is written to `out` if it is given.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "linear", bias, None, 0.0, pdl, config, changes)
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
    changes: Changes | None = None,
) -> Tensor:
    """Computes `rms_norm(x) @ weight.T + bias`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, out, "norm_linear", bias, norm, eps, pdl, config, changes)
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
    changes: Changes | None = None,
) -> Tensor:
    """Computes `silu_and_mul(rms_norm(x) @ weight.T + bias)`: `[1, K]`, `[2 * N, K]` → `[1, N]`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out, "norm_swiglu", bias, norm, eps, pdl, config, changes)
    return out


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    pdl: int = 0,
    config: GemvConfig | None = None,
    changes: Changes | None = None,
) -> None:
    """Computes `residual += x @ weight.T + bias` in place."""
    _launch(x, weight, residual, "linear_residual", bias, None, 0.0, pdl, config, changes)


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
    changes: Changes | None,
) -> None:
    num_columns, num_rows = x.shape[1], out.shape[1]
    if config is None:
        config = gemv_config(kind, len(weight), num_columns)
    rows = config.rows
    while num_rows % rows:
        rows //= 2
    sizes, modules, rank, part, parts = [0] * MODULES, 0, 0, 0, 0
    if changes is not None:
        _, modules, rank, _ = changes.a.shape
        assert modules <= MODULES, f"{modules} modules"
        sizes[:modules] = changes.sizes
        part = part_rows(rank, config.warps)
        parts = sum(triton.cdiv(size, part) for size in sizes)
    _gemv_kernel[(modules * rank + parts + num_rows // rows,)](
        x,
        weight,
        out,
        norm,
        bias,
        num_rows,
        eps,
        None if changes is None else changes.a,
        None if changes is None else changes.b,
        None if changes is None else changes.words,
        None if changes is None else changes.slots,
        0 if changes is None else changes.b.stride(0),
        *sizes,
        parts,
        WIDTH=num_columns,
        ROWS=rows,
        TILE=config.tile,
        NUM_TILES=triton.cdiv(num_columns, config.tile),
        STAGES=config.stages,
        NORM=norm is not None,
        BIAS=bias is not None,
        SWIGLU=kind == "norm_swiglu",
        ADD=kind == "linear_residual",
        MODULES=modules,
        RANK=rank,
        PART=part,
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
    a_ptr,
    b_ptr,
    words_ptr,
    slots_ptr,
    b_stride,
    size0,
    size1,
    size2,
    size3,
    num_parts,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output, or with RANK, a row of `a` or a part of the change.

    The words are those of the change of each row, and then those of the products for each part.
    """
    program = tl.program_id(0)
    if RANK:
        products_ptr = words_ptr + (size0 + size1 + size2 + size3)
        if program < MODULES * RANK:
            _shrink_row(
                program,
                x_ptr,
                a_ptr,
                products_ptr,
                norm_ptr,
                slots_ptr,
                eps,
                size0,
                size1,
                size2,
                size3,
                out_ptr.dtype.element_ty,
                WIDTH,
                TILE,
                NUM_TILES,
                STAGES,
                NORM,
                MODULES,
                RANK,
                PART,
                PDL,
            )
        elif program < MODULES * RANK + num_parts:
            expand_part(
                program - MODULES * RANK,
                b_ptr,
                words_ptr,
                products_ptr,
                slots_ptr,
                b_stride,
                size0,
                size1,
                size2,
                size3,
                RANK,
                PART,
                PDL,
            )
        else:
            _compute_rows(
                program - MODULES * RANK - num_parts,
                x_ptr,
                weight_ptr,
                out_ptr,
                norm_ptr,
                bias_ptr,
                words_ptr,
                num_rows,
                eps,
                WIDTH,
                ROWS,
                TILE,
                NUM_TILES,
                STAGES,
                NORM,
                BIAS,
                SWIGLU,
                ADD,
                True,
                PDL,
            )
    else:
        _compute_rows(
            program,
            x_ptr,
            weight_ptr,
            out_ptr,
            norm_ptr,
            bias_ptr,
            words_ptr,
            num_rows,
            eps,
            WIDTH,
            ROWS,
            TILE,
            NUM_TILES,
            STAGES,
            NORM,
            BIAS,
            SWIGLU,
            ADD,
            False,
            PDL,
        )


@triton.jit
def _shrink_row(
    index,
    x_ptr,
    a_ptr,
    products_ptr,
    norm_ptr,
    slots_ptr,
    eps,
    size0,
    size1,
    size2,
    size3,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies the token by a row of its slot's `a`, for all parts of the row's module."""
    slot = tl.load(slots_ptr)
    row = tl.maximum(slot, 0) * (MODULES * RANK) + index
    weights = (a_ptr + row * WIDTH) + tl.arange(0, TILE)[None, :]
    acc, _, _ = _multiply(
        x_ptr,
        weights,
        weights,
        weights,
        norm_ptr,
        eps,
        dtype,
        WIDTH,
        TILE,
        NUM_TILES,
        STAGES,
        NORM,
        False,
        False,
        PDL,
    )
    product = tl.sum(tl.sum(acc, axis=1), axis=0).to(dtype).to(tl.float32)
    product = tl.where(slot >= 0, product, 0.0)
    hand_to_parts(product, index, products_ptr, size0, size1, size2, size3, RANK, PART)


@triton.jit
def _compute_rows(
    index,
    x_ptr,
    weight_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    words_ptr,
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
    CHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output. With CHANGE, it adds the change that it takes."""
    row = index * ROWS + tl.arange(0, ROWS)
    weights = weight_ptr + row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, TILE)[None, :]
    up_weights = weights + tl.cast(num_rows, tl.int64) * WIDTH
    words = weights
    if CHANGE:  # of gate and up, or of one row
        words = words_ptr + row[:, None] + tl.arange(0, 2 if SWIGLU else 1)[None, :] * num_rows
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    acc, up_acc, taken = _multiply(
        x_ptr,
        weights,
        up_weights,
        words,
        norm_ptr,
        eps,
        dtype,
        WIDTH,
        TILE,
        NUM_TILES,
        STAGES,
        NORM,
        SWIGLU,
        CHANGE,
        PDL,
    )
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    up_change = 0.0
    if CHANGE:
        change = take_rest(words, taken)
        if SWIGLU:
            change, up_change = tl.split(change)
        else:
            change = tl.reshape(change, (ROWS,))
        result += change
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        up = tl.sum(up_acc, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + row).to(tl.float32)
        if CHANGE:
            up += up_change
        result = swiglu(result.to(dtype), up.to(dtype)).to(tl.float32)
    out = out_ptr + row
    if ADD:
        result += tl.load(out).to(tl.float32)
    tl.store(out, result.to(dtype))


@triton.jit
def _multiply(
    x_ptr,
    weights,
    up_weights,
    words,
    norm_ptr,
    eps,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies rows of a weight by the input, element by element.

    Args:
        x_ptr: input.
        weights: pointers to the first tile of the rows.
        up_weights: the same for up.
        words: words of the rows' changes.
        norm_ptr: weight of the norm.
        eps: constant of the norm.
        dtype: data type of the input, to which the norm rounds.

    Returns:
        Sums over the tiles for the weight and for up, and the words that have been written so far.
    """
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    # The weights are read before the wait, because no earlier kernel writes them.
    weight = tl.load(weights, mask=inside[None, :], other=0.0)
    up_weight = weight
    if SWIGLU:
        up_weight = tl.load(up_weights, mask=inside[None, :], other=0.0)
    norm = column.to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    taken = 0
    if CHANGE:  # the exchange and the load of the input run at the same time
        taken = take(words)
    x = x.to(tl.float32)
    scale = 1.0
    if NORM:
        scale = inverse_rms(x, x_ptr, column, eps, WIDTH, TILE, NUM_TILES)
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
    return acc, up_acc, taken


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
