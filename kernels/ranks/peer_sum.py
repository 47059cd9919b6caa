"""Sums the ranks' terms over NVLink and adds the sum to the residual stream, in one kernel.

There are no library calls, copies or flags. A CTA writes its rank's part of a row to a buffer of
each peer, and reads the peers' parts from its own buffer. The data itself shows that it has
arrived: an element is empty while it is -0.0, and -0.0 in a term is sent as 0.0. NCCL's LL protocol
and TensorRT-LLM's "Lamport" protocol work in the same way. A rank only waits for one write over the
link.

Each part has three buffers, which are used in turn. A launch uses one buffer and empties the buffer
of the previous launch, which the peers write again two launches later. A peer does so after it has
received this rank's term of the launch in between, which this rank sends after it has emptied the
buffer. Ranks therefore have to sum the same numbers of rows in the same order. Each part counts its
launches itself, so CUDA graphs may be replayed in any order.

With more than two ranks, many rows are summed in two shots: each part has an owner, which receives
the terms of the other ranks and sends them the sum. A rank then sends less than two terms for any
number of ranks, and waits for two writes. What a rank sends in a launch still depends on the
previous launch, so the argument about the buffers holds.

Terms are added in the order of the ranks in float32 and rounded once, so that all ranks get bitwise
equal results, in one shot and in two. The reference implementation is `plain.add_terms`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced
from kernels.ranks.peer_buffers import PART, PeerBuffers, one_shot_rows

_WARPS = 4  # measured on two H100, together with `PART`


def add(term: Tensor, residual: Tensor, buffers: PeerBuffers) -> None:
    """Adds the sum of the ranks' terms to `residual` in place.

    Args:
        term: this rank's term, `[T, hidden]` in the dtype of `residual`, or split-K partials of it.
        residual: residual stream `[T, hidden]`, which is the same on all ranks.
        buffers: buffers for at least T rows.
    """
    num_tokens, width = residual.shape
    own, count = buffers.own, len(buffers.peers)
    two_shots = num_tokens > one_shot_rows(count, width, residual.dtype)
    _peer_sum_kernel[(num_tokens, triton.cdiv(width, PART))](
        term,
        residual,
        own,
        buffers.peers,
        buffers.turns,
        own.shape[1],
        residual.numel(),
        RANK=buffers.rank,
        COUNT=count,
        TWO_SHOTS=two_shots,
        WIDTH=width,
        SPLITS=len(term) if term.dim() == 3 else 0,
        PART=PART,
        EMPTY=buffers.empty,
        PDL=buffers.pdl,
        num_warps=_WARPS,
        launch_pdl=buffers.pdl,
    )


@triton.jit(do_not_specialize=["rows", "stride"])
def _peer_sum_kernel(
    term_ptr,
    residual_ptr,
    own_ptr,
    peers_ptr,
    turns_ptr,
    rows,
    stride,
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    EMPTY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < WIDTH
    place = row * WIDTH + column
    wait_for_earlier(PDL)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    turn = tl.load(turns_ptr + index)
    now = (turn * rows + row) * ((COUNT - 1) * WIDTH)
    before = ((turn + 2) % 3 * rows + row) * ((COUNT - 1) * WIDTH)
    term = load_reduced(term_ptr, place, inside, stride, SPLITS, dtype)
    own = own_ptr + now + column
    bits = _sendable(term, own_ptr.dtype.element_ty, EMPTY)
    # Owners take turns within a row and from row to row.
    owner = (tl.program_id(0) + tl.program_id(1)) % COUNT
    if not TWO_SHOTS:
        _send_all(bits, peers_ptr, own_ptr, now + column, inside, RANK, COUNT, WIDTH)
    elif owner != RANK:
        theirs = tl.multiple_of(tl.load(peers_ptr + owner).to(own_ptr.dtype), 16)
        place_of_rank = (RANK - (owner < RANK).to(tl.int32)) * WIDTH
        tl.store(theirs + now + place_of_rank + column, bits, mask=inside)
    for other in tl.static_range(COUNT - 1):
        empty = tl.full((PART,), EMPTY, bits.dtype)
        tl.store(own_ptr + (before + other * WIDTH) + column, empty, mask=inside)
    residual = tl.load(residual_ptr + place, mask=inside, other=0.0)
    if TWO_SHOTS and owner != RANK:
        sums = _wait(own + (owner - (owner > RANK).to(tl.int32)) * WIDTH, inside, EMPTY)
    else:
        total = tl.zeros((PART,), tl.float32)
        for peer in tl.static_range(COUNT):
            found = bits
            if peer != RANK:
                found = _wait(own + (peer - (peer > RANK)) * WIDTH, inside, EMPTY)
            total += found.to(dtype, bitcast=True).to(tl.float32)
        sums = _sendable(total.to(dtype), own_ptr.dtype.element_ty, EMPTY)
        if TWO_SHOTS:
            _send_all(sums, peers_ptr, own_ptr, now + column, inside, RANK, COUNT, WIDTH)
    total = sums.to(dtype, bitcast=True)
    # The sum and the hidden state are rounded separately, as in the reference implementation.
    total = total.to(tl.float32) + residual.to(tl.float32)
    tl.store(residual_ptr + place, total.to(dtype), mask=inside)
    tl.debug_barrier()  # all warps have read `turn`
    tl.store(turns_ptr + index, (turn + 1) % 3)


@triton.jit
def _sendable(values, WORD: tl.constexpr, EMPTY: tl.constexpr):
    """Converts values to their bits. -0.0 becomes 0.0."""
    bits = values.to(WORD, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(WORD)


@triton.jit
def _send_all(
    bits,
    peers_ptr,
    own_ptr,
    column,
    inside,
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes bits to this rank's place at each peer. A peer has places for the other ranks only."""
    for peer in tl.static_range(COUNT):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(own_ptr.dtype), 16)
            tl.store(theirs + (RANK - (peer < RANK)) * WIDTH + column, bits, mask=inside)


@triton.jit
def _wait(places, inside, EMPTY: tl.constexpr):
    """Waits until all elements have arrived at `places`, and returns them."""
    found = tl.load(places, mask=inside, other=0, volatile=True)
    while tl.max((found == EMPTY).to(tl.int32), axis=0) != 0:
        found = tl.load(places, mask=inside, other=0, volatile=True)
    return found
