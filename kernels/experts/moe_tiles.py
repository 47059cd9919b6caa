"""The experts of W4A16: GEMMs over tiles of rows that share an expert, of codes in tiles.

As `moe_gemm`, with the weights of `packed_tiles`: codes are widened in registers, so that a layer
is read once, as it is packed. The same kernels serve any number of tokens.

The plain twin is `services.common.nn.experts.moe`; the rounding points are the same.
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
    x: Tensor, routing: Routing, weight: PackedWeight, out: Tensor, *, config: MoETilesConfig,
    is_up: bool, pdl: int,
) -> None:  # fmt: skip
    """One of the two GEMMs, of a stack in tiles; see `moe_gemm.grouped_experts`."""
    num_tiles = routing.tiles.shape[1]
    has_zeros = weight.zero is not None
    _grouped_kernel[(weight.rows // TILE_ROWS, num_tiles)](
        x, weight.codes, weight.scale, weight.zero, out, routing.order, routing.tiles, num_tiles,
        WIDTH=weight.columns, HEIGHT=weight.rows, TOP_K=routing.experts.shape[1],
        TOKENS=config.tokens, GROUP=weight.group, ZEROS=has_zeros, STAGES=config.stages, UP=is_up,
        ASSEMBLY=assembly(x.dtype, has_zeros), PDL=pdl, num_warps=4, launch_pdl=pdl > 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, STAGES: tl.constexpr, UP: tl.constexpr,
    ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert by 64 rows of its matrix: UP 32 of the gate and the same of up,
    where the inputs are read where their tokens lie, and SwiGLU follows.
    """
    STRIDE: tl.constexpr = WIDTH // 128 * 2048  # words of a row of tiles
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
        )  # fmt: skip
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
