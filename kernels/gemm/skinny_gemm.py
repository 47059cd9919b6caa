"""Linear layers for up to 64 tokens, whose time is mostly that of reading the weights.

The kernel also serves layers with few rows for more tokens, because their GEMM has too few tiles to
fill the device without split-K.

cuBLAS fills the device by split-K and reduces the partials in a kernel of its own. Here, partials
stay in float32, and the next kernel, a norm or a rotation, reduces them in a fixed order and rounds
once (`load_reduced`), so the rounding does not change.

The GEMM before SwiGLU is not split. Half of a CTA's rows belong to gate and the other half are the
same rows of up, so that the epilogue can apply the activation.

With `Changes`, the kernel also adds the changes of adapters, see `kernels.gemm.skinny_changes`.

The reference implementations are `split_k_partials` and `linear_swiglu` of `kernels.plain`.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.device import DeviceFacts
from kernels.gemm.changes import Changes
from kernels.gemm.silu_mul import swiglu
from kernels.gemm.skinny_changes import (
    ChangesLaunch,
    add_changes,
    first_factors,
    num_tiles,
    shrink_tile,
    slots_of,
)
from kernels.tuning import SKINNY_TOKENS, SkinnyConfig

_REDUCED = 1024  # elements that a CTA reduces
_REGISTERS = 1 << 16  # registers of an SM


def split_k_partials(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
    changes: Changes | None = None,
) -> Tensor:
    """Computes partial sums of `x @ weight.T + bias`: `[T, K]`, `[N, K]` → `[S, T, N]` float32.

    With `changes`, there are up to 64 tokens, and tiles divide the rows of each of the layer's
    modules.
    """
    num_columns = x.shape[1]
    size = (-(-num_columns // config.span(num_columns)), len(x), len(weight))
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, config, shared_memory_bytes, pdl, changes, swiglu=False)
    return out


def linear_swiglu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig,
    *,
    shared_memory_bytes: int,
    pdl: int = 0,
    changes: Changes | None = None,
) -> Tensor:
    """Computes `silu_and_mul(x @ weight.T + bias)`: `[T, K]`, `[2 * N, K]` → `[T, N]`."""
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, bias, out, config, shared_memory_bytes, pdl, changes, swiglu=True)
    return out


def reduce_split_k(x: Tensor, dtype: torch.dtype, *, pdl: int = 0) -> Tensor:
    """Implements `plain.reduce_split_k` for partials `[S, T, N]`."""
    out = torch.empty(x.shape[1:], dtype=dtype, device=x.device)
    size = out.numel()
    _reduce_kernel[(triton.cdiv(size, _REDUCED),)](
        x, out, size, SPLITS=len(x), BLOCK=_REDUCED, PDL=pdl, launch_pdl=pdl > 0
    )
    return out


# Functions that the skinny GEMMs of quantized weights share.


def num_splits(tiles: int, columns: int, unit: int, most_ctas: float, most: int = 8) -> int:
    """Number of splits of K, a power of two.

    Args:
        tiles: number of tiles of rows.
        columns: number of columns, K.
        unit: each split has a multiple of this number of columns.
        most_ctas: largest number of CTAs, which is `tiles` times the number of splits.
        most: largest number of splits.
    """
    splits = 1
    while splits < most and tiles * splits * 2 <= most_ctas and columns % (splits * 2 * unit) == 0:
        splits *= 2
    return splits


def output_of(
    splits: int, num_tokens: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocates the result `[T, N]`, or split-K partials `[S, T, N]` float32 if K is split."""
    if splits == 1:
        return torch.empty(num_tokens, num_rows, dtype=dtype, device=device)
    return torch.empty(splits, num_tokens, num_rows, dtype=torch.float32, device=device)


def summed(
    split_k_partials: Callable[..., Tensor],
    x: Tensor,
    weight: Any,  # noqa: ANN401 - a type of the weight format
    *,
    device: DeviceFacts,
) -> Tensor:
    """Linear layer `[T, K]` → `[T, N]` by a GEMM that may split K. Reduces the partials."""
    found = split_k_partials(x, weight, device=device)
    if found.dim() == 2:
        return found
    return reduce_split_k(found, x.dtype, pdl=device.supports_pdl)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: SkinnyConfig,
    shared_memory_bytes: int,
    pdl: int,
    changes: Changes | None,
    *,
    swiglu: bool,
) -> None:
    num_tokens, num_columns = x.shape
    num_rows, span = len(weight), config.span(num_columns)
    padded = min(max(16, triton.next_power_of_2(num_tokens)), SKINNY_TOKENS)
    grid = num_rows // config.rows, triton.cdiv(num_columns, span), triton.cdiv(num_tokens, padded)
    launch = ChangesLaunch.of(changes, x, config, grid[1])
    options: dict[str, int] = {}
    if changes is not None:
        # CTAs of the GEMM alone would need fewer registers.
        options["maxnreg"] = min(
            255, _REGISTERS // (32 * config.warps * config.ctas_per_sm) // 8 * 8
        )
        assert grid[2] == 1, f"{num_tokens} tokens"
        grid = (launch.programs + grid[0] * grid[1], 1, 1)
    _skinny_gemm_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_tokens,
        num_rows,
        num_columns,
        launch.programs,
        *launch.arguments,
        TOKENS=padded,
        ROWS=config.rows,
        TILE=config.tile,
        SPAN=span,
        EVEN=num_columns % span == 0,
        STAGES=config.stages(padded, shared_memory_bytes),
        BIAS=bias is not None,
        SWIGLU=swiglu,
        **launch.constants,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
        **options,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_programs", "first_slot", "last_slot"])
def _skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_programs,
    a_ptr,
    b_ptr,
    slots_ptr,
    words_ptr,
    partials_ptr,
    products_ptr,
    b_stride,
    first_slot,
    last_slot,
    size0,
    size1,
    size2,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output, or a split of them, for a tile of tokens.

    With RANK, the first programs are those of `shrink_tile`, and the others add changes.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    first_token, program = tl.program_id(2).to(tl.int64) * TOKENS, 0
    if RANK:
        program = tl.program_id(0) - num_programs
        if program < 0:
            shrink_tile(
                program + num_programs,
                x_ptr,
                a_ptr,
                slots_ptr,
                words_ptr,
                partials_ptr,
                products_ptr,
                num_tokens,
                num_columns,
                tl.num_programs(0) - num_programs,
                first_slot,
                last_slot,
                TOKENS,
                ROWS,
                TILE,
                STAGES,
                MODULES * RANK,
                PARTS,
                PART_SPAN,
                PDL,
            )
            return
        tile, split, first_token = program % (num_rows // ROWS), program // (num_rows // ROWS), 0
    _compute_tile(
        tile,
        split,
        first_token,
        program,
        x_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        words_ptr,
        b_ptr,
        slots_ptr,
        products_ptr,
        num_tokens,
        num_rows,
        num_columns,
        num_tiles(first_slot, last_slot, MODULES * RANK, ROWS),
        b_stride,
        size0,
        size1,
        size2,
        TOKENS,
        ROWS,
        TILE,
        SPAN,
        EVEN,
        STAGES,
        BIAS,
        SWIGLU,
        MODULES,
        RANK,
        BLOCK,
        BLOCKS,
        PDL,
    )


@triton.jit
def _compute_tile(
    tile,
    split,
    first_token,
    count,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    words_ptr,
    b_ptr,
    slots_ptr,
    products_ptr,
    num_tokens,
    num_rows,
    num_columns,
    tiles,
    b_stride,
    size0,
    size1,
    size2,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output, or a split of them, for a tile of tokens.

    Args:
        tile: index of the tile of rows.
        split: index of the split of K.
        first_token: first token of the tile of tokens.
        count: place of the CTA's count among the words.
        tiles: number of tiles of `a` that are counted.
    """
    HALF: tl.constexpr = ROWS // 2
    index = tl.arange(0, ROWS)
    if SWIGLU:
        row = tile * HALF + index % HALF + index // HALF * (num_rows // 2)
    else:
        row = tile * ROWS + index
    token = first_token + tl.arange(0, TOKENS)
    column = split * SPAN + tl.arange(0, TILE)
    inside = (token < num_tokens)[:, None]
    weights = weight_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x_ptr + token[:, None] * num_columns + column[None, :]
    b = 0.0
    if RANK:
        slot = slots_of(slots_ptr, token, num_tokens)
        b = first_factors(b_ptr, row, slot, split, b_stride, RANK, BLOCK, BLOCKS)
    wait_for_earlier(PDL)
    # The weight is the first operand, because tensor cores need at least 64 rows of it.
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    end = SPAN
    if not EVEN:
        end = tl.minimum(SPAN, num_columns - split * SPAN)
    for at in tl.range(0, end, TILE, num_stages=STAGES):
        weight = tl.load(weights + at)
        x = tl.load(inputs + at, mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    if RANK:
        module = 0
        if not SWIGLU:  # a CTA has rows of one module
            first = tile * ROWS
            module = (first >= size0).to(tl.int32) + (first >= size0 + size1).to(tl.int32)
            module += (first >= size0 + size1 + size2).to(tl.int32)
        acc = add_changes(
            acc,
            b,
            b_ptr,
            slots_ptr,
            products_ptr,
            words_ptr + count,
            row,
            token,
            split,
            module,
            num_tokens,
            tiles,
            b_stride,
            SWIGLU,
            MODULES,
            RANK,
            BLOCK,
            BLOCKS,
        )
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    if SWIGLU:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        halves = tl.permute(tl.reshape(acc.to(dtype), (2, HALF, TOKENS)), (2, 1, 0))
        gate, up = tl.split(halves)  # [TOKENS, HALF] each
        column = tile * HALF + tl.arange(0, HALF)
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
def load_reduced(  # noqa: ANN201 - Triton blocks have no type
    ptr, place, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr
):
    """Loads elements of a GEMM's output.

    If SPLITS is not 0, the output is given by SPLITS split-K partials, which are `stride` elements
    apart and are summed here.
    """
    if SPLITS == 0:
        values = tl.load(ptr + place, mask=inside, other=0.0)
    else:
        total = tl.load(ptr + place, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(ptr + split * stride + place, mask=inside, other=0.0)
        values = total.to(dtype)
    return values
