"""Attention by torch's scaled_dot_product_attention: the specification and the CPU path."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F


class SdpaAttention:
    """One call per run of equally long segments."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Any head size and dtype will do."""

    def plan(
        self, lengths: Sequence[int], device: torch.device, *, captured: bool = False
    ) -> list[tuple[int, int]]:
        """Neighbours of equal length: `[(segments, patches of each), ...]`."""
        return [(len(list(run)), length) for length, run in groupby(lengths)]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: list[tuple[int, int]]
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if len(plan) == 1:
            return _attend(query, key, value, *plan[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start = 0
        for segments, length in plan:
            rows = slice(start, start + segments * length)
            start = rows.stop
            out[rows] = _attend(query[rows], key[rows], value[rows], segments, length)
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: int, length: int) -> Tensor:
    """`[segments * length, heads, head_dim]`: one call for segments of one length."""
    q, k, v = (
        x.unflatten(0, (segments, length)).transpose(1, 2)  # [segments, heads, length, head_dim]
        for x in (query, key, value)
    )
    # On CUDA the result lies as the query does, so this is a view.
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
