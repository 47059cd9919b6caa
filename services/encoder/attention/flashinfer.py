"""Attention by flashinfer's ragged prefill kernels, on CUDA."""

# pyright: reportAttributeAccessIssue=false
# (where flashinfer is not installed, pyright takes this file for it)

from collections import deque
from collections.abc import Sequence
from typing import Any

import flashinfer
import torch
from torch import Tensor

from services.encoder.attention.sdpa import SdpaAttention

_WORKSPACE_BYTES = 128 << 20
# A plan lies in pinned memory of its wrapper until the device has copied it, behind the batches
# before. The engine has two batches launched at most; the third wrapper is for safety.
_RING = 3


class FlashInferAttention:
    """One kernel for all segments, whatever their lengths.

    A captured forward is SDPA's: a plan of flashinfer's lies in memory that the next one changes.
    """

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._wrappers: deque[Any] = deque()
        self._sdpa = SdpaAttention(num_heads, head_dim, dtype)

    def plan(self, lengths: Sequence[int], device: torch.device, *, captured: bool = False) -> Any:  # noqa: ANN401
        """Plans the wrapper that has rested longest: batches before may not have started yet."""
        if captured:
            return self._sdpa.plan(lengths, device, captured=True)
        if not self._wrappers:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrappers += [
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
                for _ in range(_RING)
            ]
        self._wrappers.rotate(1)
        wrapper = self._wrappers[0]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        wrapper.plan(
            ends, ends, self._num_heads, self._num_heads, self._head_dim,
            causal=False, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip
        return wrapper

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:  # noqa: ANN401
        """See `AttentionBackend.forward`."""
        if isinstance(plan, list):
            return self._sdpa.forward(query, key, value, plan)
        return plan.run(query, key, value)
