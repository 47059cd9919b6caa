"""Linear layers for up to 16 tokens with W8A16, e2m1, or W4A16 weights that are not in tiles.

The weight is read in its packed form, and codes are converted in registers for tensor cores,
because the time is mostly that of reading the weight. K is split until CTAs fill the device, and
partials stay in float32 for the next kernel, as in `skinny_gemm`. If a group has 128 columns or
more, sums are scaled in float32. For smaller groups, weights are scaled and rounded as in the
reference implementation, `packed_weight.weight_only_linear`, which is also used for more tokens.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.packed_weight import PackedWeight
from kernels.gemm.skinny_gemm import num_splits, output_of

TILE = 128  # columns of an iteration of a CTA
_MOST_ROWS = 64  # largest number of rows of a CTA
_PADDED = 16  # least number of tokens of a tensor core instruction
_TO_E2M1 = tl.constexpr(2.0**126)  # see `widened`


def split_k_partials(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, device: DeviceFacts
) -> Tensor:
    """Computes `x @ weight.T + bias` for up to 16 tokens.

    `packed_weight.has_kernels` must be True for the weight. K is split as long as most SMs do not
    get a second CTA.

    Returns:
        Split-K partials `[S, T, N]` float32, or the result `[T, N]` in the dtype of `x` if K is not
        split.
    """
    num_tokens, columns = x.shape
    num_rows = len(weight.codes)
    rows = math.gcd(num_rows, _MOST_ROWS)
    tiles = num_rows // rows
    splits = num_splits(tiles, columns, TILE, 1.5 * device.num_sms)
    out = output_of(splits, num_tokens, num_rows, x.dtype, x.device)
    _skinny_kernel[(tiles, splits)](
        x,
        weight.codes,
        weight.scale,
        weight.zero,
        bias,
        out,
        num_tokens,
        num_rows,
        columns,
        weight.row_scale,
        TOKENS=_PADDED,
        ROWS=rows,
        COLUMNS=TILE,
        SPAN=columns // splits,
        BITS=weight.bits,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        FLOAT=weight.is_float,
        ZEROS=weight.zero is not None,
        BIAS=bias is not None,
        STAGES=4,
        PDL=device.supports_pdl,
        num_warps=4,
        launch_pdl=device.supports_pdl,
    )
    return out


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
    row_scale_ptr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOAT: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    PER: tl.constexpr = 8 // BITS  # codes in a byte
    BYTES: tl.constexpr = COLUMNS // PER
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.program_id(1)
    token, byte = tl.arange(0, TOKENS), tl.arange(0, BYTES)
    is_token = (token < num_tokens)[:, None]
    first = split * SPAN
    codes = codes_ptr + row[:, None] * (num_columns // PER) + first // PER + byte[None, :]
    inputs = x_ptr + token[:, None] * num_columns + first + tl.arange(0, COLUMNS)[None, :]
    wait_for_earlier(PDL)
    # The weight is the first operand, because tensor cores need 64 rows of it.
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in tl.range(0, SPAN, COLUMNS, num_stages=STAGES):
        packed = tl.load(codes + at // PER)
        x = tl.load(inputs + at, mask=is_token, other=0.0)
        if GROUP < COLUMNS:  # an iteration has several groups
            group = row[:, None] * GROUPS + (first + at + byte[None, :] * PER) // GROUP
        else:
            group = row[:, None] * GROUPS + (first + at) // GROUP
        scale = tl.load(scale_ptr + group).to(tl.float32)
        zero = tl.full((ROWS, 1), MIDDLE, tl.float32)
        if ZEROS:
            zero = tl.load(zero_ptr + group).to(tl.float32)
        weight_scale = scale if GROUP < COLUMNS else tl.full((ROWS, 1), 1.0, tl.float32)
        if BITS == 4:
            even, odd = tl.split(tl.reshape(x, (TOKENS, BYTES, 2)))
            low = widened(packed & 15, zero, weight_scale, x.dtype, FLOAT)
            high = widened(packed >> 4, zero, weight_scale, x.dtype, FLOAT)
            term = tl.dot(low, tl.trans(even))
            term = tl.dot(high, tl.trans(odd), term)
        else:
            term = tl.dot(widened(packed, zero, weight_scale, x.dtype, FLOAT), tl.trans(x))
        if GROUP < COLUMNS:
            sums += term
        else:
            sums += term * scale
    if row_scale_ptr is not None:
        sums *= tl.load(row_scale_ptr + row)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        sums += tl.where(split == 0, bias, 0.0)[:, None]
    place = (split * num_tokens + token).to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + place, tl.trans(sums).to(out_ptr.dtype.element_ty), mask=is_token)


@triton.jit
def widened(codes, zero, scale, dtype: tl.constexpr, FLOAT: tl.constexpr):  # noqa: ANN201
    """Converts codes minus their zero point, or e2m1 codes, exactly and multiplies by a scale.

    The exponent and mantissa of an e2m1 code become those of a float32 with the lowest exponents,
    subnormal numbers included, and a factor of 2^126 corrects the exponent.
    """
    if FLOAT:
        bits = codes.to(tl.int32)
        bits = ((bits & 8) << 28) | ((bits & 7) << 22)
        values = bits.to(tl.float32, bitcast=True) * _TO_E2M1
    else:
        values = codes.to(tl.float32) - zero
    return (values * scale).to(dtype)
