"""Argmax of each row of logits, and of some rows under token masks, in two small kernels each.

The plain twins are in `kernels.sampling.sampling`; of equal logits the lowest id wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.sampling import ALL_MASKED, NOT_FINITE
from kernels.sampling.sampling import MaskedRows

_SPLITS = 64
_NOT_FINITE, _ALL_MASKED = tl.constexpr(NOT_FINITE), tl.constexpr(ALL_MASKED)


def greedy(logits: Tensor) -> Tensor:
    """`[B, vocab_size]` → `[B]` int32; `NOT_FINITE` where a row is not finite."""
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _find(logits, len(logits), (out, out, out), out, out, is_masked=False)
    return out


def greedy_masked(
    logits: Tensor, masked: MaskedRows, token_ids: Tensor, last_tokens: Tensor
) -> None:
    """Implements `Ops.greedy_masked`."""
    assert logits.is_contiguous() and masked.token_masks.is_contiguous()
    _find(logits, len(masked.samples), masked, token_ids, last_tokens, is_masked=True)


def _find(
    logits: Tensor, count: int, masked: tuple[Tensor, Tensor, Tensor], out: Tensor, last: Tensor,
    *, is_masked: bool,
) -> None:  # fmt: skip
    """Without masks any tensors stand for `masked` and `last`."""
    samples, rows, masks = masked
    vocab_size = logits.shape[1]
    best = torch.empty(count, 2, _SPLITS, dtype=torch.float32, device=logits.device)
    launch(
        _split_kernel, (count, _SPLITS, 1), (logits, samples, masks, best),
        VOCAB=vocab_size, SPLITS=_SPLITS, MASKED=is_masked,
        BLOCK=triton.next_power_of_2(triton.cdiv(vocab_size, _SPLITS)), num_warps=4,
    )  # fmt: skip
    launch(
        _merge_kernel, (count, 1, 1), (best, samples, rows, out, last),
        SPLITS=_SPLITS, MASKED=is_masked, num_warps=1,
    )  # fmt: skip


@triton.jit
def _split_kernel(
    logits_ptr, index_ptr, masks_ptr, best_ptr, VOCAB: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one split: the largest logit that the mask allows, and its id, which float32 holds."""
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    row = place
    if MASKED:
        row = tl.load(index_ptr + place)
    value = tl.load(logits_ptr + row * VOCAB + token, mask=inside, other=0.0).to(tl.float32)
    # Infinite or NaN: only finite numbers compare below infinity.
    not_finite = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1)) > 0
    allowed = inside
    if MASKED:
        words: tl.constexpr = (VOCAB + 31) // 32
        word = tl.load(masks_ptr + place * words + (token >> 5), mask=inside, other=0)
        allowed = ((word >> (token & 31)) & 1) != 0
    value = tl.where(allowed, value, float("-inf"))
    top = tl.max(value)
    found = tl.min(tl.where((value == top) & inside, token, VOCAB - 1))
    best_ptr += place * 2 * SPLITS + split
    tl.store(best_ptr, tl.where(not_finite, float("inf"), top))
    tl.store(best_ptr + SPLITS, found.to(tl.float32))


@triton.jit
def _merge_kernel(
    best_ptr, index_ptr, rows_ptr, out_ptr, last_ptr, SPLITS: tl.constexpr, MASKED: tl.constexpr
):
    place, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    best = tl.load(best_ptr + place * 2 * SPLITS + split)
    token = tl.load(best_ptr + (place * 2 + 1) * SPLITS + split)
    top = tl.max(best)
    found = tl.min(tl.where(best == top, token, 2147483647.0)).to(tl.int32)
    found = tl.where(top == float("-inf"), _ALL_MASKED, found)
    found = tl.where(top == float("inf"), _NOT_FINITE, found)
    row = place
    if MASKED:
        row = tl.load(index_ptr + place)
        tl.store(last_ptr + tl.load(rows_ptr + place), tl.maximum(found, 0))
    tl.store(out_ptr + row, found)
