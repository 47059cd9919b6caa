"""The sum of ranks' terms and the residual addition in one launch, over NVLink: no library call, no
copy, no flag.

A CTA writes its rank's part of a row into a buffer of each peer, and reads the peers' parts from
its own. A value says itself that it has come: a place is empty while it holds -0.0, and a term's
-0.0 is sent as 0.0. That is NCCL's LL and TensorRT-LLM's "Lamport" protocol; one write over the
link is all that a rank waits for.

Each part has three buffers in turn. A launch uses one and empties that of the launch before, which
the peers write again two launches later. They do so after they have got this rank's term of the
launch between, which it sends when it has emptied the buffer. So ranks must sum the same numbers of
rows in the same order. Parts count their launches themselves; CUDA graphs may be replayed in any
order.

Many rows and more than two ranks go in two shots: each part has an owner, which gets the terms of
the others, and sends them the sum. So a rank sends less than two terms, whatever the number of
ranks, and waits for two writes. What a rank sends in a launch still depends on the launch before,
so that the buffers are as safe.

The terms are added in the order of ranks in float32 and rounded once: all ranks get the same bits,
in one shot and in two. The plain twin is `plain.add_terms`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced
from kernels.ranks.peer_buffers import PART, PeerBuffers, one_shot_rows

_WARPS = 4  # measured on two H100, with `PART`


def add(term: Tensor, residual: Tensor, buffers: PeerBuffers) -> None:
    """`residual += ` the sum of the ranks' terms.

    Args:
        term: `[T, hidden]` of the residual's dtype, or split-K partials of it.
        residual: `[T, hidden]`, the same on all ranks.
        buffers: for at least T rows.
    """
    num_tokens, width = residual.shape
    own, count = buffers.own, len(buffers.peers)
    two_shots = num_tokens > one_shot_rows(count, width, residual.dtype)
    _peer_sum_kernel[(num_tokens, triton.cdiv(width, PART))](
        term, residual, own, buffers.peers, buffers.turns, own.shape[1], residual.numel(),
        RANK=buffers.rank, COUNT=count, TWO_SHOTS=two_shots, WIDTH=width,
        SPLITS=len(term) if term.dim() == 3 else 0, PART=PART, EMPTY=buffers.empty,
        PDL=buffers.pdl, num_warps=_WARPS, launch_pdl=buffers.pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "stride"])
def _peer_sum_kernel(
    term_ptr, residual_ptr, own_ptr, peers_ptr, turns_ptr, rows, stride,
    RANK: tl.constexpr, COUNT: tl.constexpr, TWO_SHOTS: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, PART: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    owner = (tl.program_id(0) + tl.program_id(1)) % COUNT  # by turns in a row and from row to row
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
    # Rounded twice, as the twin does: the sum, and the hidden state.
    total = total.to(tl.float32) + residual.to(tl.float32)
    tl.store(residual_ptr + place, total.to(dtype), mask=inside)
    tl.debug_barrier()  # all warps have read the turn
    tl.store(turns_ptr + index, (turn + 1) % 3)


@triton.jit
def _sendable(values, WORD: tl.constexpr, EMPTY: tl.constexpr):
    """Their bits, without -0.0."""
    bits = values.to(WORD, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(WORD)


@triton.jit
def _send_all(
    bits, peers_ptr, own_ptr, column, inside,
    RANK: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """To this rank's place at each peer: places are those of the other ranks."""
    for peer in tl.static_range(COUNT):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(own_ptr.dtype), 16)
            tl.store(theirs + (RANK - (peer < RANK)) * WIDTH + column, bits, mask=inside)


@triton.jit
def _wait(places, inside, EMPTY: tl.constexpr):
    """What has come there, once all of it has."""
    found = tl.load(places, mask=inside, other=0, volatile=True)
    while tl.max((found == EMPTY).to(tl.int32), axis=0) != 0:
        found = tl.load(places, mask=inside, other=0, volatile=True)
    return found
