"""Argmax of each row of logits, in two small kernels.

The plain twin is `services.decoder.kernels.sampling.greedy`; of equal logits the lowest id wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPLITS = 64


def greedy(logits: Tensor) -> Tensor:
    """`[B, vocab_size]` → `[B]` int32; -1 where a row is not finite."""
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


@triton.jit
def _split_kernel(
    logits_ptr, best_ptr, id_ptr, vocab_size, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits_ptr + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    # Infinite or NaN: only finite numbers compare below infinity.
    not_finite = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1)) > 0
    value = tl.where(inside, value, float("-inf"))
    top = tl.max(value)
    found = tl.min(tl.where((value == top) & inside, token, 2147483647))
    tl.store(best_ptr + row * SPLITS + split, tl.where(not_finite, float("inf"), top))
    tl.store(id_ptr + row * SPLITS + split, tl.where(not_finite, -1, found))


@triton.jit
def _merge_kernel(best_ptr, id_ptr, out_ptr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    best = tl.load(best_ptr + row * SPLITS + split)
    token = tl.load(id_ptr + row * SPLITS + split)
    # A split that is not finite has +inf and id -1, and so decides the result.
    found = tl.min(tl.where(best == tl.max(best), token, 2147483647))
    tl.store(out_ptr + row, found)
