"""The tokens of a step in groups of one slot each, so that no tile of a kernel has two slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_TOKENS = 64  # tokens of a group, as many as a warp group multiplies at the same time


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """The tokens of a step by slot. The last group of a slot may have fewer tokens.

    For example, two groups of tokens with the slots `[0, 1, 0]` are `[0, 2, -1, ...]` of slot 0 and
    `[1, -1, ...]` of slot 1. How many groups there are depends on the numbers of tokens and slots
    alone, so that a CUDA graph serves any adapters. The last groups may be empty.

    Attributes:
        tokens: `[G, GROUP_TOKENS]` int32, places of the tokens in the step, -1 where there is none.
        slots: `[G]` int32, slot of each group. -1 if its tokens have no adapter, and -2 if it is
            empty.
    """

    tokens: Tensor
    slots: Tensor


def most_groups(num_tokens: int, count: int, size: int = GROUP_TOKENS) -> int:
    """Returns the number of groups, in which tokens of `count` slots and of no slot always fit."""
    return num_tokens // size + count + 1


def group_tokens(slots: Tensor, count: int, size: int = GROUP_TOKENS) -> TokenGroups:
    """Groups the tokens of a step in plain torch, without waiting for the device.

    Args:
        slots: `[T]`, slot of each token, -1 for none.
        count: number of slots.
        size: number of tokens of a group.
    """
    device, num_groups = slots.device, most_groups(len(slots), count, size)
    kinds = torch.arange(-1, count, device=device)
    is_kind = (slots == kinds[:, None]).int()
    before = is_kind.cumsum(1, dtype=torch.int32)  # tokens of the same slot, itself included
    ends = ((before[:, -1] + size - 1) // size).cumsum(0, dtype=torch.int32)
    starts = torch.nn.functional.pad(ends, (1, -1)) * size
    place = ((before + (starts - 1)[:, None]) * is_kind).sum(0)
    tokens = torch.full((num_groups * size,), -1, dtype=torch.int32, device=device)
    tokens.scatter_(0, place, torch.arange(len(slots), dtype=torch.int32, device=device))
    group = torch.arange(num_groups, dtype=torch.int32, device=device)
    slot = torch.searchsorted(ends, group, right=True, out_int32=True) - 1
    return TokenGroups(tokens.view(-1, size), slot.masked_fill(slot >= count, -2))
