"""Experts with codes in bytes: GEMMs over tiles of rows that share an expert.

The kernel is like that of `moe_tiles`, for codes that are not in tiles: integers of 4 and 8 bits,
e2m1, and e4m3 with scales per group of columns. Codes are converted in registers as in
`packed_kernels`, so that a layer is read once in its packed form. The kernel works for any number
of tokens.

The reference implementation is `services.common.nn.experts.moe`. The rounding is the same, except
that sums are scaled instead of weights if a group has 128 columns or more.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.experts.moe_gemm import rows_of_tile, store_tile
from kernels.experts.moe_routing import Routing
from kernels.experts.moe_weights import widen
from kernels.gemm.packed_kernels import TILE, widened
from kernels.gemm.packed_weight import PackedWeight
from kernels.tuning import MoETilesConfig

_ROWS = 64


def fits(weight: PackedWeight) -> bool:
    """Returns whether the kernel supports a weight.

    Tiles have to divide the rows and columns, and a group has to divide the columns of a tile or be
    a multiple of them.
    """
    group = weight.group
    whole = weight.rows % (2 * _ROWS) == 0 and weight.columns % TILE == 0
    return whole and not weight.is_tiled and (group % TILE == 0 or TILE % group == 0)


def launch_gemm(
    x: Tensor,
    routing: Routing,
    weight: PackedWeight,
    out: Tensor,
    *,
    config: MoETilesConfig,
    is_up: bool,
    pure: bool = False,
    pdl: int,
) -> None:
    """Computes one of the two GEMMs for weights that `fits`, see `moe_gemm.grouped_experts`."""
    num_tiles = routing.tiles.shape[1]
    codes, is_e4m3 = weight.codes, weight.is_float and weight.bits == 8
    if is_e4m3 and codes.is_cuda:  # on a CPU, Triton's interpreter cannot run assembly
        codes = codes.view(torch.uint8)
    _grouped_kernel[(weight.rows // _ROWS, num_tiles)](
        x,
        codes,
        weight.scale,
        weight.zero,
        weight.row_scale,
        out,
        routing.order,
        routing.tiles,
        num_tiles,
        WIDTH=weight.columns,
        HEIGHT=weight.rows,
        STRIDE=codes.shape[-1],
        TOP_K=routing.experts.shape[1],
        TOKENS=config.tokens,
        ROWS=_ROWS,
        COLUMNS=TILE,
        BITS=weight.bits,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[-1],
        FLOAT=weight.is_float,
        ZEROS=weight.zero is not None,
        STAGES=config.stages,
        UP=is_up,
        PACKED=is_e4m3 and codes.dtype == torch.uint8,
        PURE=pure,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl > 0,
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    row_scale_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOAT: tl.constexpr,
    ZEROS: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
    PACKED: tl.constexpr,
    PURE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies a tile of rows of one expert with ROWS rows of its matrix.

    If UP, half of the matrix rows belong to gate and half are the same rows of up, the inputs are
    gathered from their tokens, and SwiGLU is applied.
    """
    HALF: tl.constexpr = ROWS // 2
    PER: tl.constexpr = 8 // BITS  # codes in a byte
    BYTES: tl.constexpr = COLUMNS // PER
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    wait_for_earlier(PDL)
    part, tile = tl.program_id(0), tl.program_id(1)
    size = tl.load(tiles_ptr + 2 * num_tiles + tile)
    if size > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        index = tl.arange(0, ROWS)
        if UP:
            row = part * HALF + index % HALF + index // HALF * (HEIGHT // 2)
        else:
            row = part * ROWS + index
        byte = tl.arange(0, BYTES)
        place, source, is_row = rows_of_tile(
            order_ptr, tiles_ptr, num_tiles, size, TOP_K, TOKENS, UP
        )
        of_expert = expert * HEIGHT + row
        codes = codes_ptr + of_expert[:, None] * STRIDE + byte[None, :]
        groups = of_expert[:, None] * GROUPS
        inputs = x_ptr + source.to(tl.int64)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
        # The weight is the first operand, because tensor cores need 64 rows of it.
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            packed = tl.load(codes + at // PER)
            x = tl.load(inputs + at, mask=is_row[:, None], other=0.0)
            scale = _of_groups(scale_ptr + groups + at // GROUP, BYTES, COLUMNS, GROUP)
            zero = tl.full((ROWS, 1), MIDDLE, tl.float32)
            if ZEROS:
                zero = _of_groups(zero_ptr + groups + at // GROUP, BYTES, COLUMNS, GROUP)
            weight_scale = scale if GROUP < COLUMNS else tl.full((ROWS, 1), 1.0, tl.float32)
            if BITS == 4:
                even, odd = tl.split(tl.reshape(x, (TOKENS, BYTES, 2)))
                low = widened(packed & 15, zero, weight_scale, x.dtype, FLOAT)
                high = widened(packed >> 4, zero, weight_scale, x.dtype, FLOAT)
                term = tl.dot(low, tl.trans(even))
                term = tl.dot(high, tl.trans(odd), term)
            else:
                if FLOAT:
                    values = widen(packed, x.dtype, PACKED, PURE).to(tl.float32)
                    values = (values * weight_scale).to(x.dtype)
                else:
                    values = widened(packed, zero, weight_scale, x.dtype, False)
                term = tl.dot(values, tl.trans(x))
            if GROUP < COLUMNS:
                sums += term
            else:
                sums += term * scale
        if row_scale_ptr is not None:
            sums *= tl.load(row_scale_ptr + of_expert)[:, None]
        store_tile(out_ptr, sums, place, row, is_row, HEIGHT, UP)


@triton.jit
def _of_groups(ptr, BYTES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Loads values per group of COLUMNS columns and repeats them for each byte, in float32.

    The result is `[R, 1]` if a group covers all columns.
    """
    if GROUP < COLUMNS:
        NUM: tl.constexpr = COLUMNS // GROUP
        found = tl.load(ptr + tl.arange(0, NUM)[None, :]).to(tl.float32)
        wide = tl.broadcast_to(found[:, :, None], (ptr.shape[0], NUM, BYTES // NUM))
        values = tl.reshape(wide, (ptr.shape[0], BYTES))
    else:
        values = tl.load(ptr).to(tl.float32)
    return values
