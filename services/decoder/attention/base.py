"""The contract between the language model and an attention backend.

Paged, causal, grouped-query attention over a ragged batch. A batch holds S sequences; sequence s
contributes query tokens [cu_query_lens[s], cu_query_lens[s+1]), the last of its seq_lens[s] tokens.
Passed as an argument all the way down; there is no global context.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """One step's attention layout.

    Host tensors exist because backends plan on the host; device tensors because kernels read them.

    Attributes:
        num_decodes: the first `num_decodes` sequences have exactly one query token.
        cu_query_lens: `[S + 1]` int32, host.
        seq_lens: `[S]` int32, host: context after this step, query tokens included.
        slot_mapping: `[T]` int64, device: where each token's key and value go;
            block_id * block_size + offset. -1: a padding token, nothing is written.
        block_tables: `[S, max_blocks]` int32, device.
        seq_lens_device: `[S]` int32, device.
        plan: what the backend's `plan` returned.
    """

    num_decodes: int
    cu_query_lens: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens_device: torch.Tensor
    plan: Any = None


class AttentionBackend(Protocol):
    """One implementation of paged attention."""

    def plan(self, metadata: AttentionMetadata) -> Any:  # noqa: ANN401 - backend's own
        """Host work once per step, shared by all layers; the result becomes `metadata.plan`."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Writes the new keys and values, then attends.

        Args:
            query: `[T, num_heads, head_dim]`, rotated.
            key: `[T, num_kv_heads, head_dim]`, rotated.
            value: `[T, num_kv_heads, head_dim]`.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, this layer's.

        Returns:
            `[T, num_heads, head_dim]`.
        """
        ...
