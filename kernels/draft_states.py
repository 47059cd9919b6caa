"""Triton kernels that read and keep hidden states for the layer for multi-token prediction.

Each step with the layer runs both, so they replace about 25 launches of torch. The reference
implementations are in `kernels.draft_places`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.draft_places import KeptHidden

_COLUMNS = 1024  # columns that a CTA copies at a time


def draft_sources(
    tokens: Tensor,
    rows: Tensor,
    hidden: Tensor,
    positions: Tensor,
    kept: KeptHidden,
    blocks: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `Ops.draft_sources`."""
    _check(tokens, rows, hidden, positions, *kept, blocks)
    count, width = tokens.shape[1], hidden.shape[1]
    before = hidden.new_empty(count, width)
    places = positions.new_empty(3, count)
    slots = positions.new_empty(count, dtype=torch.int64)
    _source_kernel[(count,)](
        tokens,
        rows,
        hidden,
        positions,
        *kept,
        blocks,
        before,
        places,
        slots,
        count,
        positions.shape[1],
        blocks.shape[1],
        WIDTH=width,
        BLOCK_SIZE=block_size,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return before, places, slots


def keep_hidden(chunks: Tensor, hidden: Tensor, positions: Tensor, kept: KeptHidden) -> None:
    """Implements `Ops.keep_hidden`."""
    _check(chunks, hidden, positions, *kept)
    count = chunks.shape[1]
    _keep_kernel[(count,)](
        chunks,
        hidden,
        positions,
        *kept,
        count,
        positions.shape[1],
        WIDTH=hidden.shape[1],
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def _check(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)


@triton.jit(do_not_specialize=["num_tokens", "stride", "max_blocks"])
def _source_kernel(
    tokens_ptr,
    rows_ptr,
    hidden_ptr,
    positions_ptr,
    kept_ptr,
    kept_positions_ptr,
    blocks_ptr,
    before_ptr,
    places_ptr,
    slots_ptr,
    num_tokens,
    stride,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies the hidden state and the positions of the token before a token."""
    token = tl.program_id(0)
    source = tl.load(tokens_ptr + token).to(tl.int64)
    index = tl.load(tokens_ptr + num_tokens + token)
    row = tl.maximum(tl.load(rows_ptr + token), 0).to(tl.int64)
    is_kept = source < 0
    at = tl.where(is_kept, -1 - source, source)
    is_stored = index >= 0
    place = tl.minimum(tl.maximum(index, 0) // BLOCK_SIZE, max_blocks - 1)
    block = tl.load(blocks_ptr + row * max_blocks + place).to(tl.int64)
    tl.store(slots_ptr + token, tl.where(is_stored, block * BLOCK_SIZE + index % BLOCK_SIZE, -1))
    axis = tl.arange(0, 4)
    inside = axis < 3
    old = tl.load(kept_positions_ptr + at * 3 + axis, mask=inside & is_kept, other=0)
    new = tl.load(positions_ptr + axis * stride + at, mask=inside & (source >= 0), other=0)
    tl.store(places_ptr + axis * num_tokens + token, tl.where(is_kept, old, new), mask=inside)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        kept = tl.load(kept_ptr + at * WIDTH + column, mask=is_column & is_kept, other=0.0)
        own = tl.load(hidden_ptr + at * WIDTH + column, mask=is_column & (source >= 0), other=0.0)
        target = before_ptr + token.to(tl.int64) * WIDTH + column
        tl.store(target, tl.where(is_kept, kept, own), mask=is_column)


@triton.jit(do_not_specialize=["num_chunks", "stride"])
def _keep_kernel(
    chunks_ptr,
    hidden_ptr,
    positions_ptr,
    kept_ptr,
    kept_positions_ptr,
    num_chunks,
    stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keeps the hidden state and the positions of the last token of a chunk."""
    chunk = tl.program_id(0)
    last = tl.load(chunks_ptr + chunk).to(tl.int64)
    target = tl.load(chunks_ptr + num_chunks + chunk).to(tl.int64)
    axis = tl.arange(0, 4)
    inside = axis < 3
    position = tl.load(positions_ptr + axis * stride + last, mask=inside)
    tl.store(kept_positions_ptr + target * 3 + axis, position, mask=inside)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        state = tl.load(hidden_ptr + last * WIDTH + column, mask=is_column)
        tl.store(kept_ptr + target * WIDTH + column, state, mask=is_column)
