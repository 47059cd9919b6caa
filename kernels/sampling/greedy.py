"""Argmax of each row of logits, of some rows with token masks, and of exact logits of the best
tokens of approximate ones, by two small kernels each.

Of equal logits, the lowest token id is chosen. The reference implementations are in
`kernels.sampling.sampling`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.sampling import ALL_MASKED, NOT_FINITE
from kernels.sampling.sampling import RESCORED, RUN, MaskedRows

_SPLITS = 64
_COLUMNS = 1024  # columns that `greedy_rescored` multiplies at a time
_NOT_FINITE, _ALL_MASKED = tl.constexpr(NOT_FINITE), tl.constexpr(ALL_MASKED)


def greedy(logits: Tensor) -> Tensor:
    """Implements `Ops.greedy`: `[B, vocab_size]` → `[B]` int32. -1 for a row that is not finite."""
    num_rows, vocab_size = logits.shape
    best = torch.empty(num_rows, _SPLITS, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, _SPLITS, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    block = triton.next_power_of_2(triton.cdiv(vocab_size, _SPLITS))
    _split_kernel[(num_rows, _SPLITS)](
        logits, best, best_id, vocab_size, SPLITS=_SPLITS, BLOCK=block, num_warps=4
    )
    _merge_kernel[(num_rows,)](best, best_id, out, SPLITS=_SPLITS, num_warps=1)
    return out


def greedy_masked(
    logits: Tensor, masked: MaskedRows, token_ids: Tensor, last_tokens: Tensor
) -> None:
    """Implements `Ops.greedy_masked`."""
    count, vocab_size = len(masked.samples), logits.shape[1]
    assert logits.is_contiguous() and masked.token_masks.is_contiguous()
    best = torch.empty(count, 2, _SPLITS, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(triton.cdiv(vocab_size, _SPLITS))
    launch(
        _masked_split_kernel,
        (count, _SPLITS, 1),
        (logits, masked.samples, masked.token_masks, best),
        VOCAB=vocab_size,
        SPLITS=_SPLITS,
        BLOCK=block,
        num_warps=4,
    )
    launch(
        _masked_merge_kernel,
        (count, 1, 1),
        (best, masked.samples, masked.rows, token_ids, last_tokens),
        SPLITS=_SPLITS,
        num_warps=1,
    )


def greedy_rescored(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Implements `Ops.greedy_rescored`."""
    assert logits.is_contiguous() and hidden.is_contiguous() and weight.is_contiguous()
    num_rows, vocab_size = logits.shape
    best = torch.empty(num_rows, RESCORED, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, RESCORED, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    runs = triton.cdiv(vocab_size, RESCORED * RUN)
    _rescoring_kernel[(num_rows, RESCORED)](
        logits,
        hidden,
        weight,
        best,
        best_id,
        vocab_size,
        WIDTH=hidden.shape[1],
        SPLITS=RESCORED,
        RUN=RUN,
        BLOCK=RUN * triton.next_power_of_2(runs),
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    _merge_kernel[(num_rows,)](best, best_id, out, SPLITS=RESCORED, num_warps=1)
    return out


@triton.jit
def _split_kernel(
    logits_ptr, best_ptr, id_ptr, vocab_size, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits_ptr + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    # Only finite numbers compare below infinity, but neither infinity nor NaN.
    not_finite = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1)) > 0
    value = tl.where(inside, value, float("-inf"))
    top = tl.max(value)
    found = tl.min(tl.where((value == top) & inside, token, 2147483647))
    tl.store(best_ptr + row * SPLITS + split, tl.where(not_finite, float("inf"), top))
    tl.store(id_ptr + row * SPLITS + split, tl.where(not_finite, -1, found))


@triton.jit
def _rescoring_kernel(
    logits_ptr,
    hidden_ptr,
    weight_ptr,
    best_ptr,
    id_ptr,
    vocab_size,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Finds the best token of a part of the vocabulary, and stores its id and its exact logit."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    token = (index // RUN * SPLITS + split) * RUN + index % RUN
    inside = token < vocab_size
    value = tl.load(logits_ptr + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    not_finite = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1)) > 0
    value = tl.where(inside, value, float("-inf"))
    found = tl.min(tl.where((value == tl.max(value)) & inside, token, 2147483647))
    # A part without tokens, or one that is not finite, may have found none.
    chosen = tl.where(found < vocab_size, found, 0).to(tl.int64)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(hidden_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
        weight = tl.load(weight_ptr + chosen * WIDTH + column, mask=column < WIDTH, other=0.0)
        sums += x.to(tl.float32) * weight.to(tl.float32)
    exact = tl.sum(sums).to(logits_ptr.dtype.element_ty).to(tl.float32)
    not_finite |= (tl.abs(exact) < float("inf")) == 0
    exact = tl.where(split * RUN < vocab_size, exact, float("-inf"))
    tl.store(best_ptr + row * SPLITS + split, tl.where(not_finite, float("inf"), exact))
    tl.store(id_ptr + row * SPLITS + split, tl.where(not_finite, -1, found))


@triton.jit
def _merge_kernel(best_ptr, id_ptr, out_ptr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    best = tl.load(best_ptr + row * SPLITS + split)
    token = tl.load(id_ptr + row * SPLITS + split)
    # A split with a value that is not finite has maximum +inf and id -1, which decides the result.
    found = tl.min(tl.where(best == tl.max(best), token, 2147483647))
    tl.store(out_ptr + row, found)


@triton.jit
def _masked_split_kernel(
    logits_ptr,
    index_ptr,
    masks_ptr,
    best_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the largest logit of a split that the mask allows, and its id, stored as float32."""
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    row = tl.load(index_ptr + place)
    value = tl.load(logits_ptr + row * VOCAB + token, mask=inside, other=0.0).to(tl.float32)
    not_finite = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1)) > 0
    words: tl.constexpr = (VOCAB + 31) // 32
    word = tl.load(masks_ptr + place * words + (token >> 5), mask=inside, other=0)
    value = tl.where(((word >> (token & 31)) & 1) != 0, value, float("-inf"))
    top = tl.max(value)
    found = tl.min(tl.where(value == top, token, 2147483647))
    best_ptr += place * 2 * SPLITS + split
    tl.store(best_ptr, tl.where(not_finite, float("inf"), top))
    tl.store(best_ptr + SPLITS, found.to(tl.float32))


@triton.jit
def _masked_merge_kernel(best_ptr, index_ptr, rows_ptr, out_ptr, last_ptr, SPLITS: tl.constexpr):
    place, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    best = tl.load(best_ptr + place * 2 * SPLITS + split)
    token = tl.load(best_ptr + (place * 2 + 1) * SPLITS + split)
    top = tl.max(best)
    found = tl.min(tl.where(best == top, token, 2147483647.0)).to(tl.int32)
    found = tl.where(top == float("-inf"), _ALL_MASKED, found)
    found = tl.where(top == float("inf"), _NOT_FINITE, found)
    tl.store(out_ptr + tl.load(index_ptr + place), found)
    tl.store(last_ptr + tl.load(rows_ptr + place), tl.maximum(found, 0))
