"""Token ids and rotary tables of a step, before its first layer, in two small Triton kernels.

Plain torch needs about twenty launches of two microseconds each, 3 % of a decode step of one token.
The plain twins are `pick_tokens` and `rope_and_rows` of `services.decoder.kernels.plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.heads import Rotary

_BLOCK = 256


def pick_tokens(known: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """Implements `Ops.pick_tokens`."""
    out = torch.empty_like(known)
    _pick_kernel[(triton.cdiv(len(known), _BLOCK),)](
        known, rows, last_tokens, out, len(known), BLOCK=_BLOCK
    )
    return out


def rope_and_rows(
    positions: Tensor, slots: Tensor, rope: Rotary, dtype: torch.dtype, block_size: int, *,
    pdl: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor]:  # fmt: skip
    """Implements `Ops.rope_and_rows`."""
    positions, slots = positions.contiguous(), slots.contiguous()
    count, half = len(slots), len(rope.axis)
    cos, sin = (torch.empty(count, half, dtype=dtype, device=slots.device) for _ in range(2))
    rows = torch.empty(2, count, dtype=torch.int64, device=slots.device)
    _rope_kernel[(count,)](
        positions, slots, rope.axis, rope.inv_freq, cos, sin, rows, count,
        rope.attention_factor,
        HALF=half, COLUMNS=triton.next_power_of_2(half), BLOCK_SIZE=block_size, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return (cos, sin), rows


@triton.jit(do_not_specialize=["count"])
def _pick_kernel(known_ptr, rows_ptr, last_ptr, out_ptr, count, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    row = tl.load(rows_ptr + token, mask=inside, other=-1)
    known = tl.load(known_ptr + token, mask=inside, other=0)
    last = tl.load(last_ptr + row, mask=row >= 0, other=0)
    tl.store(out_ptr + token, tl.where(row >= 0, last, known), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _rope_kernel(
    positions_ptr, slots_ptr, axis_ptr, frequency_ptr, cos_ptr, sin_ptr, rows_ptr, count,
    attention_factor, HALF: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    axis = tl.load(axis_ptr + column, mask=inside, other=0)
    frequency = tl.load(frequency_ptr + column, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + axis * count + token)
    angle = position.to(tl.float32) * frequency
    dtype = cos_ptr.dtype.element_ty
    # libdevice's, not the fast approximations: angles are as large as positions.
    place = token * HALF + column
    tl.store(cos_ptr + place, (tl.cos(angle) * attention_factor).to(dtype), mask=inside)
    tl.store(sin_ptr + place, (tl.sin(angle) * attention_factor).to(dtype), mask=inside)
    slot = tl.load(slots_ptr + token)
    key_row = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    # Padding, slot -1: as `kv_rows` has it, counted from the pool's end.
    key_row = tl.where(slot < 0, -1 - BLOCK_SIZE, key_row)
    tl.store(rows_ptr + token, key_row)
    tl.store(rows_ptr + count + token, key_row + BLOCK_SIZE)
