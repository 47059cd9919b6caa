"""Triton kernels that prepare the tokens, slots, lengths and rotary tables of a step and of drafts.

In plain torch this would take about forty launches of two microseconds each, which is 6 % of a
decode step of one token. The reference implementations are `enter_step` and `rope_and_rows` of
`kernels.plain`, and `kernels.draft_places`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.heads import Rotary
from kernels.dependent_launch import wait_for_earlier
from kernels.draft_places import DraftPlaces, KeptHidden, OfDraftGroup
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


def draft_places(
    groups: Tensor, sampled: Tensor, kept: KeptHidden, blocks: Tensor, count: int, block_size: int
) -> DraftPlaces:
    """Implements `Ops.draft_places`."""
    assert groups.is_contiguous() and blocks.is_contiguous()
    assert kept.hidden.is_contiguous() and kept.positions.is_contiguous()
    fields, size = groups.shape
    width, max_drafts = kept.hidden.shape[1], fields - OfDraftGroup.DRAFT
    found = DraftPlaces(
        hidden=kept.hidden.new_empty(size, width),
        ids=groups.new_empty(size),
        positions=groups.new_empty(count, 3, size),
        slots=groups.new_empty(count, size, dtype=torch.int64),
        lengths=groups.new_empty(count, size),
        firsts=groups.new_empty(size),
    )
    _draft_kernel[(size,)](
        groups,
        sampled,
        *kept,
        blocks,
        *found,
        size,
        blocks.shape[1],
        WIDTH=width,
        DRAFTS=max_drafts,
        MOST_DRAFTS=triton.next_power_of_2(max_drafts),
        COUNT=count,
        MOST=triton.next_power_of_2(count),
        BLOCK_SIZE=block_size,
        COLUMNS=1024,
        num_warps=4,
    )
    return found


@triton.jit(do_not_specialize=["size", "max_blocks"])
def _draft_kernel(
    groups_ptr,
    sampled_ptr,
    kept_ptr,
    kept_positions_ptr,
    blocks_ptr,
    hidden_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    firsts_ptr,
    size,
    max_blocks,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    COUNT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Finds the accepted drafts of a group, and prepares the drafts behind them."""
    group = tl.program_id(0)
    row = tl.load(groups_ptr + group)
    sample = tl.load(groups_ptr + size + group)
    index = tl.load(groups_ptr + 2 * size + group)
    capacity = tl.load(groups_ptr + 3 * size + group)
    draft = tl.arange(0, MOST_DRAFTS)
    inside = draft < DRAFTS
    given = tl.load(groups_ptr + (4 + draft) * size + group, mask=inside, other=0)
    token = tl.load(sampled_ptr + sample + draft, mask=inside, other=0)
    accepted = tl.min(tl.where(inside & (token == given), DRAFTS, draft))
    tl.store(ids_ptr + group, tl.maximum(tl.load(sampled_ptr + sample + accepted), 0))
    tl.store(firsts_ptr + group, row * max_blocks)
    place = tl.arange(0, MOST)
    is_place = place < COUNT
    at = index + accepted + place
    is_stored = is_place & (at >= 0) & (at < capacity)
    table = blocks_ptr + row.to(tl.int64) * max_blocks
    last = max_blocks - 1
    block = tl.load(table + tl.minimum(at // BLOCK_SIZE, last), mask=is_stored, other=0)
    slot = tl.where(is_stored, block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE, -1)
    tl.store(slots_ptr + place * size + group, slot, mask=is_place)
    length = tl.maximum(tl.minimum(at + 1, capacity), 1)
    tl.store(lengths_ptr + place * size + group, length, mask=is_place)
    kept = row.to(tl.int64) * (1 + DRAFTS) + accepted
    for axis in tl.static_range(3):
        position = tl.load(kept_positions_ptr + kept * 3 + axis)
        tl.store(positions_ptr + (place * 3 + axis) * size + group, position + place, mask=is_place)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        state = tl.load(kept_ptr + kept * WIDTH + column, mask=column < WIDTH)
        tl.store(hidden_ptr + group.to(tl.int64) * WIDTH + column, state, mask=column < WIDTH)


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
