"""FP8 linear layers on a GPU for few tokens, whose activations stay as they are (weight-only).

| name        | tokens | how                                                        |
|-------------|--------|------------------------------------------------------------|
| gemv        | 1      | a CTA holds whole rows in registers                        |
| skinny_gemm | 2-32   | split-K; values become bf16 in registers, for tensor cores |

A weight's value is exact in bf16, so scales apply to sums in float32, per 128 columns or once,
which round once. The plain twin is `fp8_weight.weight_only_linear`; `fp8_w8a8` has what quantizes
activations.
"""

# ruff: noqa: ANN201 - blocks and constants of the kernels' compiler
# pyright: reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.fp8_weight import BLOCK, Fp8Weight
from kernels.gemm.skinny_gemm import num_splits, output_of


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Rows of the weight per CTA, and its warps."""

    rows: int
    warps: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Rows of the weight per CTA, parts that K is split into, buffers of the pipeline, warps."""

    rows: int
    splits: int
    stages: int
    warps: int = 4


def gemv_config(columns: int) -> GemvConfig:
    """By `benchmarks/kernels/fp8.py --tune` on an H200, 8B shapes."""
    return GemvConfig(8, 4) if columns <= 4096 else GemvConfig(4, 8)


def skinny_config(
    num_tokens: int, num_rows: int, columns: int, device: DeviceFacts
) -> SkinnyConfig:
    """By `benchmarks.kernels.fp8 --tune` on an H200, 8B shapes: K is split while most SMs get no
    second CTA by that; fewer stages where some SMs get one, so that two fit.
    """
    rows, tiles = 64, -(-num_rows // 64)
    splits = num_splits(tiles, columns, BLOCK, 1.5 * device.num_sms)
    is_uneven = device.num_sms < tiles * splits <= 2 * device.num_sms
    # A stage holds bytes of the weight and 16-bit inputs; beside them, one tile is unpacked.
    stage_bytes = rows * BLOCK + _padded(num_tokens) * BLOCK * 2 + 64
    fitting = (device.shared_memory_bytes - rows * BLOCK * 2) // stage_bytes
    return SkinnyConfig(rows, splits, min(4 if is_uneven else 6, fitting))


def _padded(num_tokens: int) -> int:
    """Tensor cores want 16 at least, and a power of two."""
    return max(16, 1 << (num_tokens - 1).bit_length())


def gemv(
    x: Tensor, weight: Fp8Weight, *, device: DeviceFacts, config: GemvConfig | None = None
) -> Tensor:
    """`[1, K]` → `[1, N]`, weight-only; a CTA holds whole rows in registers."""
    out = x.new_empty(len(x), len(weight.values))
    _launch_gemv(x, weight, out, device=device, config=config)
    return out


def norm_gemv(
    x: Tensor, norm: Tensor, eps: float, weight: Fp8Weight, bias: Tensor | None, *,
    device: DeviceFacts,
) -> Tensor:  # fmt: skip
    """`gemv` after RMSNorm with weight `norm` `[K]`, plus `bias`."""
    out = x.new_empty(len(x), len(weight.values))
    _launch_gemv(x, weight, out, bias=bias, norm=norm, eps=eps, device=device)
    return out


def norm_swiglu_gemv(
    x: Tensor, norm: Tensor, eps: float, weight: Fp8Weight, bias: Tensor | None, *,
    device: DeviceFacts,
) -> Tensor:  # fmt: skip
    """`norm_gemv` to gate and up, `[2 * N, K]`, then `silu(gate) * up`: `[1, N]`."""
    out = x.new_empty(len(x), len(weight.values) // 2)
    _launch_gemv(x, weight, out, bias=bias, norm=norm, eps=eps, device=device, swiglu=True)
    return out


def gemv_add(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, residual: Tensor, *, device: DeviceFacts
) -> None:
    """`residual += gemv(x) + bias`, in place."""
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
    is_native, values = _values(weight)
    _gemv_kernel[(num_rows // rows,)](
        x, values, weight.scale, out, norm, bias, num_rows, eps,
        WIDTH=columns, ROWS=rows, COLUMNS=triton.next_power_of_2(columns),
        BLOCK_ROWS=weight.block_rows, SCALE_COLUMNS=weight.scale.shape[1],
        NORM=norm is not None, BIAS=bias is not None, SWIGLU=swiglu, ADD=add, NATIVE=is_native,
        PDL=pdl, num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip


def split_k_partials(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """For up to 64 tokens, weight-only: split-K partials `[S, T, N]` float32, whose sum is
    `x @ weight.T + bias`; or, where K is not split, the result `[T, N]` in x's dtype.
    """
    num_tokens, columns = x.shape
    num_rows = len(weight.values)
    config = config or skinny_config(num_tokens, num_rows, columns, device)
    out = output_of(config.splits, num_tokens, num_rows, x.dtype, x.device)
    is_packed, values = _packed(weight)
    _skinny_kernel[(triton.cdiv(num_rows, config.rows), config.splits)](
        x, values, weight.scale, bias, out, num_tokens, num_rows, columns,
        TOKENS=_padded(num_tokens), ROWS=config.rows, COLUMNS=BLOCK,
        SPAN=columns // config.splits, STAGES=config.stages, BLOCK_ROWS=weight.block_rows,
        SCALE_COLUMNS=weight.scale.shape[1], BIAS=bias is not None, PACKED=is_packed,
        PURE=device.capability[0] == 10, PDL=device.supports_pdl,
        num_warps=config.warps, launch_pdl=device.supports_pdl,
    )  # fmt: skip
    return out


def _values(weight: Fp8Weight) -> tuple[bool, Tensor]:
    """Whether the device converts e4m3 itself, and the values; as bytes where it does not."""
    device = weight.values.device
    is_native = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return is_native, weight.values if is_native else weight.values.view(torch.uint8)


def _packed(weight: Fp8Weight) -> tuple[bool, Tensor]:
    """Whether assembly unpacks the values, and the values; as bytes where it does."""
    is_packed = weight.values.is_cuda
    return is_packed, weight.values.view(torch.uint8) if is_packed else weight.values


@triton.jit
def _widen(values, NATIVE: tl.constexpr):
    """e4m3 as float16, exactly. Bytes: sign and exponent move to float16's places, whose bias is 8
    more; the caller's scale has the factor of 256.
    """
    if NATIVE:
        wide = values.to(tl.float16)
    else:
        bits = values.to(tl.uint16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return wide


def _unpack_assembly(shift: int, factor: int, dtype: str) -> str:
    """PTX that makes two registers of two 16-bit floats from four e4m3 bytes, exactly.

    A byte becomes the upper half of 16 bits. Its sign stays, exponent and mantissa move `shift`
    bits down to their places; `factor`, a power of two, corrects for the exponent's bias, and makes
    normal numbers of subnormal ones. Ten instructions for four values: the conversions that Triton
    emits handle 12 values per clock and SM, far below the memory's rate.
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


# 2^120 and 2^8: the difference of the exponents' biases.
_TO_BF16 = tl.constexpr(_unpack_assembly(4, 0x7B80, "bf16x2"))
_TO_F16 = tl.constexpr(_unpack_assembly(1, 0x5C00, "f16x2"))


@triton.jit
def unpack(values, dtype: tl.constexpr, PURE: tl.constexpr):
    """Bytes of e4m3 as bfloat16 or float16.

    If the assembly is declared pure, the compiler moves it behind the change to the tensor cores'
    layout, where a thread loads two bytes at a time. For Blackwell's data center GPUs it fails to
    pipeline a loop with impure assembly.
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
    x_ptr, weight_ptr, scale_ptr, out_ptr, norm_ptr, bias_ptr, num_rows, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    UNIT: tl.constexpr = 1.0 if NATIVE else 256.0
    # What no earlier kernel writes is read before the wait.
    place = weight_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    weight = tl.load(place, mask=inside[None, :], other=0.0)
    if SWIGLU:
        up_place = place + tl.cast(num_rows, tl.int64) * WIDTH
        up_weight = tl.load(up_place, mask=inside[None, :], other=0.0)
    if BLOCK_ROWS > 1:  # a CTA's rows have one row of scales
        block = tl.program_id(0) * ROWS // BLOCK_ROWS
        of_column = scale_ptr + block * SCALE_COLUMNS + column // 128
        scale = tl.load(of_column, mask=inside, other=0.0) * UNIT
        if SWIGLU:
            of_column += num_rows // BLOCK_ROWS * SCALE_COLUMNS
            up_scale = tl.load(of_column, mask=inside, other=0.0) * UNIT
    else:
        scale = tl.load(scale_ptr + row) * UNIT
        if SWIGLU:
            up_scale = tl.load(scale_ptr + num_rows + row) * UNIT
    if NORM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
        x = (x * factor).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    result = _dot_rows(weight, x, scale, BLOCK_ROWS, NATIVE)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if SWIGLU:
        up = _dot_rows(up_weight, x, up_scale, BLOCK_ROWS, NATIVE)
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
def _dot_rows(weight, x, scale, BLOCK_ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """`[ROWS]`: sums of `weight * x` over the columns; `scale` is per column or per row."""
    if BLOCK_ROWS > 1:
        found = tl.sum(_widen(weight, NATIVE).to(tl.float32) * (x * scale)[None, :], axis=1)
    else:
        found = tl.sum(_widen(weight, NATIVE).to(tl.float32) * x[None, :], axis=1) * scale
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, num_rows, num_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr, PURE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token, column = tl.arange(0, TOKENS), split * SPAN + tl.arange(0, COLUMNS)
    is_row, is_token = row < num_rows, (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    if BLOCK_ROWS > 1:  # all rows are of one block
        scales = scale_ptr + tl.program_id(0) * ROWS // BLOCK_ROWS * SCALE_COLUMNS
        scales += split * SPAN // 128
    wait_for_earlier(PDL)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    # Tensor cores want 64 rows on one side, which tokens need not have.
    for at in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        values = tl.load(weights + at, mask=is_row[:, None], other=0.0)
        x = tl.load(inputs + at, mask=is_token, other=0.0)
        # The interpreter has no assembly.
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
