"""W4A16 linear layers on a GPU, by kernels that read tiles of codes in tensor-core order.

The order of a tile (`packed_weight`) is that of the registers of a tensor core's operand: a thread
loads 16 consecutive bytes, and a code takes one and a half instructions before it is multiplied.
K is split until CTAs fill the device. Sums of a group are scaled in float32, and split-K partials
stay in float32 until the next kernel reduces them. Gate and up of SwiGLU are halves of a CTA's
rows, or two tiles, so that the kernel's epilogue can apply the activation.

For many tokens the weight is dequantized once, for a GEMM of cuBLAS. A kernel that dequantizes
within the GEMM was tried and given up, because it had products in flight whose operands the next
iteration overwrote.

The reference implementation is `packed_weight.weight_only_linear`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm import cublaslt
from kernels.gemm.packed_codes import (
    assembly,
    beside,
    load_groups,
    load_halves,
    load_inputs,
    load_words,
    term,
    widen,
)
from kernels.gemm.packed_weight import TILE_COLUMNS, TILE_ROWS, PackedWeight
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_gemm import num_splits, output_of

_PADDED = 16  # least number of tokens of a tensor core instruction
_BLOCK = 64  # largest number of tokens of a CTA
_MOST_SPLITS = 4  # more splits cost more in the next kernel, which adds them up, than they gain


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Division of the kernel for few tokens.

    Attributes:
        splits: splits of K, each of which computes a partial sum.
        pair: True if a CTA has two tiles of rows, so that inputs are read half as often.
        stages: pipeline stages.
        prefetched: bytes of the weight that a CTA prefetches before the input is there.
    """

    splits: int
    pair: bool = False
    stages: int = 5
    prefetched: int = 0


def skinny_config(
    num_tokens: int, num_rows: int, columns: int, device: DeviceFacts
) -> SkinnyConfig:
    """Chooses the configuration. K is split as long as all CTAs fit the device together."""
    is_few, tiles = num_tokens <= 16, num_rows // TILE_ROWS
    splits = num_splits(tiles, columns, TILE_COLUMNS, 6 * device.num_sms, _MOST_SPLITS)
    return SkinnyConfig(splits, stages=6 if is_few else 4, prefetched=4096 if is_few else 0)


def split_k_partials(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """Computes `x @ weight.T + bias` for few tokens.

    Returns:
        Split-K partials `[S, T, N]` float32, or the result `[T, N]` in the dtype of `x` if K is not
        split.
    """
    config = config or skinny_config(len(x), weight.rows, x.shape[1], device)
    out = output_of(config.splits, len(x), weight.rows, x.dtype, x.device)
    _launch_skinny(x, weight, bias, out, config, device, second="next" if config.pair else "")
    return out


def linear_swiglu(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    device: DeviceFacts,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """Computes `silu_and_mul(x @ weight.T + bias)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    out = x.new_empty(len(x), weight.rows // 2)
    config = config or SkinnyConfig(1, pair=len(x) > 32, stages=4)
    _launch_skinny(
        x,
        weight,
        bias,
        out,
        config,
        device,
        second="up" if config.pair else "halves",
    )
    return out


def _launch_skinny(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    config: SkinnyConfig,
    device: DeviceFacts,
    second: str,
) -> None:
    num_tokens, columns = x.shape
    tiles = weight.rows // TILE_ROWS // (2 if second in ("next", "up") else 1)
    blocks = triton.cdiv(num_tokens, _BLOCK)
    _skinny_kernel[(tiles, config.splits, blocks)](
        x,
        weight.codes,
        weight.scale,
        weight.zero,
        bias,
        out,
        num_tokens,
        weight.rows,
        columns,
        columns // config.splits,
        TOKENS=min(_BLOCK, max(_PADDED, triton.next_power_of_2(num_tokens))),
        GROUP=weight.group,
        ZEROS=weight.zero is not None,
        BIAS=bias is not None,
        SECOND=second,
        STAGES=config.stages,
        ASSEMBLY=assembly(x.dtype, weight.zero is not None),
        PREFETCHED=config.prefetched if device.supports_pdl else 0,
        PDL=device.supports_pdl,
        num_warps=4,
        launch_pdl=device.supports_pdl,
    )


def linear(x: Tensor, weight: PackedWeight, *, device: DeviceFacts) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` for many tokens."""
    wide = dequantized(weight, x.dtype, device=device)
    found = cublaslt.linear(x, wide)
    return F.linear(x, wide) if found is None else found


def dequantized(weight: PackedWeight, dtype: torch.dtype, *, device: DeviceFacts) -> Tensor:
    """Implements `packed_weight.dequantize` for a weight in tiles. Returns `[N, K]`."""
    out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.codes.device)
    dequantize(weight, out, device=device)
    return out


def dequantize(weight: PackedWeight, out: Tensor, first: int = 0, *, device: DeviceFacts) -> None:
    """Dequantizes rows of a weight, which are whole tiles, beginning with row `first`.

    Args:
        weight: weight in tiles.
        out: tensor `[R, K]` that gets R rows.
        first: first row.
        device: facts about the device.
    """
    wide = weight.columns // TILE_COLUMNS
    _dequantize_kernel[(wide, len(out) // TILE_ROWS)](
        weight.codes,
        weight.scale,
        weight.zero,
        out,
        weight.rows,
        weight.columns,
        first,
        GROUP=weight.group,
        ZEROS=weight.zero is not None,
        ASSEMBLY=assembly(out.dtype, weight.zero is not None),
        PDL=device.supports_pdl,
        num_warps=4,
        launch_pdl=device.supports_pdl,
    )


@triton.jit
def _fetch_early(ptr, BYTES: tl.constexpr):
    """Prefetches BYTES bytes at a pointer to L2, in lines of 128 bytes."""
    lines = ptr.to(tl.int64) + tl.arange(0, BYTES // 128) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    span,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SECOND: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    PAIR: tl.constexpr = SECOND == "next" or SECOND == "up"
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stride = num_columns // 128 * 2048  # 16-bit words of a row of tiles
    other = tile
    if SECOND == "next":
        tile = 2 * tile
        other = tile + 1
    elif SECOND == "up":
        other = tile + num_rows // 128
    elif SECOND == "halves":
        tile = tile // 2
    first = split * span
    codes = codes_ptr + tile * stride + first // 128 * 2048
    other_codes = codes_ptr + other * stride + first // 128 * 2048
    row = tile * 64 + tl.arange(0, 64)
    other_row = other * 64 + tl.arange(0, 64)
    if SECOND == "halves":  # 32 rows of gate and the same rows of up
        codes += tl.program_id(0) % 2 * 512
        index = tl.arange(0, 64)
        row = tl.program_id(0) * 32 + index % 32 + index // 32 * (num_rows // 2)
    if PREFETCHED > 0:
        _fetch_early(codes, PREFETCHED)
        if PAIR:
            _fetch_early(other_codes, PREFETCHED)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < num_tokens)[:, None]
    wait_for_earlier(PDL)
    sums = tl.zeros((64, TOKENS), tl.float32)
    other_sums = tl.zeros((64, TOKENS), tl.float32)
    inputs = x_ptr + token[:, None] * num_columns + first
    for at in tl.range(0, span, 128, num_stages=STAGES):
        if SECOND == "halves":
            words = load_halves(codes + at * 16, num_rows // 128 * stride)
        else:
            words = load_words(codes + at * 16)
        x0, x1, x2, x3 = load_inputs(inputs + at, inside, GROUP)
        scales = load_groups(scale_ptr + row[:, None], first + at, num_rows, GROUP)
        zeros = scales
        if ZEROS:
            zeros = load_groups(zero_ptr + row[:, None], first + at, num_rows, GROUP)
        sums += term(words, zeros, scales, x0, x1, x2, x3, GROUP, ZEROS, ASSEMBLY)
        if PAIR:
            words = load_words(other_codes + at * 16)
            scales = load_groups(scale_ptr + other_row[:, None], first + at, num_rows, GROUP)
            if ZEROS:
                zeros = load_groups(zero_ptr + other_row[:, None], first + at, num_rows, GROUP)
            other_sums += term(words, zeros, scales, x0, x1, x2, x3, GROUP, ZEROS, ASSEMBLY)
    if BIAS:
        sums += tl.where(split == 0, tl.load(bias_ptr + row).to(tl.float32), 0.0)[:, None]
        if PAIR:
            bias = tl.load(bias_ptr + other_row).to(tl.float32)
            other_sums += tl.where(split == 0, bias, 0.0)[:, None]
    if SECOND == "up" or SECOND == "halves":
        _store_swiglu(out_ptr, sums, other_sums, token, inside, num_rows // 2, SECOND)
    else:
        line = (split * num_tokens + token).to(tl.int64)[:, None] * num_rows
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out_ptr + line + row[None, :], tl.trans(sums).to(dtype), mask=inside)
        if PAIR:
            found = tl.trans(other_sums).to(dtype)
            tl.store(out_ptr + line + other_row[None, :], found, mask=inside)


@triton.jit
def _store_swiglu(out_ptr, sums, other_sums, token, inside, height, SECOND: tl.constexpr):
    """Applies SwiGLU to gate and up, which are halves of the rows or two tiles, and stores."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    line = token.to(tl.int64)[:, None] * height
    if SECOND == "halves":
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, 32, token.shape[0])), (2, 1, 0))
        gate, up = tl.split(halves)
        row = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(out_ptr + line + row[None, :], swiglu(gate, up), mask=inside)
    else:
        row = tl.program_id(0) * 64 + tl.arange(0, 64)
        found = tl.trans(swiglu(sums.to(dtype), other_sums.to(dtype)))
        tl.store(out_ptr + line + row[None, :], found, mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    num_rows,
    num_columns,
    first,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    column, tile = tl.program_id(0) * 128, tl.program_id(1) + first // 64
    words = load_words(codes_ptr + (tl.cast(tile, tl.int64) * num_columns + column) * 16)
    row = tile * 64 + tl.arange(0, 64)
    scales = load_groups(scale_ptr + row[:, None], column, num_rows, GROUP)
    zeros = scales
    if ZEROS:
        zeros = load_groups(zero_ptr + row[:, None], column, num_rows, GROUP)
    wait_for_earlier(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    a, b, c, d = widen(words, zeros, dtype, ZEROS, ASSEMBLY)
    s0, s1, s2, s3 = scales
    a, b = (a.to(tl.float32) * s0).to(dtype), (b.to(tl.float32) * s1).to(dtype)
    c, d = (c.to(tl.float32) * s2).to(dtype), (d.to(tl.float32) * s3).to(dtype)
    place = (row - first).to(tl.int64)[:, None] * num_columns + column + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + place, beside(beside(a, b), beside(c, d)))
