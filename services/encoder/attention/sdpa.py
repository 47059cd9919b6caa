"""Attention by torch's scaled_dot_product_attention: the specification and the CPU path."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn


class SdpaAttention:
    """One call per run of equally long segments."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Any head size and dtype will do."""
        self._dtype = dtype

    def plan(self, lengths: Sequence[int], device: torch.device) -> list[tuple[int, int]]:
        """Neighbours of equal length: `[(segments, patches of each), ...]`."""
        return [(len(list(run)), length) for length, run in groupby(lengths)]

    def lasting_plan(
        self, max_rows: int, max_segments: int, device: torch.device
    ) -> "_LastingPlan | None":
        """On CUDA, where torch has a kernel that reads the lengths on the device."""
        if device.type != "cuda" or self._dtype not in (torch.bfloat16, torch.float16):
            return None
        return _LastingPlan(max_segments, device)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: "list[tuple[int, int]] | _LastingPlan",
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        if isinstance(plan, _LastingPlan):
            most, ends = len(query), plan.ends
            out = varlen_attn(query, key, value, ends, ends, most, most)
            assert isinstance(out, Tensor)
            return out
        if len(plan) == 1:
            return _attend(query, key, value, *plan[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start = 0
        for segments, length in plan:
            rows = slice(start, start + segments * length)
            start = rows.stop
            out[rows] = _attend(query[rows], key[rows], value[rows], segments, length)
        return out


class _LastingPlan:
    """See `LastingPlan`: where segments end, `[max_segments + 1]` int32; the others are empty."""

    def __init__(self, max_segments: int, device: torch.device) -> None:
        self.ends = torch.zeros(max_segments + 1, dtype=torch.int32, device=device)
        self._host = torch.zeros(self.ends.shape, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()

    def set(self, lengths: Sequence[int]) -> None:
        """Waits for the copy of the plan before, which the device does before its batch: long ago,
        where at most two batches are launched.
        """
        self._copied.synchronize()
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        self._host[1 : len(ends) + 1] = ends
        self._host[len(ends) + 1 :] = ends[-1]
        self.ends.copy_(self._host, non_blocking=True)
        self._copied.record()


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: int, length: int) -> Tensor:
    """`[segments * length, heads, head_dim]`: one call for segments of one length."""
    q, k, v = (
        x.unflatten(0, (segments, length)).transpose(1, 2)  # [segments, heads, length, head_dim]
        for x in (query, key, value)
    )
    # On CUDA the result lies as the query does, so this is a view.
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
