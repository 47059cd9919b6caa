"""Linear layers for up to 64 tokens, whose time is mostly that of reading the weights.

The kernel also serves layers with few rows for more tokens, because their GEMM has too few tiles to
fill the device without split-K.

cuBLAS fills the device by split-K and reduces the partials in a kernel of its own. Here, partials
stay in float32, and the next kernel, a norm or a rotation, reduces them in a fixed order and rounds
once (`load_reduced`), so the rounding does not change.

The GEMM before SwiGLU is not split. Half of a CTA's rows belong to gate and the other half are the
same rows of up, so that the epilogue can apply the activation.

With `Changes`, the first split also adds the changes of adapters, whose factors `b` it multiplies
after its part of the weight. A step has up to 64 tokens, so all slots are multiplied at once.

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
from kernels.gemm.changes import Changes, load_factors, load_products
from kernels.gemm.silu_mul import swiglu
from kernels.tuning import SKINNY_TOKENS, SkinnyConfig

_REDUCED = 1024  # elements that a CTA reduces
_CHUNK = 64  # columns of `b`, of all slots together, that are multiplied at the same time
_REGISTERS = 1 << 16  # of an SM
_MODULES = 4  # modules of a layer with adapters at most


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

    With `changes`, the rows of each of the layer's modules have to divide into tiles.
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
    sizes, splits, modules, rank, width = [0] * _MODULES, 0, 0, 0, 0
    slots = products = b = None
    first = last = stride = 0
    options: dict[str, int] = {}
    if changes is not None:
        products, b, slots = changes.products, changes.b, changes.slots
        first, last, stride = changes.first, changes.last, b.stride(0)
        splits, _, modules, rank = products.shape
        assert modules <= _MODULES, f"{modules} modules"
        sizes[:modules], width = changes.sizes, b.shape[1] * rank
        if config.ctas_per_sm > 1:  # else the end of the kernel would take the registers of a CTA
            options["maxnreg"] = _REGISTERS // (32 * config.warps * config.ctas_per_sm) // 8 * 8
    _skinny_gemm_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_tokens,
        num_rows,
        num_columns,
        slots,
        products,
        b,
        stride,
        first,
        last,
        modules,
        *sizes[:-1],
        TOKENS=padded,
        ROWS=config.rows,
        TILE=config.tile,
        SPAN=span,
        EVEN=num_columns % span == 0,
        STAGES=config.stages(padded, shared_memory_bytes),
        BIAS=bias is not None,
        SWIGLU=swiglu,
        RANK=rank,
        CHUNK=min(_CHUNK, triton.next_power_of_2(width)),
        PRODUCTS=splits,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
        **options,
    )


@triton.jit(do_not_specialize=["num_tokens", "first_slot", "last_slot", "modules"])
def _skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    slots_ptr,
    products_ptr,
    b_ptr,
    b_stride,
    first_slot,
    last_slot,
    modules,
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
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS rows of the output, or a split of them, for a tile of tokens.

    With RANK, it adds PRODUCTS partial products of `shrink` times the factors `b`.
    """
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
    # The weight is the first operand, because tensor cores need at least 64 rows of it.
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    end = SPAN
    if not EVEN:
        end = tl.minimum(SPAN, num_columns - split * SPAN)
    for at in tl.range(0, end, TILE, num_stages=STAGES):
        weight = tl.load(weights + at)
        x = tl.load(inputs + at, mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    if RANK:  # noqa: SIM102 - the constant has to stand alone
        if split == 0:
            slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int32)
            first = tl.program_id(0) * ROWS  # a CTA has rows of one module, or of gate and up
            module = 0
            if not SWIGLU:
                module = (first >= size0).to(tl.int32) + (first >= size0 + size1).to(tl.int32)
                module += (first >= size0 + size1 + size2).to(tl.int32)
            own = products_ptr + token * (modules * RANK) + module * RANK
            acc = _add_changes(
                acc,
                slot,
                own,
                num_tokens.to(tl.int64) * (modules * RANK),
                b_ptr,
                b_stride,
                row,
                index < HALF,
                first_slot * RANK,
                last_slot * RANK,
                SWIGLU,
                RANK,
                CHUNK,
                PRODUCTS,
            )
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
def _add_changes(
    acc,
    slot,
    own,
    stride,
    b_ptr,
    b_stride,
    row,
    is_gate,
    first,
    last,
    SWIGLU: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Adds the changes of adapters to `acc` `[ROWS, TOKENS]`.

    Args:
        acc: the output.
        slot: slot of each token, -1 for none.
        own: pointers to each token's products of the rows' module, or of gate.
        stride: elements between two partial products.
        b_ptr: factors `b` of all slots.
        b_stride: elements between two rows of the factors.
        row: rows of the layer.
        is_gate: which of the rows belong to gate. The others belong to up.
        first, last: range of columns of the factors whose slots may occur.
    """
    WIDTH: tl.constexpr = min(RANK, CHUNK)
    GROUP: tl.constexpr = CHUNK // WIDTH
    for at in tl.range(first, last, CHUNK, num_stages=1):
        group = at // RANK + tl.arange(0, GROUP)
        is_used = tl.max((slot[:, None] == group[None, :]).to(tl.int32), 0)
        if tl.max(is_used, 0) > 0:
            used = tl.reshape(tl.broadcast_to((is_used > 0)[:, None], (GROUP, WIDTH)), (CHUNK,))
            # All columns of a slot are used, or none. The compiler cannot know, and would load them
            # one by one.
            used = tl.max_constancy(used, 16)  # the smallest rank
            b = load_factors(b_ptr, row, row >= 0, at + tl.arange(0, CHUNK), used, b_stride)
            x = load_products(own, slot, at, stride, PRODUCTS, RANK, CHUNK, b.dtype)
            if SWIGLU:
                acc = tl.dot(tl.where(is_gate[:, None], b, 0.0), tl.trans(x), acc)
                x = load_products(own + RANK, slot, at, stride, PRODUCTS, RANK, CHUNK, b.dtype)
                acc = tl.dot(tl.where(is_gate[:, None], 0.0, b), tl.trans(x), acc)
            else:
                acc = tl.dot(b, tl.trans(x), acc)
    return acc


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
