"""Triton kernels that apply penalties to logits in a single pass, and count sampled tokens.

The reference implementations are `penalize` and `count_tokens` of `kernels.sampling.sampling`, with
bitwise equal results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.sampling.sampling import SamplingInputs

_BLOCK = 2048
_ROWS = 128  # rows of a program


def penalize(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Implements `Ops.penalize`."""
    (num_rows, vocab_size), rows, floats = logits.shape, inputs.rows, inputs.floats
    seen = inputs.seen
    assert seen is not None
    assert logits.is_contiguous() and seen.is_contiguous() and floats.is_contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        _penalize_kernel,
        (num_rows, triton.cdiv(vocab_size, _BLOCK), 1),
        (logits, seen, rows, floats, out, num_rows),
        VOCAB=vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def count_tokens(token_ids: Tensor, inputs: SamplingInputs) -> None:
    """Implements `Ops.count_tokens`."""
    num_rows, seen, rows, floats = len(token_ids), inputs.seen, inputs.rows, inputs.floats
    assert seen is not None
    launch(
        _count_kernel,
        (triton.cdiv(num_rows, _ROWS), 1, 1),
        (token_ids, seen, rows, floats, num_rows),
        VOCAB=seen.shape[1],
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit
def _penalties(floats_ptr, index, num_rows, inside):
    """Loads repetition, presence and frequency penalty, and returns also whether any is set."""
    repetition = tl.load(floats_ptr + 3 * num_rows + index, mask=inside, other=1.0)
    presence = tl.load(floats_ptr + 4 * num_rows + index, mask=inside, other=0.0)
    frequency = tl.load(floats_ptr + 5 * num_rows + index, mask=inside, other=0.0)
    return repetition, presence, frequency, (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit(do_not_specialize=["num_rows"])
def _penalize_kernel(
    logits_ptr,
    seen_ptr,
    rows_ptr,
    floats_ptr,
    penalized_ptr,
    num_rows,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    repetition, presence, frequency, has_any = _penalties(floats_ptr, index, num_rows, True)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    place = index.to(tl.int64) * VOCAB + token
    logit = tl.load(logits_ptr + place, mask=inside).to(tl.float32)
    if has_any:
        row = tl.load(rows_ptr + index)
        seen = tl.load(seen_ptr + row * VOCAB + token, mask=inside, other=0)
        count = (seen >> 1).to(tl.float32)
        scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where(seen > 0, scaled, logit)
        logit = logit - frequency * count - tl.where(count > 0, presence, 0.0)
    tl.store(penalized_ptr + place, logit, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    token_ids_ptr,
    seen_ptr,
    rows_ptr,
    floats_ptr,
    num_rows,
    VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    has_any = _penalties(floats_ptr, index, num_rows, inside)[3]
    token = tl.load(token_ids_ptr + index, mask=inside, other=-1)
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    place, counts = seen_ptr + row * VOCAB + token, inside & has_any & (token >= 0)
    tl.store(place, tl.load(place, mask=counts, other=0) + 2, mask=counts)
