"""Groups the tokens of a step by slot in one launch.

In plain torch this takes 14 launches and 51 µs a step of 1,088 tokens on an H200. The reference
implementation is `kernels.adapters.token_groups.group_tokens`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters.token_groups import GROUP_TOKENS, TokenGroups, most_groups

_BLOCK = 1024  # tokens that a program reads at the same time


def group_tokens(slots: Tensor, count: int, size: int = GROUP_TOKENS) -> TokenGroups:
    """Implements `token_groups.group_tokens`. The size is a power of two."""
    num_groups = most_groups(len(slots), count, size)
    tokens = torch.empty(num_groups, size, dtype=torch.int32, device=slots.device)
    found = torch.empty(num_groups, dtype=torch.int32, device=slots.device)
    _group_kernel[(count + 2,)](
        slots,
        tokens,
        found,
        len(slots),
        count,
        num_groups,
        SIZE=size,
        KINDS=triton.next_power_of_2(count + 2),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return TokenGroups(tokens, found)


@triton.jit(do_not_specialize=["num_tokens", "count", "num_groups"])
def _group_kernel(
    slots_ptr,
    tokens_ptr,
    found_ptr,
    num_tokens,
    count,
    num_groups,
    SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the groups of one slot.

    `slots` is `[num_tokens]`. `tokens` is `[num_groups, SIZE]` and `found` `[num_groups]`, the
    fields of `TokenGroups`. KINDS is a power of two above the number of kinds.

    A kind is a slot plus 1, so that tokens without an adapter have kind 0. Each program counts the
    tokens of all kinds to find out where the groups of its own kind begin. The last program, whose
    kind no token has, writes the empty groups.
    """
    kind = tl.program_id(0)
    totals = tl.zeros((KINDS,), tl.int32)
    for at in range(0, num_tokens, BLOCK):
        token = at + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=count)
        totals += tl.histogram((slot + 1).to(tl.int32), KINDS)
    kinds, groups = tl.arange(0, KINDS), (totals + SIZE - 1) // SIZE
    first = tl.sum(tl.where(kinds < kind, groups, 0), 0)
    end = first + tl.sum(tl.where(kinds == kind, groups, 0), 0)
    place = first * SIZE  # of the next token
    if kind > count:
        end = num_groups
    else:
        for at in range(0, num_tokens, BLOCK):
            token = at + tl.arange(0, BLOCK)
            slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=count)
            own = ((slot + 1) == kind).to(tl.int32)
            places = place + tl.cumsum(own, 0) - 1
            tl.store(tokens_ptr + places, token, mask=own > 0)
            place += tl.sum(own, 0)
    for at in range(place, end * SIZE, BLOCK):  # places without a token
        places = at + tl.arange(0, BLOCK)
        tl.store(tokens_ptr + places, tl.full((BLOCK,), -1, tl.int32), mask=places < end * SIZE)
    for at in range(first, end, BLOCK):
        group = at + tl.arange(0, BLOCK)
        written = tl.full((BLOCK,), -2, tl.int32)
        if kind <= count:
            written += kind + 1
        tl.store(found_ptr + group, written, mask=group < end)
