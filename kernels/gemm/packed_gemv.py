"""W4A16 linear layers of one token, from tiles of codes, with what comes before and after in them.

As `gemv` for bf16: a CTA takes whole rows of the weight, so that no partials are left to be
reduced; RMSNorm or the residual addition are parts of it. A tile gives a CTA 16 rows, in pieces of
64 columns (a half of each quarter of a tile's columns), which are one operand of a tensor core
each. Warps take different pieces. What is read first depends on no earlier kernel, and is asked
for before that ends. Gate and up stay with `packed_tiles`, which is faster there.

The plain twin is `packed_weight.weight_only_linear`; rounding points are those of `gemv`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gemm.gemv import normed
from kernels.gemm.packed_codes import assembly, widen
from kernels.gemm.packed_weight import TILE_COLUMNS, PackedWeight

ROWS = 16  # of the weight, of a CTA
_PIECE = 64  # columns
_PIECES, _PIECES_AFTER_NORM = 32, 16  # that a CTA has in registers at once; measured on an H100


def has_gemv(weight: PackedWeight) -> bool:
    """Whether the kernel takes the weight: tiles whose columns share a scale."""
    return weight.is_tiled and weight.group % TILE_COLUMNS == 0


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None, *, pdl: bool
) -> Tensor:
    """`rms_norm(x) @ weight.T + bias`."""
    out = x.new_empty(1, weight.rows)
    _launch(x, weight, out, bias, norm, eps, pdl=pdl)
    return out


def linear_residual(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor, *, pdl: bool
) -> None:
    """`residual += x @ weight.T + bias`, in place."""
    _launch(x, weight, residual, bias, pdl=pdl, add=True)


def _launch(
    x: Tensor, weight: PackedWeight, out: Tensor, bias: Tensor | None, norm: Tensor | None = None,
    eps: float = 0.0, *, pdl: bool, add: bool = False,
) -> None:  # fmt: skip
    num_rows, columns = out.shape[1], weight.columns
    pieces = _PIECES_AFTER_NORM if norm is not None else _PIECES
    pieces = min(pieces, triton.next_power_of_2(columns // _PIECE))
    _gemv_kernel[(num_rows // ROWS,)](
        x, weight.codes, weight.scale, weight.scale if weight.zero is None else weight.zero, norm,
        bias, out, num_rows, eps, WIDTH=columns, PIECES=pieces,
        CHUNKS=triton.cdiv(columns, pieces * _PIECE), GROUP=weight.group,
        ZEROS=weight.zero is not None, NORM=norm is not None, BIAS=bias is not None, ADD=add,
        ASSEMBLY=assembly(x.dtype, weight.zero is not None), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gemv_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, norm_ptr, bias_ptr, out_ptr, num_rows, eps,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * 16
    row = first + tl.arange(0, 16)
    stride = WIDTH // 128 * 2048  # words of a row of tiles
    codes = codes_ptr + tl.cast(first // 64, tl.int64) * stride + first % 64 * 16
    scales, zeros = scale_ptr + row, zero_ptr + row
    # All that no earlier kernel has written is read before the wait.
    part = _load(codes, scales, zeros, 0, num_rows, WIDTH, PIECES, GROUP, ZEROS)
    norm = 0.0
    if NORM:
        norm = _load_x(norm_ptr, 0, WIDTH, PIECES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    scale = 1.0
    if NORM:
        squares = tl.zeros((PIECES * 64,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            x = _load_x(x_ptr, chunk, WIDTH, PIECES).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    sums = tl.zeros((16,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x = _load_x(x_ptr, chunk, WIDTH, PIECES)
        if NORM:
            if chunk > 0:
                norm = _load_x(norm_ptr, chunk, WIDTH, PIECES)
            x = normed(x.to(tl.float32), norm, scale, x.dtype).to(x.dtype)
        now = part
        if chunk + 1 < CHUNKS:
            part = _load(codes, scales, zeros, chunk + 1, num_rows, WIDTH, PIECES, GROUP, ZEROS)
        x0, x1, x2, x3 = _operands(x, PIECES)
        sums += _product(now, x0, x1, x2, x3, PIECES, ZEROS, ASSEMBLY)
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        sums += tl.load(bias_ptr + row).to(tl.float32)
    found = sums.to(dtype)
    if ADD:
        found = (found.to(tl.float32) + tl.load(out_ptr + row).to(tl.float32)).to(dtype)
    tl.store(out_ptr + row, found)


@triton.jit
def _load(
    codes, scales, zeros, chunk, height, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Words `[PIECES, 256]`, scales and zero points `[PIECES, 16, 1]` of 16 rows."""
    piece = chunk * PIECES + tl.arange(0, PIECES)
    inside = piece < WIDTH // 64
    place = codes + piece[:, None] * 1024 + tl.arange(0, 256)[None, :]
    words = tl.load(place, mask=inside[:, None], other=0)
    group = (piece // 2 * 128 // GROUP).to(tl.int64)[:, None] * height
    scale = tl.load(scales[None, :] + group, mask=inside[:, None], other=0.0)[:, :, None]
    zero = scale
    if ZEROS:
        zero = tl.load(zeros[None, :] + group, mask=inside[:, None], other=0)[:, :, None]
    return words, scale, zero


@triton.jit
def _load_x(ptr, chunk, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    column = chunk * PIECES * 64 + tl.arange(0, PIECES * 64)
    return tl.load(ptr + column, mask=column < WIDTH, other=0.0)


@triton.jit
def _operands(x, PIECES: tl.constexpr):
    """`[PIECES * 64]` → four times `[PIECES, 16, 8]`, of each quarter of the tiles' columns; eight
    times the same, since tensor cores want as many.
    """
    parts = tl.reshape(x, (PIECES // 2, 2, 2, 2, 16))  # tile, quarter, column 16, column
    parts = tl.reshape(tl.permute(parts, (0, 3, 4, 1, 2)), (PIECES, 16, 2, 2))
    even, odd = tl.split(parts)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return _eightfold(a), _eightfold(b), _eightfold(c), _eightfold(d)


@triton.jit
def _eightfold(x):
    return tl.broadcast_to(x[:, :, None], (x.shape[0], 16, 8))


@triton.jit
def _product(
    part, x0, x1, x2, x3, PIECES: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """`[16]` float32: rows times inputs of some columns, see `_load` and `_operands`."""
    words, scale, zero = part
    words = tl.permute(tl.reshape(words, (PIECES, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
    words = tl.reshape(words, (PIECES, 16, 16))
    a, b, c, d = widen(words, (zero, zero, zero, zero), x0.dtype, ZEROS, ASSEMBLY)
    found = tl.dot(a, x0)
    found = tl.dot(b, x1, found)
    found = tl.dot(c, x2, found)
    found = tl.dot(d, x3, found)
    return tl.max(tl.sum(found * scale, axis=0), axis=1)  # columns are the same
