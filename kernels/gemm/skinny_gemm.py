"""Linear layers for up to 64 tokens, where reading the weights is most of the work; for more,
layers of few rows, whose GEMM has too few tiles to fill the device without split-K.

cuBLAS fills the device by split-K and reduces the partials in a kernel of its own. Here the
partials stay in float32 for the kernel that comes next anyway, a norm or a rotation, which reduces
them in one order and rounds once (`load_reduced`). The rounding points do not change.

The GEMM before SwiGLU is not split: half of a CTA's rows are the gate's and half the same rows of
up, so that its epilogue applies the activation.

The plain twins are `split_k_partials` and `linear_swiglu` of `kernels.plain`.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import SKINNY_TOKENS, SkinnyConfig

_REDUCED = 1024  # elements of a CTA


def split_k_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SkinnyConfig, *,
    shared_memory_bytes: int, pdl: int = 0,
) -> Tensor:  # fmt: skip
    """`[T, K]`, `[N, K]` → `[S, T, N]` float32, which add up to `x @ weight.T + bias`."""
    num_columns = x.shape[1]
    size = (-(-num_columns // config.span(num_columns)), len(x), len(weight))
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, config, shared_memory_bytes, pdl, swiglu=False)
    return out


def linear_swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SkinnyConfig, *,
    shared_memory_bytes: int, pdl: int = 0,
) -> Tensor:  # fmt: skip
    """`silu_and_mul(x @ weight.T + bias)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, bias, out, config, shared_memory_bytes, pdl, swiglu=True)
    return out


def reduce_split_k(x: Tensor, dtype: torch.dtype, *, pdl: int = 0) -> Tensor:
    """Implements `plain.reduce_split_k` of partials `[S, T, N]`."""
    out = torch.empty(x.shape[1:], dtype=dtype, device=x.device)
    size = out.numel()
    _reduce_kernel[(triton.cdiv(size, _REDUCED),)](
        x, out, size, SPLITS=len(x), BLOCK=_REDUCED, PDL=pdl, launch_pdl=pdl > 0
    )
    return out


# The skinny GEMMs of quantized weights share what follows.


def num_splits(tiles: int, columns: int, unit: int, most_ctas: float, most: int = 8) -> int:
    """Parts that K is split into, a power of two up to `most`: while tiles and parts are no more
    than `most_ctas` together, and each part has whole units of the columns.
    """
    splits = 1
    while splits < most and tiles * splits * 2 <= most_ctas and columns % (splits * 2 * unit) == 0:
        splits *= 2
    return splits


def output_of(
    splits: int, num_tokens: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory for the result `[T, N]`; where K is split, for its partials `[S, T, N]` float32."""
    if splits == 1:
        return torch.empty(num_tokens, num_rows, dtype=dtype, device=device)
    return torch.empty(splits, num_tokens, num_rows, dtype=torch.float32, device=device)


def summed(
    split_k_partials: Callable[..., Tensor],
    x: Tensor,
    weight: Any,  # noqa: ANN401 - of the function's format
    *,
    device: DeviceFacts,
) -> Tensor:
    """`[T, K]` → `[T, N]` by a GEMM that may split K: its partials' sum, or the result."""
    found = split_k_partials(x, weight, device=device)
    if found.dim() == 2:
        return found
    return reduce_split_k(found, x.dtype, pdl=device.supports_pdl)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: SkinnyConfig,
    shared_memory_bytes: int, pdl: int, *, swiglu: bool,
) -> None:  # fmt: skip
    num_tokens, num_columns = x.shape
    num_rows, span = len(weight), config.span(num_columns)
    padded = min(max(16, triton.next_power_of_2(num_tokens)), SKINNY_TOKENS)
    grid = num_rows // config.rows, triton.cdiv(num_columns, span), triton.cdiv(num_tokens, padded)
    _skinny_gemm_kernel[grid](
        x, weight, bias, out, num_tokens, num_rows, num_columns,
        TOKENS=padded, ROWS=config.rows, TILE=config.tile, SPAN=span,
        EVEN=num_columns % span == 0, STAGES=config.stages(padded, shared_memory_bytes),
        BIAS=bias is not None, SWIGLU=swiglu, PDL=pdl, num_warps=config.warps, launch_pdl=pdl > 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens, num_rows, num_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROWS // 2
    index = tl.arange(0, ROWS)
    if SWIGLU:
        row = tl.program_id(0) * HALF + index % HALF + index // HALF * (num_rows // 2)
    else:
        row = tl.program_id(0) * ROWS + index
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = split * SPAN + tl.arange(0, TILE)
    inside = (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    wait_for_earlier(PDL)
    # Tensor cores want at least 64 rows on one side, which tokens need not have.
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    end = SPAN
    if not EVEN:
        end = tl.minimum(SPAN, num_columns - split * SPAN)
    for at in tl.range(0, end, TILE, num_stages=STAGES):
        weight = tl.load(weights + at)
        x = tl.load(inputs + at, mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    if SWIGLU:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        halves = tl.permute(tl.reshape(acc.to(dtype), (2, HALF, TOKENS)), (2, 1, 0))
        gate, up = tl.split(halves)  # [TOKENS, HALF] each
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        place = token[:, None] * (num_rows // 2) + column[None, :]
        tl.store(out_ptr + place, swiglu(gate, up), mask=inside)
    else:
        place = (split * num_tokens + token)[:, None] * num_rows + row[None, :]
        tl.store(out_ptr + place, tl.trans(acc), mask=inside)


@triton.jit
def _reduce_kernel(
    x_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = load_reduced(x_ptr, place, place < size, size, SPLITS, dtype)
    tl.store(out_ptr + place, values, mask=place < size)


@triton.jit
def load_reduced(  # noqa: ANN201 - a block of the dtype
    ptr, place, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr
):
    """Values of a GEMM's output; with SPLITS, the sums of its split-K partials, which lie `stride`
    elements apart.
    """
    if SPLITS == 0:
        values = tl.load(ptr + place, mask=inside, other=0.0)
    else:
        total = tl.load(ptr + place, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(ptr + split * stride + place, mask=inside, other=0.0)
        values = total.to(dtype)
    return values
