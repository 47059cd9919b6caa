"""W8A8 linear layers of int8 on a GPU. One kernel quantizes activations, another multiplies.

| name     | tokens | how                                                                        |
|----------|--------|----------------------------------------------------------------------------|
| skinny   | 1-64   | split-K, for reading the weights fast; partials are scaled, in float32     |
| gemm     | more   | persistent tiles on Hopper; scales, and SwiGLU, in the epilogue            |

Sums of integers are exact, and scales are applied last, as in the reference implementation,
`int8_weight.w8a8_linear`.
"""

# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.int8_weight import TILE_COLUMNS, TILE_ROWS, Int8Weight
from kernels.gemm.quantizing import Quantized, quantize_activations
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_gemm import num_splits, output_of


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Division of `gemm`.

    Attributes:
        tokens, rows, columns: sizes of a tile.
        stages: pipeline stages.
        warps: warps per CTA.
        group: number of tiles of tokens that share rows of the weight in L2.
    """

    tokens: int = 128
    rows: int = 256
    columns: int = 128
    stages: int = 3
    warps: int = 8
    group: int = 16


# Relative time of a tile, measured by `benchmarks.kernels.packed` on an H100, and configuration.
_CONFIGS = (
    (28.7, GemmConfig()),
    (17.9, GemmConfig(128, 128, 128, 4, 8)),
    (19.9, GemmConfig(64, 256, 128, 3, 8)),
    (11.2, GemmConfig(64, 128, 128, 5, 4)),
)


def gemm_config(num_tokens: int, num_rows: int, device: DeviceFacts) -> GemmConfig:
    """Chooses the tiles whose waves take the least time for a weight with `num_rows` rows."""

    def cost(choice: tuple[float, GemmConfig]) -> float:
        time, config = choice
        tiles = -(-num_tokens // config.tokens) * -(-num_rows // config.rows)
        return time * -(-tiles // device.num_sms)

    return min(_CONFIGS, key=cost)[1]


def split_k_partials(
    x: Tensor | Quantized,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    splits: int | None = None,
    stages: int = 4,
) -> Tensor:
    """Computes `w8a8_linear(x) + bias` for up to 64 tokens.

    Returns:
        Split-K partials `[S, T, N]` float32, or the result `[T, N]` in the dtype of `x` if K is not
        split.
    """
    columns, pdl = weight.values.shape[1], device.supports_pdl
    values, scale, num_tokens, dtype = quantize_activations(x, torch.int8, columns, pdl=pdl)
    num_rows = len(weight.values)
    tiles = num_rows // TILE_ROWS
    count = splits or num_splits(tiles, columns, TILE_COLUMNS, 3 * device.num_sms)
    out = output_of(count, num_tokens, num_rows, dtype, values.device)
    _skinny_kernel[(tiles, count)](
        values,
        scale,
        weight.values,
        weight.scale,
        bias,
        out,
        num_tokens,
        num_rows,
        columns,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)),
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        SPAN=columns // count,
        BIAS=bias is not None,
        STAGES=stages,
        PDL=device.supports_pdl,
        num_warps=4,
        launch_pdl=device.supports_pdl,
    )
    return out


def gemm(
    x: Tensor | Quantized,
    weight: Int8Weight,
    *,
    device: DeviceFacts,
    config: GemmConfig | None = None,
    is_swiglu: bool = False,
) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` for many tokens.

    If `is_swiglu`, the weight has rows of gate and up, and `silu_and_mul` is applied.
    """
    columns, pdl = weight.values.shape[1], device.supports_pdl
    values, scale, num_tokens, dtype = quantize_activations(x, torch.int8, columns, pdl=pdl)
    config = config or gemm_config(num_tokens, len(weight.values), device)
    height = len(weight.values) // (2 if is_swiglu else 1)
    out = torch.empty(num_tokens, height, dtype=dtype, device=values.device)
    matrices = weight.values.view(-1, height, columns)
    rows = config.rows // len(matrices)
    tiles = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(height, rows)
    _gemm_kernel[(min(tiles, device.num_sms),)](
        TensorDescriptor.from_tensor(values, [config.tokens, config.columns]),
        TensorDescriptor.from_tensor(matrices, [len(matrices), rows, config.columns]),
        TensorDescriptor.from_tensor(out, [config.tokens, rows]),
        scale,
        weight.scale,
        num_tokens,
        WIDTH=columns,
        HEIGHT=height,
        TOKENS=config.tokens,
        ROWS=rows,
        COLUMNS=config.columns,
        GROUP=config.group,
        SWIGLU=is_swiglu,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token, column = tl.arange(0, TOKENS), split * SPAN + tl.arange(0, COLUMNS)
    inside = (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    scale = tl.load(scale_ptr + row)
    wait_for_earlier(PDL)
    # The weight is the first operand, because tensor cores need 64 rows of it.
    sums = tl.zeros((ROWS, TOKENS), tl.int32)
    for at in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        weight = tl.load(weights + at)
        x = tl.load(inputs + at, mask=inside, other=0)
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + token, mask=token < num_tokens, other=0.0)
    found = sums.to(tl.float32) * x_scale[None, :] * scale[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        found += tl.where(split == 0, bias, 0.0)[:, None]
    place = (split * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + place, tl.trans(found).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    x_tiles,
    weight_tiles,
    out_tiles,
    x_scale_ptr,
    scale_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SWIGLU: tl.constexpr,
    STAGES: tl.constexpr,
):
    ALL: tl.constexpr = 2 * ROWS if SWIGLU else ROWS
    wide: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS
    high = tl.cdiv(num_tokens, TOKENS)
    first, step = tl.program_id(0), tl.num_programs(0)
    for index in tl.range(first, high * wide, step, flatten=True, num_stages=STAGES):
        # A group of tiles of tokens is multiplied with all rows of the weight before the next.
        group = index // (GROUP * wide)
        within = index % (GROUP * wide)
        size = tl.minimum(high - group * GROUP, GROUP)
        token = (group * GROUP + within % size) * TOKENS
        row = within // size * ROWS
        sums = tl.zeros((TOKENS, ALL), tl.int32)
        for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            x = x_tiles.load([token, column])
            weight = weight_tiles.load([0, row, column]).reshape(ALL, COLUMNS)
            sums = tl.dot(x, weight.T, sums, out_dtype=tl.int32)
        each, of_row = token + tl.arange(0, TOKENS), tl.arange(0, ALL)
        of_row = row + of_row % ROWS + of_row // ROWS * HEIGHT  # rows of gate, then of up
        x_scale = tl.load(x_scale_ptr + each, mask=each < num_tokens, other=0.0)
        scale = tl.load(scale_ptr + of_row, mask=of_row < (2 * HEIGHT if SWIGLU else HEIGHT))
        dtype: tl.constexpr = out_tiles.dtype
        found = (sums.to(tl.float32) * x_scale[:, None] * scale[None, :]).to(dtype)
        if SWIGLU:
            gate, up = tl.split(tl.permute(tl.reshape(found, (TOKENS, 2, ROWS)), (0, 2, 1)))
            out_tiles.store([token, row], swiglu(gate, up))
        else:
            out_tiles.store([token, row], found)
