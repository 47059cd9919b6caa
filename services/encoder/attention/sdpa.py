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

    def plan(self, lengths: Sequence[int], device: torch.device) -> list[tuple[int, int]]:
        """Neighbours of equal length: `[(segments, patches of each), ...]`."""
        return [(len(list(run)), length) for length, run in groupby(lengths)]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: list[tuple[int, int]]
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start = 0
        for segments, length in plan:
            rows = slice(start, start + segments * length)
            start = rows.stop
            q, k, v = (
                # [segments, heads, length, head_dim]
                x[rows].unflatten(0, (segments, length)).transpose(1, 2)
                for x in (query, key, value)
            )
            attended = F.scaled_dot_product_attention(q, k, v)
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
        return out
