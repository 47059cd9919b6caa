"""Attention by flashinfer's ragged prefill kernels, on CUDA."""

# pyright: reportAttributeAccessIssue=false
# (where flashinfer is not installed, pyright takes this file for it)

from collections import deque
from collections.abc import Sequence
from typing import Any

import flashinfer
import torch
from torch import Tensor

_WORKSPACE_BYTES = 128 << 20
# A plan lies in pinned memory of its wrapper until the device has copied it, behind the batches
# before. The engine has two batches launched at most; the third wrapper is for safety.
_RING = 3


class FlashInferAttention:
    """One kernel for all segments, whatever their lengths."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._workspace: Tensor | None = None
        self._wrappers: deque[Any] = deque()

    def plan(self, lengths: Sequence[int], device: torch.device) -> Any:  # noqa: ANN401
        """Plans the wrapper that has rested longest: batches before may not have started yet."""
        if not self._wrappers:
            self._wrappers += [self._wrapper(device) for _ in range(_RING)]
        self._wrappers.rotate(1)
        self.schedule(self._wrappers[0], lengths)
        return self._wrappers[0]

    def lasting_plan(self, max_segments: int, device: torch.device) -> "_LastingPlan":
        """See `AttentionBackend.lasting_plan`."""
        ends = torch.zeros(max_segments + 1, dtype=torch.int32, device=device)
        wrapper = self._wrapper(
            device, use_cuda_graph=True, qo_indptr_buf=ends, kv_indptr_buf=ends.clone()
        )
        return _LastingPlan(self, wrapper, max_segments)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:  # noqa: ANN401
        """See `AttentionBackend.forward`."""
        wrapper = plan.wrapper if isinstance(plan, _LastingPlan) else plan
        return wrapper.run(query, key, value)

    def schedule(self, wrapper: Any, lengths: Sequence[int]) -> None:  # noqa: ANN401
        """Makes the wrapper's plan on the host and enqueues its copy to the device."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        wrapper.plan(
            ends, ends, self._num_heads, self._num_heads, self._head_dim,
            causal=False, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def _wrapper(self, device: torch.device, **options: Any) -> Any:  # noqa: ANN401
        """Of ours; one batch runs at a time, so that all share what they work in."""
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", **options)


class _LastingPlan:
    """See `LastingPlan`. flashinfer's schedule lies where the number of segments and the most rows
    ever planned put it, whatever the lengths, so that graphs of all sizes share one.
    """

    def __init__(self, backend: FlashInferAttention, wrapper: Any, max_segments: int) -> None:  # noqa: ANN401
        self.wrapper = wrapper
        self._backend = backend
        self._max_segments = max_segments
        self._copied = torch.cuda.Event()

    def set(self, lengths: Sequence[int]) -> None:
        """Waits for the copy of the plan before, which the device does before its batch: long ago,
        where at most two batches are launched.
        """
        self._copied.synchronize()
        padding = [0] * (self._max_segments - len(lengths))
        self._backend.schedule(self.wrapper, [*lengths, *padding])
        self._copied.record()
