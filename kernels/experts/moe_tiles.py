"""W4A16 experts with codes in tiles: GEMMs over tiles of rows that share an expert.

The kernel is like that of `moe_gemm` with the weights of `packed_tiles`. Codes are converted in
registers, so that a layer is read once in its packed form. The kernel works for any number of
tokens.

The reference implementation is `services.common.nn.experts.moe`, with the same rounding.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.experts.moe_gemm import rows_of_tile, store_tile
from kernels.experts.moe_routing import Routing
from kernels.gemm.packed_codes import (
    assembly,
    load_groups,
    load_halves,
    load_inputs,
    load_words,
    term,
)
from kernels.gemm.packed_weight import TILE_ROWS, PackedWeight
from kernels.tuning import MoETilesConfig


def launch_gemm(
    x: Tensor,
    routing: Routing,
    weight: PackedWeight,
    out: Tensor,
    *,
    config: MoETilesConfig,
    is_up: bool,
    pdl: int,
) -> None:
    """Computes one of the two GEMMs with weights in tiles, see `moe_gemm.grouped_experts`."""
    num_tiles = routing.tiles.shape[1]
    has_zeros = weight.zero is not None
    _grouped_kernel[(weight.rows // TILE_ROWS, num_tiles)](
        x,
        weight.codes,
        weight.scale,
        weight.zero,
        out,
        routing.order,
        routing.tiles,
        num_tiles,
        WIDTH=weight.columns,
        HEIGHT=weight.rows,
        TOP_K=routing.experts.shape[1],
        TOKENS=config.tokens,
        GROUP=weight.group,
        ZEROS=has_zeros,
        STAGES=config.stages,
        UP=is_up,
        ASSEMBLY=assembly(x.dtype, has_zeros),
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
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    STAGES: tl.constexpr,
    UP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies a tile of rows of one expert with 64 rows of its matrix.

    If UP, these are 32 rows of gate and the same rows of up, the inputs are gathered from their
    tokens, and SwiGLU is applied.
    """
    STRIDE: tl.constexpr = WIDTH // 128 * 2048  # 16-bit words of a row of tiles
    wait_for_earlier(PDL)
    part, tile = tl.program_id(0), tl.program_id(1)
    size = tl.load(tiles_ptr + 2 * num_tiles + tile)
    if size > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        index = tl.arange(0, 64)
        first = codes_ptr + expert * (HEIGHT // 64 * STRIDE)
        if UP:
            codes = first + (part // 2).to(tl.int64) * STRIDE + part % 2 * 512
            row = part * 32 + index % 32 + index // 32 * (HEIGHT // 2)
        else:
            codes = first + part.to(tl.int64) * STRIDE
            row = part * 64 + index
        group = expert * (WIDTH // GROUP * HEIGHT) + row[:, None]
        place, source, is_row = rows_of_tile(
            order_ptr, tiles_ptr, num_tiles, size, TOP_K, TOKENS, UP
        )
        inputs = x_ptr + source.to(tl.int64)[:, None] * WIDTH
        sums = tl.zeros((64, TOKENS), tl.float32)
        for at in tl.range(0, WIDTH, 128, num_stages=STAGES):
            if UP:
                words = load_halves(codes + at * 16, HEIGHT // 128 * STRIDE)
            else:
                words = load_words(codes + at * 16)
            x0, x1, x2, x3 = load_inputs(inputs + at, is_row[:, None], GROUP)
            scales = load_groups(scale_ptr + group, at, HEIGHT, GROUP)
            zeros = scales
            if ZEROS:
                zeros = load_groups(zero_ptr + group, at, HEIGHT, GROUP)
            sums += term(words, zeros, scales, x0, x1, x2, x3, GROUP, ZEROS, ASSEMBLY)
        store_tile(out_ptr, sums, place, row, is_row, HEIGHT, UP)
