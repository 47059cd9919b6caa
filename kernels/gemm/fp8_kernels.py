"""FP8 linear layers on a GPU for few tokens, with activations that are not quantized (weight-only).

| name        | tokens | how                                                        |
|-------------|--------|------------------------------------------------------------|
| gemv        | 1      | a CTA sums a few rows in registers                         |
| skinny_gemm | 2-32   | split-K; values become bf16 in registers, for tensor cores |

FP8 values are exact in bf16, so scales are applied to sums in float32, per 128 columns or once, and
the result is rounded once. The reference implementation is `fp8_weight.weight_only_linear`.
`fp8_w8a8` has the kernels that quantize activations.
"""

# ruff: noqa: ANN201 - Triton blocks and constants have no type
# pyright: reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.fp8_weight import BLOCK, Fp8Weight
from kernels.gemm.gemv import inverse_rms, normed
from kernels.gemm.skinny_gemm import num_splits, output_of
from kernels.tuning import pads_little


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Division of `gemv`: rows of the weight per CTA, warps per CTA, and columns per tile."""

    rows: int
    warps: int
    tile: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Division of the skinny GEMM.

    Attributes:
        rows: rows of the weight per CTA.
        splits: number of splits of K.
        stages: buffers of the pipeline.
        warps: warps per CTA.
    """

    rows: int
    splits: int
    stages: int
    warps: int = 4


def gemv_config(columns: int) -> GemvConfig:
    """Chooses the division of a GEMV by its number of columns.

    A CTA holds whole rows of up to 4,096 columns if little of them is padding to a power of two.
    Longer rows are read in tiles: `benchmarks.kernels.fp8 --tune` found tiles of 1,024 columns, of
    which a thread has 64 sums, the fastest for 5,120 and 17,408 columns on an H200. Tiles take 6 %
    less time than whole rows of 6,144 columns, which are padded to 8,192. Whole rows of 12,288
    columns, padded to 16,384, were the fastest for an 8B when tiles were not among the candidates.
    """
    whole = triton.next_power_of_2(columns)
    if whole <= 4096 and 3 * whole <= 4 * columns:
        return GemvConfig(8, 4, whole)
    if whole == 16384 and 3 * whole <= 4 * columns:
        return GemvConfig(4, 8, whole)
    tile = next((tile for tile in (1024, 2048, 4096) if pads_little(columns, tile)), 512)
    return GemvConfig(8 * max(1, 1024 // tile), 4 if tile <= 1024 else 8, tile)


def skinny_config(
    num_tokens: int, num_rows: int, columns: int, device: DeviceFacts
) -> SkinnyConfig:
    """Chooses a configuration by the rule that is best on an H200 for 8B shapes.

    K is split as long as most SMs do not get a second CTA. If some SMs get a second CTA, there are
    fewer stages, so that two CTAs fit. `benchmarks.kernels.fp8 --tune` measured the candidates.
    """
    rows, tiles = 64, -(-num_rows // 64)
    splits = num_splits(tiles, columns, BLOCK, 1.5 * device.num_sms)
    is_uneven = device.num_sms < tiles * splits <= 2 * device.num_sms
    # A stage has bytes of the weight and 16-bit inputs. There is also one unpacked tile.
    stage_bytes = rows * BLOCK + _padded(num_tokens) * BLOCK * 2 + 64
    fitting = (device.shared_memory_bytes - rows * BLOCK * 2) // stage_bytes
    return SkinnyConfig(rows, splits, min(4 if is_uneven else 6, fitting))


def _padded(num_tokens: int) -> int:
    """Pads a number of tokens for tensor cores: to a power of two, at least 16."""
    return max(16, 1 << (num_tokens - 1).bit_length())


def gemv(
    x: Tensor, weight: Fp8Weight, *, device: DeviceFacts, config: GemvConfig | None = None
) -> Tensor:
    """Weight-only linear layer `[1, K]` → `[1, N]`. A CTA sums a few rows in registers."""
    out = x.new_empty(len(x), len(weight.values))
    _launch_gemv(x, weight, out, device=device, config=config)
    return out


def norm_gemv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Fp8Weight,
    bias: Tensor | None,
    *,
    device: DeviceFacts,
) -> Tensor:
    """Computes RMSNorm with weight `norm` `[K]`, then `gemv`, and adds `bias`."""
    out = x.new_empty(len(x), len(weight.values))
    _launch_gemv(x, weight, out, bias=bias, norm=norm, eps=eps, device=device)
    return out


def norm_swiglu_gemv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Fp8Weight,
    bias: Tensor | None,
    *,
    device: DeviceFacts,
) -> Tensor:
    """Computes `norm_gemv` with a weight of gate and up, then SwiGLU: `[1, K]` → `[1, N]`."""
    out = x.new_empty(len(x), len(weight.values) // 2)
    _launch_gemv(x, weight, out, bias=bias, norm=norm, eps=eps, device=device, swiglu=True)
    return out


def gemv_add(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, residual: Tensor, *, device: DeviceFacts
) -> None:
    """Computes `residual += gemv(x) + bias` in place."""
    _launch_gemv(x, weight, residual, bias=bias, device=device, add=True)


def _launch_gemv(
    x: Tensor,
    weight: Fp8Weight,
    out: Tensor,
    *,
    device: DeviceFacts,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    add: bool = False,
    config: GemvConfig | None = None,
) -> None:
    columns, num_rows, pdl = x.shape[1], out.shape[1], device.supports_pdl
    config = config or gemv_config(columns)
    rows = config.rows
    if swiglu:
        rows = max(1, rows // 2)
    while num_rows % rows:
        rows //= 2
    is_packed, values = _packed(weight)
    _gemv_kernel[(num_rows // rows,)](
        x,
        values,
        weight.scale,
        out,
        norm,
        bias,
        num_rows,
        eps,
        WIDTH=columns,
        ROWS=rows,
        TILE=config.tile,
        NUM_TILES=triton.cdiv(columns, config.tile),
        BLOCK_ROWS=weight.block_rows,
        SCALE_COLUMNS=weight.scale.shape[1],
        NORM=norm is not None,
        BIAS=bias is not None,
        SWIGLU=swiglu,
        ADD=add,
        PACKED=is_packed,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def split_k_partials(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """Computes `x @ weight.T + bias` for up to 64 tokens, weight-only.

    Returns:
        Split-K partials `[S, T, N]` float32, or the result `[T, N]` in the dtype of `x` if K is not
        split.
    """
    num_tokens, columns = x.shape
    num_rows = len(weight.values)
    config = config or skinny_config(num_tokens, num_rows, columns, device)
    out = output_of(config.splits, num_tokens, num_rows, x.dtype, x.device)
    is_packed, values = _packed(weight)
    _skinny_kernel[(triton.cdiv(num_rows, config.rows), config.splits)](
        x,
        values,
        weight.scale,
        bias,
        out,
        num_tokens,
        num_rows,
        columns,
        TOKENS=_padded(num_tokens),
        ROWS=config.rows,
        COLUMNS=BLOCK,
        SPAN=columns // config.splits,
        STAGES=config.stages,
        BLOCK_ROWS=weight.block_rows,
        SCALE_COLUMNS=weight.scale.shape[1],
        BIAS=bias is not None,
        PACKED=is_packed,
        PURE=device.capability[0] == 10,
        PDL=device.supports_pdl,
        num_warps=config.warps,
        launch_pdl=device.supports_pdl,
    )
    return out


def _packed(weight: Fp8Weight) -> tuple[bool, Tensor]:
    """Returns whether assembly unpacks the values, and the values, as bytes if it does."""
    is_packed = weight.values.is_cuda
    return is_packed, weight.values.view(torch.uint8) if is_packed else weight.values


def _unpack_assembly(shift: int, factor: int, dtype: str) -> str:
    """PTX that converts four e4m3 bytes exactly to two registers of two 16-bit floats.

    A byte becomes the upper half of 16 bits. The sign stays in its place, and exponent and mantissa
    are shifted right by `shift` bits. Multiplication by `factor`, a power of two, corrects for the
    exponent bias and normalizes subnormal numbers. This takes ten instructions for four values. The
    conversions that Triton emits process 12 values per clock and SM, far below the memory rate.

    The codes of NaN become 480. `services.common.nn.weights` refuses files that have one.
    """
    halves = [
        f"""
        prmt.b32 bytes, $2, 0, {selector};
        and.b32 value, bytes, 0x7f007f00;
        shr.b32 value, value, {shift};
        lop3.b32 value, bytes, 0x80008000, value, 0xEA;
        fma.rn.{dtype} ${index}, value, factor, zero;"""
        for index, selector in enumerate(("0x1404", "0x3424"))
    ]
    return f"""{{
        .reg .b32 bytes, value, factor, zero;
        mov.b32 factor, {factor:#06x}{factor:04x};
        mov.b32 zero, 0x80008000;{"".join(halves)}
        }}"""


# The factors are 2^120 and 2^8, by the differences of the exponent biases.
_TO_BF16 = tl.constexpr(_unpack_assembly(4, 0x7B80, "bf16x2"))
_TO_F16 = tl.constexpr(_unpack_assembly(1, 0x5C00, "f16x2"))


def _to_f32_assembly() -> str:
    """PTX that converts four e4m3 bytes exactly to four floats, times 2^-120.

    A byte and its sign, which fills the byte above, are moved to the upper half of the register.
    Shifted by four bits, sign, exponent and mantissa are where a float32 has them, and subnormal
    numbers stay subnormal. This takes three instructions for a value, one of which (the shift) can
    run where multiplications do. The conversions that Triton emits process 12 values per clock and
    SM, which is two thirds of the memory rate of an H200. The codes of NaN become 480 times 2^-120.
    """
    lines = [
        f"""
        prmt.b32 ${byte}, bytes, 0, {(8 | byte) << 12 | byte << 8 | 0x44:#06x};
        shl.b32 ${byte}, ${byte}, 4;
        and.b32 ${byte}, ${byte}, 0x87f00000;"""
        for byte in range(4)
    ]
    return f"{{ .reg .b32 bytes; mov.b32 bytes, $4;{''.join(lines)} }}"


_TO_F32 = tl.constexpr(_to_f32_assembly())
_SMALL = tl.constexpr(2.0**-120)
_HALF_WAY = tl.constexpr(2.0**60)  # twice, so that neither inputs nor sums leave float32's range


@triton.jit
def unpack(values, dtype: tl.constexpr, PURE: tl.constexpr):
    """Converts e4m3 bytes to bfloat16 or float16.

    If the assembly is declared pure, the compiler moves it after the conversion to the layout of
    tensor cores, in which a thread loads two bytes at a time. On Blackwell data center GPUs it has
    to be declared pure, because the compiler cannot pipeline a loop with impure assembly for these.
    """
    if dtype == tl.float16:
        wide = tl.inline_asm_elementwise(
            _TO_F16, "=r,=r,r", [values], dtype=tl.float16, is_pure=PURE, pack=4
        )
    else:
        wide = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=PURE, pack=4
        )
    return wide


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ADD: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies ROWS rows of the weight by the token, in NUM_TILES tiles of TILE columns.

    `x` and `norm` are `[WIDTH]`, and `out` is `[num_rows]`. `weight` is `[N, WIDTH]`, e4m3 or, if
    PACKED, its bytes, and `bias` is `[N]`. N is `num_rows`, or twice as many with SWIGLU: the rows
    of gate, and then those of up. `scale` is `[N / BLOCK_ROWS, SCALE_COLUMNS]` with a scale for 128
    columns, or `[N]` if BLOCK_ROWS is 1. ADD adds the result to `out`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    # The scales of a tile start here. All rows of a CTA share a row of scales of blocks.
    scales = scale_ptr
    if BLOCK_ROWS > 1:
        scales += tl.program_id(0) * ROWS // BLOCK_ROWS * SCALE_COLUMNS
    up_scales = scales
    weights = weight_ptr + row.to(tl.int64)[:, None] * WIDTH
    up_weights = weights + tl.cast(num_rows, tl.int64) * WIDTH
    if SWIGLU and BLOCK_ROWS > 1:
        up_scales += num_rows // BLOCK_ROWS * SCALE_COLUMNS
    # Weights and scales are read before the wait, because no earlier kernel writes them.
    inside = column < WIDTH
    weight, scale = _tile(weights, scales, column, inside, BLOCK_ROWS)
    up_weight, up_scale = weight, scale
    if SWIGLU:
        up_weight, up_scale = _tile(up_weights, up_scales, column, inside, BLOCK_ROWS)
    norm = column.to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = inverse_rms(x, x_ptr, column, eps, WIDTH, TILE, NUM_TILES)
    sums = tl.zeros((ROWS, TILE), tl.float32)
    up_sums = sums
    for index in tl.static_range(NUM_TILES):
        now, up_now, now_scale, up_now_scale = weight, up_weight, scale, up_scale
        now_x, now_norm = x, norm
        if index + 1 < NUM_TILES:  # the next tile is on its way while this one is added
            at = (index + 1) * TILE + column
            inside = at < WIDTH
            weight, scale = _tile(weights, scales, at, inside, BLOCK_ROWS)
            if SWIGLU:
                up_weight, up_scale = _tile(up_weights, up_scales, at, inside, BLOCK_ROWS)
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                norm = tl.load(norm_ptr + at, mask=inside, other=0.0)
        if NORM:
            now_x = normed(now_x, now_norm, factor, dtype)
        now_x *= _HALF_WAY
        sums += _small(now, PACKED) * (now_x * now_scale)[None, :]
        if SWIGLU:
            up_sums += _small(up_now, PACKED) * (now_x * up_now_scale)[None, :]
    result = _scaled(tl.sum(sums, axis=1), scale_ptr + row, BLOCK_ROWS)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        up = _scaled(tl.sum(up_sums, axis=1), scale_ptr + num_rows + row, BLOCK_ROWS)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + row).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        gate = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32)
        result = gate * up
    out = out_ptr + row
    if ADD:
        result += tl.load(out).to(tl.float32)
    tl.store(out, result.to(dtype))


@triton.jit
def _tile(weights, scales, column, inside, BLOCK_ROWS: tl.constexpr):
    """Returns the columns of rows of the weight, and the scales of their blocks, or 1."""
    scale = 1.0
    if BLOCK_ROWS > 1:
        scale = tl.load(scales + column // 128, mask=inside, other=0.0)
    return tl.load(weights + column[None, :], mask=inside[None, :], other=0.0), scale


@triton.jit
def _small(values, PACKED: tl.constexpr):
    """Converts e4m3 to float32 exactly, times 2^-120."""
    if PACKED:
        found = tl.inline_asm_elementwise(
            _TO_F32, "=r,=r,=r,=r,r", [values], dtype=tl.float32, is_pure=True, pack=4
        )
    else:  # Triton's interpreter cannot run assembly
        found = values.to(tl.float32) * _SMALL
    return found


@triton.jit
def _scaled(sums, scales, BLOCK_ROWS: tl.constexpr):
    """Completes sums of `_small` values times inputs times 2^60, and applies scales of rows."""
    sums *= _HALF_WAY
    if BLOCK_ROWS == 1:
        sums *= tl.load(scales)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
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
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    PURE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token, column = tl.arange(0, TOKENS), split * SPAN + tl.arange(0, COLUMNS)
    is_row, is_token = row < num_rows, (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    if BLOCK_ROWS > 1:  # all rows of a CTA belong to one block
        scales = scale_ptr + tl.program_id(0) * ROWS // BLOCK_ROWS * SCALE_COLUMNS
        scales += split * SPAN // 128
    wait_for_earlier(PDL)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    # The weight is the first operand, because tensor cores need 64 rows of it.
    for at in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        values = tl.load(weights + at, mask=is_row[:, None], other=0.0)
        x = tl.load(inputs + at, mask=is_token, other=0.0)
        # Triton's interpreter cannot run assembly.
        weight = unpack(values, x.dtype, PURE) if PACKED else values.to(tl.float32)
        weight = weight.to(x.dtype)
        if BLOCK_ROWS > 1:
            sums += tl.dot(weight, tl.trans(x)) * tl.load(scales + at // 128)
        else:
            sums = tl.dot(weight, tl.trans(x), sums)
    if BLOCK_ROWS == 1:
        sums *= tl.load(scale_ptr + row, mask=is_row, other=0.0)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, bias, 0.0)[:, None]
    place = (split * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
    result = tl.trans(sums).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=is_token & is_row[None, :])
