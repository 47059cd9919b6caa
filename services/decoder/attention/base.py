"""The contract between the language model and an attention backend.

Attention is paged, causal and grouped-query, over a ragged batch of S sequences. Sequence s has the
query tokens [cu_query_lens[s], cu_query_lens[s+1]) of the step, which are the last of its
seq_lens[s] tokens. The layout of a step is an argument of every layer; there is no global context.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.linear_attention.states import StateLayout
from services.common.nn.dispatch import KernelTable


class StepLengths(Protocol):
    """The lengths of a step on the host, known before the step is on the device.

    Attributes:
        num_tokens: number T of tokens, padding included.
        num_decodes, cu_query_lens, seq_lens, first_blocks: see `AttentionMetadata`.
    """

    num_tokens: int
    num_decodes: int
    cu_query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    first_blocks: npt.NDArray[np.int32]


@dataclass(slots=True)
class AttentionMetadata:
    """The layout of a step for attention.

    Backends plan on the host, so lengths are numpy arrays. Kernels read the same values from
    tensors on the device.

    Attributes:
        num_decodes: number of leading sequences with exactly one query token. In a captured step
            with chunks, padding among these sequences has no query token.
        cu_query_lens: `[S + 1]`, prefix sums of the sequences' numbers of query tokens.
        seq_lens: `[S]`, context of each sequence after this step, query tokens included.
        first_blocks: `[S]`, index in `block_ids` of each sequence's first block.
        slot_mapping: `[T]` int64 on the device, the place of each token's key and value in the
            cache: block_id * block_size + offset. -1 for a padding token, which is not stored.
        block_ids: int32 on the device, blocks of all rows, one row after the other.
        first_blocks_device, seq_lens_device: `[S]` int32 on the device, as `first_blocks` and
            `seq_lens`.
        work: result of the backend's `list_work`, on the device. None if there is no work list.
        plan: result of the backend's `plan`.
        wants_keys_values: True if `forward` reads the step's own keys and values from a tensor of
            their own and not from the cache. `plan` sets it.
        fused: True if attention is part of `fused_decode_attention`, which needs no plan.
        states: layout of the step for linear attention layers. None if the model has no such
            layers.
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


StepKind = Literal["decodes", "prompts", "mixed", "long"]


class AttentionBackend(Protocol):
    """An implementation of paged attention."""

    @property
    def table(self) -> KernelTable[Any] | None:
        """Dispatch table of the backend. None if the backend counts no calls."""
        ...

    def captures(self, kind: StepKind) -> bool:
        """Returns whether steps of a kind can be captured as CUDA graphs.

        Args:
            kind: "decodes" for steps of decodes alone, "prompts" for steps of one chunk alone,
                "mixed" for other steps, "long" for steps whose chunks have long contexts, and which
                are planned before each replay.
        """
        ...

    def captures_chunks(self, step: StepLengths) -> bool:
        """Returns whether a step captured without a plan is faster for the step's chunks than an
        eager one.
        """
        ...

    def captures_long(self, step: StepLengths) -> bool:
        """Returns whether a step of the kind "long" is the fastest one for the step's chunks."""
        ...

    def plans_from_blocks(self, num_decodes: int) -> bool:
        """Returns whether the plan of a captured step of decodes alone reads block tables.

        If the plan does not, a replay needs no plan. The result is constant after warm-up.
        """
        ...

    @property
    def plans_on_device(self) -> bool:
        """True if `plan_on_device` can plan decodes. The value is constant after warm-up."""
        ...

    def plan_on_device(self, metadata: AttentionMetadata) -> Any:  # noqa: ANN401 - backend's own
        """Plans a step of decodes whose lengths only the device knows.

        The kernels of the plan read lengths from `seq_lens_device` alone, so a CUDA graph can
        contain them. `seq_lens` of the metadata is not read.
        """
        ...

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """Returns a list of work items for kernels that need one in addition to lengths and blocks,
        or else None. It is uploaded with the step. For captured steps with equal numbers of tokens
        and sequences, the lists have the same size.

        Args:
            step: lengths of the step.
            captured: True if a CUDA graph runs the step.
        """
        ...

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> Any:  # noqa: ANN401 - backend's own
        """Does the host's work for a step, once for all layers. The result becomes
        `metadata.plan`.

        Args:
            metadata: layout of the step.
            captured: True if a CUDA graph runs the step. The step then has S decodes, or chunks
                that are padded to T tokens behind `num_decodes` decodes. Some of the decodes may be
                padding without a context; `slot_mapping` has their tokens and `cu_query_lens` does
                not. Kernels must read from the addresses at which the graph was captured. Without a
                work list, the step is of the kind "long". The largest step is planned first.
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
        """Computes attention; the step's keys and values are in the cache already.

        Args:
            query: `[T, num_heads, head_dim]`, rotated queries.
            kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, cache of the layer.
            metadata: planned layout of the step.
            keys_values: `[T, 2 * num_kv_heads, head_dim]`, the step's own keys, then its values.
                None unless `metadata.wants_keys_values`.
            kv_scales: scales of a cache in e4m3, see `heads.as_stored`. None if the cache has the
                model's data type.

        Returns:
            Outputs of the heads, `[T, num_heads, head_dim]`.
        """
        ...
