"""Triton kernels for the memory-bound operations of the tower, with one pass over memory each.

The reference implementations are in `tower.plain`. The encoder's dispatch table imports this module
if Triton is installed, and `services.encoder.operations.ops.Ops` specifies the operations.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like

# Rows of a CTA, which has as many warps, so that no reduction crosses warps. On an H200, more rows
# gain nothing, and a single row takes up to a quarter longer.
_ROWS = 2
# Largest width of a row that fits the registers of a warp. Wider rows are divided among warps.
_MAX_WIDTH_OF_WARP = 4096


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Implements `plain.add_layer_norm`. The sum is written to the memory of `x`.

    Only the order of the reductions differs from the reference implementation.
    """
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    return _layer_norm(x, residual, weight, bias, eps, add=True), x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Implements `plain.layer_norm` for contiguous `x`."""
    assert x.is_contiguous()
    return _layer_norm(x, x, weight, bias, eps, add=False)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` in place and returns it.

    The elements `[2, num_heads, head_dim]` of a row are contiguous. Rows may be strided, so that
    queries and keys need not be copied from the output of the fused projection.
    """
    num_rows, pair, num_heads, head_dim = x.shape
    assert x[:1].is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    _rotary_kernel[(num_rows,)](
        x,
        cos,
        sin,
        x.stride(0),
        pair * num_heads,
        head_dim // 2,
        HEADS=triton.next_power_of_2(pair * num_heads),
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return x


def pack_patches(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """Implements `plain.pack_patches` with bitwise equal results."""
    assert images.is_contiguous() and out.is_contiguous()
    _pack_patches_kernel[(len(out),)](
        images,
        out,
        height * width,
        width,
        MERGE=merge_size,
        PATCH=images.shape[1] // height,
        BLOCK=triton.next_power_of_2(images.shape[1] // height),
        CHANNELS=images.shape[-1],
        num_warps=1,
    )


def _layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, add: bool
) -> Tensor:
    num_rows, width = x.shape
    normed = empty_like(x)
    block = triton.next_power_of_2(width)
    rows, num_warps = (_ROWS, _ROWS) if block <= _MAX_WIDTH_OF_WARP else (1, 8)
    _add_layer_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        bias,
        normed,
        num_rows,
        width,
        eps,
        ADD=add,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _add_layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    num_rows,
    width,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    known = column < width
    place, inside = row * width + column, (row < num_rows) & known
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0)
        # The sum is rounded before it is normalized, as in the reference implementation.
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(x_ptr + place, total, mask=inside)
    wide = total.to(tl.float32)
    centered = tl.where(known, wide - (tl.sum(wide, axis=1) / width)[:, None], 0.0)
    variance = tl.sum(centered * centered, axis=1) / width
    normed = centered * tl.rsqrt(variance + eps)[:, None] * weight + bias
    tl.store(normed_ptr + place, normed.to(total.dtype), mask=inside)


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, row_stride, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads) & (column < half)
    place = x_ptr + row * row_stride + head * 2 * half + column
    dtype = x_ptr.dtype.element_ty
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + column, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + row * half + column, mask=column < half, other=0.0)
    tl.store(place, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_patches", "width"])
def _pack_patches_kernel(
    pixels_ptr,
    out_ptr,
    num_patches,
    width,
    MERGE: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    image, within = row // num_patches, row % num_patches
    block, inside = within // (MERGE * MERGE), within % (MERGE * MERGE)
    across = width // MERGE
    top = block // across * MERGE + inside // MERGE
    left = block % across * MERGE + inside % MERGE
    y, x = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    known = (y < PATCH) & (x < PATCH)
    first = image.to(tl.int64) * num_patches * (PATCH * PATCH)
    place = pixels_ptr + (first + (top * PATCH + y) * (width * PATCH) + left * PATCH + x) * CHANNELS
    to = out_ptr + row.to(tl.int64) * (CHANNELS * PATCH * PATCH) + y * PATCH + x
    for channel in tl.static_range(CHANNELS):
        value = tl.load(place + channel, mask=known, other=0).to(tl.float32)
        # A division as in the reference implementation: multiplying by the reciprocal would round
        # differently.
        tl.store(
            to + channel * (PATCH * PATCH),
            tl.div_rn(value - 127.5, 127.5).to(out_ptr.dtype.element_ty),
            mask=known,
        )
