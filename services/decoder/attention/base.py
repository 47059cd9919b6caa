"""The contract between the language model and an attention backend.

Paged, causal, grouped-query attention over a ragged batch. A batch holds S sequences; sequence s
contributes query tokens [cu_query_lens[s], cu_query_lens[s+1]), the last of its seq_lens[s] tokens.
Passed as an argument all the way down; there is no global context.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.linear_attention.states import StateLayout
from services.common.nn.dispatch import KernelTable


class StepLengths(Protocol):
    """The host's part of `AttentionMetadata`, known before the step is on the device."""

    num_tokens: int  # T
    num_decodes: int
    cu_query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    first_blocks: npt.NDArray[np.int32]


@dataclass(slots=True)
class AttentionMetadata:
    """One step's attention layout.

    Arrays exist because backends plan on the host; tensors because kernels read them.

    Attributes:
        num_decodes: the first `num_decodes` sequences have exactly one query token; in a captured
            step with chunks, padding among them has none.
        cu_query_lens: `[S + 1]`, host.
        seq_lens: `[S]`, host: context after this step, query tokens included.
        first_blocks: `[S]`, host: where each sequence's blocks begin in `block_ids`.
        slot_mapping: `[T]` int64, device: where each token's key and value go;
            block_id * block_size + offset; -1: a padding token, which is not stored.
        block_ids: int32, device: the blocks of all rows, each row's in order.
        first_blocks_device, seq_lens_device: `[S]` int32, device.
        work: the result of the backend's `list_work`, device.
        plan: the result of its `plan`.
        wants_keys_values: `forward` reads the step's own keys and values beside the cache; set by
            `plan`.
        fused: attention is part of `fused_decode_attention` and needs no plan.
        states: of linear attention layers; None: the model has none.
    """

    num_decodes: int
    cu_query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    first_blocks: npt.NDArray[np.int32]
    slot_mapping: torch.Tensor
    block_ids: torch.Tensor
    first_blocks_device: torch.Tensor
    seq_lens_device: torch.Tensor
    work: torch.Tensor | None = None
    plan: Any = None
    wants_keys_values: bool = False
    fused: bool = False
    states: StateLayout | None = None


StepKind = Literal["decodes", "prompts", "mixed"]


class AttentionBackend(Protocol):
    """One implementation of paged attention.

    Attributes:
        table: its dispatch table; None: it has one implementation.
    """

    @property
    def table(self) -> KernelTable[Any] | None: ...

    def captures(self, kind: StepKind) -> bool:
        """Whether steps can be captured as CUDA graphs: those of `decodes` alone, of one of the
        `prompts`' chunks alone, or `mixed` ones.
        """
        ...

    def captures_chunks(self, step: StepLengths) -> bool:
        """Whether a captured step is faster than an eager one for the step's chunks."""
        ...

    def plans_from_blocks(self, num_decodes: int) -> bool:
        """Whether the plan of a captured step of decodes alone reads block tables; if not, a replay
        needs no plan. Constant after warm-up.
        """
        ...

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """Work items that kernels read beside lengths and blocks; they are uploaded with the step.
        Captured steps of equal numbers of tokens and sequences have lists of one size.
        """
        ...

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> Any:  # noqa: ANN401 - backend's own
        """Host work once per step, shared by all layers; the result becomes `metadata.plan`.

        Args:
            captured: the step is a CUDA graph's: S decodes, or chunks padded to T tokens behind
                `num_decodes` decodes, some of which may be padding without a context
                (`slot_mapping` has the padding, `cu_query_lens` has not). Kernels must read from
                the addresses that they had when the graph was captured.
        """
        ...

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        keys_values: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention; the step's keys and values are in the cache already.

        Args:
            query: `[T, num_heads, head_dim]`, rotated.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, this layer's.
            metadata: as planned.
            keys_values: `[T, 2 * num_kv_heads, head_dim]`, the step's own keys, then values, if
                `metadata.wants_keys_values`.
            kv_scales: of a cache in e4m3, see `heads.as_stored`.

        Returns:
            `[T, num_heads, head_dim]`.
        """
        ...
