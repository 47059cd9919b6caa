"""Two Triton kernels that prepare a step's tokens, slots, lengths and rotary tables.

In plain torch this would take about forty launches of two microseconds each, which is 6 % of a
decode step of one token. The reference implementations are `enter_step` and `rope_and_rows` of
`kernels.plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.heads import Rotary
from kernels.dependent_launch import wait_for_earlier
from kernels.rows import MAX_CHANGING_CHUNKS, DeviceRows, EnteredStep, StepEntry

_BLOCK = 256


def enter_step(step: StepEntry, rows: DeviceRows, out: EnteredStep, block_size: int) -> None:
    """Implements `Ops.enter_step`."""
    num_tokens, num_chunks = step.tokens.shape[1], step.chunks.shape[1]
    most = max(num_tokens, num_chunks)
    block = max(_BLOCK, triton.next_power_of_2(most)) if most <= MAX_CHANGING_CHUNKS else _BLOCK
    _enter_kernel[(triton.cdiv(most, block),)](
        step.tokens,
        step.chunks,
        rows.blocks,
        rows.lengths,
        rows.position_deltas,
        rows.last_tokens,
        out.input_ids,
        out.positions,
        out.slots,
        out.rows,
        out.lengths,
        out.first_blocks,
        num_tokens,
        num_chunks,
        rows.blocks.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=block,
    )


def rope_and_rows(
    positions: Tensor,
    slots: Tensor,
    rope: Rotary,
    dtype: torch.dtype,
    block_size: int,
    *,
    pdl: int = 0,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Implements `Ops.rope_and_rows`."""
    positions, slots = positions.contiguous(), slots.contiguous()
    count, half = len(slots), len(rope.axis)
    cos, sin = (torch.empty(count, half, dtype=dtype, device=slots.device) for _ in range(2))
    rows = torch.empty(2, count, dtype=torch.int64, device=slots.device)
    _rope_kernel[(count,)](
        positions,
        slots,
        rope.axis,
        rope.inv_freq,
        cos,
        sin,
        rows,
        count,
        rope.attention_factor,
        HALF=half,
        COLUMNS=triton.next_power_of_2(half),
        BLOCK_SIZE=block_size,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl > 0,
    )
    return (cos, sin), rows


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _enter_kernel(
    tokens_ptr,
    chunks_ptr,
    blocks_ptr,
    row_lengths_ptr,
    deltas_ptr,
    last_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    rows_ptr,
    lengths_ptr,
    first_blocks_ptr,
    num_tokens,
    num_chunks,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prepares a block of tokens and the chunks with the same indices.

    A sequence that grows by a single token has the same index among tokens and among chunks, so the
    same program reads and writes the length.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_chunk = index < num_chunks
    place = tl.load(chunks_ptr + 2 * num_chunks + index, mask=is_chunk, other=-1)
    changed = tl.load(chunks_ptr + 3 * num_chunks + index, mask=is_chunk, other=0)
    tl.store(blocks_ptr + place, changed, mask=place >= 0)
    tl.debug_barrier()
    inside = index < num_tokens
    row = tl.load(tokens_ptr + index, mask=inside, other=-1)
    at = tl.load(tokens_ptr + num_tokens + index, mask=inside, other=0)
    known = tl.load(tokens_ptr + 2 * num_tokens + index, mask=inside, other=0)
    used = inside & (row >= 0)
    sampled = used & (at < 0)
    at = tl.where(sampled, tl.load(row_lengths_ptr + row, mask=sampled, other=0), at)
    last = tl.load(last_ptr + row, mask=sampled, other=0)
    delta = tl.load(deltas_ptr + row, mask=sampled, other=0)
    tl.store(ids_ptr + index, tl.where(sampled, last, known), mask=inside)
    for axis in tl.static_range(3):
        place = axis * num_tokens + index
        given = tl.load(tokens_ptr + 3 * num_tokens + place, mask=inside, other=0)
        tl.store(positions_ptr + place, tl.where(sampled, at + delta, given), mask=inside)
    table = blocks_ptr + row.to(tl.int64) * max_blocks
    block = tl.load(table + at // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    slot = tl.where(used, block * BLOCK_SIZE + at % BLOCK_SIZE, -1)
    tl.store(slots_ptr + index, slot, mask=inside)

    owner = tl.load(chunks_ptr + index, mask=is_chunk, other=0)
    end = tl.load(chunks_ptr + num_chunks + index, mask=is_chunk, other=0)
    before = tl.load(row_lengths_ptr + owner, mask=is_chunk & (end < 0), other=0)
    end = tl.where(end < 0, before + 1, end)
    tl.debug_barrier()  # all lengths have been read
    tl.store(row_lengths_ptr + owner, end, mask=is_chunk)
    tl.store(rows_ptr + index, owner.to(tl.int64), mask=is_chunk)
    tl.store(lengths_ptr + index, end, mask=is_chunk)
    tl.store(first_blocks_ptr + index, owner * max_blocks, mask=is_chunk)


@triton.jit(do_not_specialize=["count"])
def _rope_kernel(
    positions_ptr,
    slots_ptr,
    axis_ptr,
    frequency_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    count,
    attention_factor,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    axis = tl.load(axis_ptr + column, mask=inside, other=0)
    frequency = tl.load(frequency_ptr + column, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    position = tl.load(positions_ptr + axis * count + token)
    angle = position.to(tl.float32) * frequency
    dtype = cos_ptr.dtype.element_ty
    # tl.cos and tl.sin are libdevice's functions and not the fast approximations, which are not
    # accurate for angles that are as large as positions.
    place = token * HALF + column
    tl.store(cos_ptr + place, (tl.cos(angle) * attention_factor).to(dtype), mask=inside)
    tl.store(sin_ptr + place, (tl.sin(angle) * attention_factor).to(dtype), mask=inside)
    slot = tl.load(slots_ptr + token)
    key_row = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    # Padding has slot -1, for which `kv_rows` counts from the end of the pool.
    key_row = tl.where(slot < 0, -1 - BLOCK_SIZE, key_row)
    tl.store(rows_ptr + token, key_row)
    tl.store(rows_ptr + count + token, key_row + BLOCK_SIZE)
