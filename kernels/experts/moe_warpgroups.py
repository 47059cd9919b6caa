"""FP8 experts for Hopper in Gluon: GEMMs over tiles of rows that share an expert.

The kernel multiplies e4m3 weights with quantized activations. It replaces `moe_gemm` with
`MoEGemmConfig.w8a8` on Hopper for sizes that `fits`. A CTA has a tile of 64 rows of one expert and
makes two passes over K. A pass multiplies the tile with two pieces of 64 rows of the expert's
matrix: of gate and of up, or two neighbours of down. The pipeline of loads continues over both
passes: weights come by TMA, and the rows of the inputs are gathered by asynchronous copies. Sums of
128 columns are scaled while tensor cores work for the other CTA of the SM.

With block scales, the epilogue of gate and up also quantizes what SwiGLU gives, because both passes
together have the 128 columns that share a scale.

The reference implementation is `services.common.nn.experts.moe` with `fp8_weight.w8a8_linear`, with
the same rounding.
"""


# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false, reportOperatorIssue=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.experts.moe_gemm import combine
from kernels.experts.moe_routing import Routing
from kernels.experts.moe_weights import ExpertWeights
from kernels.gemm.fp8_weight import BLOCK, E4M3, E4M3_MAX
from kernels.gemm.quantizing import (
    Quantized,
    amax_of,
    larger,
    quantize_activations,
    quotient,
    scale_of,
)
from kernels.gemm.silu_mul import swiglu

TOKENS = 64  # rows of a tile, which have the same expert
_PIECE = 64  # rows of a weight tile
_PASSES = gl.constexpr(2)
_STAGES = gl.constexpr(4)  # pipeline stages, with which an SM has two CTAs
_WARPS = gl.constexpr(4)
_ROWS = 256  # rows of a matrix that a CTA multiplies with: both pieces of both passes
_COLUMNS = gl.constexpr(BLOCK)  # columns of K per pipeline stage
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_LARGEST = gl.constexpr(E4M3_MAX)


def fits(device: DeviceFacts, *weights: ExpertWeights) -> bool:
    """Returns whether the kernel supports the device and the matrices of gate and up, and of down.

    All rows of a weight tile have to share a row of scales, unless each row has its own scale.
    """
    kinds = {weight.block_rows for weight in weights}
    return (
        device.is_hopper
        and kinds in ({1}, {BLOCK})
        and all(
            weight.values.dtype in (torch.uint8, E4M3)
            and weight.rows % _ROWS == 0
            and weight.values.shape[2] % BLOCK == 0
            for weight in weights
        )
    )


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    residual: Tensor,
    *,
    pdl: int,
) -> None:
    """Adds the experts' weighted outputs to the residual stream in place.

    Args:
        x: hidden states `[T, hidden]`.
        routing: routing of the tokens, with tiles of `TOKENS` rows.
        gate_up: stack of matrices `[E, 2 * I, hidden]`.
        down: stack of matrices `[E, hidden, I]`.
        residual: residual stream `[T, hidden]`.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    is_block = gate_up.block_rows == BLOCK
    hidden, size, num_rows = x.shape[1], gate_up.rows // 2, len(routing.order)
    found = quantize_activations(x, E4M3, BLOCK if is_block else hidden, pdl=pdl > 0)
    if is_block:
        values = torch.empty(num_rows, size, dtype=E4M3, device=x.device)
        scale = torch.empty(size // BLOCK, num_rows, dtype=torch.float32, device=x.device).t()
        launch_gemm(found, routing, gate_up, values, scale, is_up=True, pdl=pdl)
        inner = Quantized(values, scale, num_rows, x.dtype)
    else:
        wide = x.new_empty(num_rows, size)
        launch_gemm(found, routing, gate_up, wide, None, is_up=True, pdl=pdl)
        inner = quantize_activations(wide, E4M3, size, pdl=pdl > 0)
    out = x.new_empty(num_rows, hidden)
    launch_gemm(inner, routing, down, out, None, is_up=False, pdl=pdl)
    combine(out, routing, residual, pdl=pdl)


def launch_gemm(
    x: Quantized,
    routing: Routing,
    weight: ExpertWeights,
    out: Tensor,
    out_scale: Tensor | None,
    *,
    is_up: bool,
    pdl: int,
) -> None:
    """Computes one of the two GEMMs.

    Args:
        x: quantized hidden states of the tokens if `is_up`, or else of the rows.
        routing: routing of the tokens.
        weight: stack of matrices.
        out: tensor for the result, with a row for each row of the routing. e4m3 if it is quantized.
        out_scale: tensor for the scales of the result `[rows, groups]`, with contiguous columns.
            None if the result is not quantized.
        is_up: True for gate and up with SwiGLU, False for down.
        pdl: see `dependent_launch.wait_for_earlier`.
    """
    num_tiles = routing.tiles.shape[1]
    constants = weight.constants
    matrix = weight.values.view(E4M3).flatten(0, 1)
    tiles = TensorDescriptor.from_tensor(matrix, [_PIECE, BLOCK], _LAYOUT)
    _grouped_kernel[(weight.rows // _ROWS, num_tiles)](
        tiles,
        x.values,
        x.scale,
        weight.scale,
        out,
        out if out_scale is None else out_scale,
        routing.order,
        routing.tiles,
        num_tiles,
        x.scale.stride(1),
        0 if out_scale is None else out_scale.stride(1),
        WIDTH=x.values.shape[1],
        HEIGHT=weight.rows,
        TOP_K=routing.experts.shape[1],
        TOKENS=TOKENS,
        UP=is_up,
        QUANTIZE=out_scale is not None,
        BLOCK_ROWS=constants["BLOCK_ROWS"],
        SCALE_ROWS=constants["SCALE_ROWS"],
        SCALE_COLUMNS=constants["SCALE_COLUMNS"],
        DTYPE=gl.float16 if x.dtype == torch.float16 else gl.bfloat16,
        PDL=pdl,
        num_warps=_WARPS.value,
        launch_pdl=pdl > 0,
    )


@gluon.jit(do_not_specialize=["num_tiles", "x_stride", "out_stride"])
def _grouped_kernel(
    weight_tiles,
    x_ptr,
    x_scale_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles,
    x_stride,
    out_stride,
    WIDTH: gl.constexpr,
    HEIGHT: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    UP: gl.constexpr,
    QUANTIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiplies a tile of rows of one expert with 256 rows of its matrix.

    If UP, half of these are rows of gate, and the others are the same rows of up.
    """
    PIECE: gl.constexpr = weight_tiles.block_type.shape[0]
    ITERATIONS: gl.constexpr = WIDTH // _COLUMNS
    # Rows from the first piece of a pass to its second piece, and to the next pass.
    TO_SECOND: gl.constexpr = HEIGHT // 2 if UP else PIECE
    TO_NEXT: gl.constexpr = PIECE if UP else 2 * PIECE
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, PIECE, 32])
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [_WARPS, 1], [1, 0])
    part, tile = gl.program_id(0), gl.program_id(1)
    wait_for_earlier(PDL)
    size = gl.load(tiles_ptr + 2 * num_tiles + tile)
    expert, first_place = gl.load(tiles_ptr + tile), gl.load(tiles_ptr + num_tiles + tile)
    if size > 0:
        row = part * (_PASSES * TO_NEXT)
        x_tiles = gl.allocate_shared_memory(
            weight_tiles.dtype, [_STAGES, TOKENS, _COLUMNS], weight_tiles.layout
        )
        pieces = gl.allocate_shared_memory(
            weight_tiles.dtype, [2 * _STAGES, PIECE, _COLUMNS], weight_tiles.layout
        )
        mbars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(_STAGES):
            mbarrier.init(mbars.index(stage), count=1)
        fence_async_shared()
        debug_barrier()
        of_weights = expert * HEIGHT + row
        for stage in gl.static_range(_STAGES - 1):
            _load_weights(
                stage, weight_tiles, of_weights, TO_SECOND, TO_NEXT, pieces, mbars, ITERATIONS,
            )  # fmt: skip
        of_tile = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY))
        source, is_row = _rows(order_ptr, first_place, of_tile, size, TOP_K, UP)
        column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, COPY))
        inputs = x_ptr + source.to(gl.int64)[:, None] * WIDTH + column[None, :]
        for stage in gl.static_range(_STAGES - 1):
            _load_inputs(stage, inputs, is_row, x_tiles, ITERATIONS)
        of_tile = gl.arange(0, TOKENS, gl.SliceLayout(1, ACC))
        source, is_place = _rows(order_ptr, first_place, of_tile, size, TOP_K, UP)
        scales = scale_ptr + expert.to(gl.int64) * (SCALE_ROWS * SCALE_COLUMNS)
        kept = gl.full([TOKENS, PIECE], 0.0, DTYPE, ACC)
        for turn in gl.static_range(_PASSES):
            at_row = row + turn * TO_NEXT
            firsts = scales + at_row // BLOCK_ROWS * SCALE_COLUMNS
            seconds = scales + (at_row + TO_SECOND) // BLOCK_ROWS * SCALE_COLUMNS
            first, second = _multiply(
                turn, weight_tiles, of_weights, TO_SECOND, TO_NEXT, inputs, is_row, x_tiles, pieces,
                mbars, x_scale_ptr + source, x_stride, is_place, firsts, seconds, ITERATIONS,
                BLOCK_ROWS, ACC,
            )  # fmt: skip
            first, second = first.to(DTYPE), second.to(DTYPE)
            if UP:
                inner = swiglu(first, second)
                if not QUANTIZE:
                    _store(out_ptr, inner, first_place, size, at_row, HEIGHT // 2, 2)
                elif turn == 0:
                    kept = inner
                else:
                    _store_quantized(
                        out_ptr, out_scale_ptr, out_stride, kept, inner, first_place, of_tile,
                        size, row, HEIGHT // 2,
                    )  # fmt: skip
            else:
                _store(out_ptr, first, first_place, size, at_row, HEIGHT, 2)
                _store(out_ptr, second, first_place, size, at_row + TO_SECOND, HEIGHT, 2)
        async_copy.wait_group(0)


@gluon.jit
def _multiply(
    turn: gl.constexpr,
    weight_tiles,
    of_weights,
    TO_SECOND: gl.constexpr,
    TO_NEXT: gl.constexpr,
    inputs,
    is_row,
    x_tiles,
    pieces,
    mbars,
    x_scales,
    x_stride,
    is_place,
    firsts,
    seconds,
    ITERATIONS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    ACC: gl.constexpr,
):
    """Makes one pass over K, and starts the loads of the next one.

    Args:
        turn: number of the pass.
        x_scales: pointers to the scales of the rows' first columns.
        is_place: mask of the tile's rows that exist, in the layout of sums.
        firsts, seconds: pointers to the scales of the first and second piece of the pass.

    Returns:
        Sums of both pieces, `[TOKENS, 64]` float32.
    """
    PIECE: gl.constexpr = weight_tiles.block_type.shape[0]
    zeros = gl.full([x_tiles.shape[1], PIECE], 0.0, gl.float32, ACC)
    first_sums, second_sums = zeros, zeros
    x_scale = gl.load(x_scales, mask=is_place, other=0.0)
    if BLOCK_ROWS > 1:
        first_scale, second_scale = gl.load(firsts), gl.load(seconds)
    for iteration in range(ITERATIONS):
        index = turn * ITERATIONS + iteration
        buffer = index % _STAGES
        async_copy.wait_group(_STAGES - 2)
        mbarrier.wait(mbars.index(buffer), index // _STAGES & 1)
        fence_async_shared()
        debug_barrier()  # All warps have also finished with the buffers of the next load.
        x_tile = x_tiles.index(buffer)
        first_piece = pieces.index(2 * buffer).permute((1, 0))
        second_piece = pieces.index(2 * buffer + 1).permute((1, 0))
        first = warpgroup_mma(x_tile, first_piece, zeros, use_acc=False, is_async=True)
        second = warpgroup_mma(x_tile, second_piece, zeros, use_acc=False, is_async=True)
        later = index + _STAGES - 1
        _load_weights(
            later, weight_tiles, of_weights, TO_SECOND, TO_NEXT, pieces, mbars, ITERATIONS,
        )  # fmt: skip
        _load_inputs(later, inputs, is_row, x_tiles, ITERATIONS)
        if BLOCK_ROWS > 1:  # Scales of the next iteration are loaded during the GEMMs.
            of_first, of_second = x_scale * first_scale, x_scale * second_scale
            after = gl.minimum(iteration + 1, ITERATIONS - 1)
            first_scale, second_scale = gl.load(firsts + after), gl.load(seconds + after)
            x_scale = gl.load(x_scales + after * x_stride, mask=is_place, other=0.0)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        if BLOCK_ROWS > 1:
            first, second = first * of_first[:, None], second * of_second[:, None]
        first_sums, second_sums = first_sums + first, second_sums + second
    if BLOCK_ROWS == 1:
        column = gl.arange(0, PIECE, gl.SliceLayout(0, ACC))
        first_sums *= x_scale[:, None] * gl.load(firsts + column)[None, :]
        second_sums *= x_scale[:, None] * gl.load(seconds + column)[None, :]
    return first_sums, second_sums


@gluon.jit
def _rows(
    order_ptr,
    first_place,
    of_tile,
    size,
    TOP_K: gl.constexpr,
    UP: gl.constexpr,
):
    """Returns which rows of the inputs a tile has, and a mask of the rows that exist."""
    is_row = of_tile < size
    row = first_place + of_tile
    if UP:
        row = gl.load(order_ptr + row, mask=is_row, other=0) // TOP_K
    return row, is_row


@gluon.jit
def _load_weights(
    index,
    weight_tiles,
    row,
    TO_SECOND: gl.constexpr,
    TO_NEXT: gl.constexpr,
    pieces,
    mbars,
    ITERATIONS: gl.constexpr,
):
    """Starts loading the weights of iteration `index`, counted over all passes, if there is one."""
    buffer, at = index % _STAGES, index % ITERATIONS * _COLUMNS
    is_more = index < _PASSES * ITERATIONS
    row = row + index // ITERATIONS * TO_NEXT
    mbar = mbars.index(buffer)
    mbarrier.expect(mbar, 2 * weight_tiles.block_type.nbytes, pred=is_more)
    tma.async_copy_global_to_shared(
        weight_tiles, [row, at], mbar, pieces.index(2 * buffer), pred=is_more
    )
    tma.async_copy_global_to_shared(
        weight_tiles, [row + TO_SECOND, at], mbar, pieces.index(2 * buffer + 1), pred=is_more
    )


@gluon.jit
def _load_inputs(
    index,
    inputs,
    is_row,
    x_tiles,
    ITERATIONS: gl.constexpr,
):
    """Starts loading the inputs of iteration `index`, as a group of copies.

    If there is no such iteration, the group copies nothing from the inputs.
    """
    buffer, at = index % _STAGES, index % ITERATIONS * _COLUMNS
    is_more = index < _PASSES * ITERATIONS
    async_copy.async_copy_global_to_shared(
        x_tiles.index(buffer), inputs + at, mask=(is_row & is_more)[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def _store(
    out_ptr, values, first_place, size, column, WIDTH: gl.constexpr, ITEM_BYTES: gl.constexpr
):
    """Writes 64 columns of a tile's results."""
    TOKENS: gl.constexpr = values.shape[0]
    PER: gl.constexpr = 16 // ITEM_BYTES
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, PER], [32 * PER // values.shape[1], values.shape[1] // PER], [_WARPS, 1], [1, 0]
    )
    of_tile = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    within = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    out = out_ptr + (first_place + of_tile).to(gl.int64)[:, None] * WIDTH + column + within[None, :]
    gl.store(out, gl.convert_layout(values, LAYOUT), mask=(of_tile < size)[:, None])


@gluon.jit
def _store_quantized(
    out_ptr,
    out_scale_ptr,
    out_stride,
    one,
    other,
    first_place,
    of_tile,
    size,
    column,
    WIDTH: gl.constexpr,
):
    """Quantizes 128 columns of a tile's results, which are two halves, and writes them."""
    one, other = one.to(gl.float32), other.to(gl.float32)
    scale = scale_of(larger(amax_of(one), amax_of(other)), _LARGEST)
    PIECE: gl.constexpr = one.shape[1]
    for half in gl.static_range(2):
        values = quotient(one if half == 0 else other, scale[:, None])
        values = gl.minimum(gl.maximum(values, -_LARGEST), _LARGEST).to(out_ptr.dtype.element_ty)
        _store(out_ptr, values, first_place, size, column + half * PIECE, WIDTH, 1)
    scales = out_scale_ptr + column // _COLUMNS * out_stride + first_place + of_tile
    gl.store(scales, scale, mask=of_tile < size)
