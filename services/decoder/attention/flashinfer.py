"""flashinfer's paged attention: decode, and prefill by FA3 (Hopper) or FA2.

Both are planned on the host once per step. A plan is written to pinned memory and copied to the
device asynchronously, so that memory is a ring: a plan's copy may still wait behind the previous
step when the next is planned. All wrappers share one float workspace. Decode on tensor cores is the
FA2 prefill kernel.
"""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# (where flashinfer is not installed, pyright takes this file for it)

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from kernels.attention.attention_tuning import AttentionFacts, size_class
from services.decoder.attention.base import AttentionMetadata, AttentionSizes

_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_RING = 3


class _PinnedRing:
    """Pinned memory of plans in flight: a buffer is free again when its event has passed."""

    def __init__(self, size_bytes: int, count: int = _RING) -> None:
        self._buffers = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)
        ]
        self._events = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    def take(self) -> Tensor:
        """The next buffer; waits in the rare case that its last copy has not run."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def copied(self) -> None:
        """The copies from the buffer taken last are on the stream."""
        self._events[self._turn].record()


class _Workspaces:
    """Device and pinned memory that the wrappers of one kind share.

    flashinfer's own `reset_workspace_buffer` would allocate pinned memory at each call.
    """

    def __init__(self, max_num_sequences: int, device: torch.device) -> None:
        self._on_device = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = _PinnedRing(_INT_WORKSPACE_BYTES)
        self._indices = _PinnedRing(4 * (4 * max_num_sequences + 64))

    def assign(
        self, wrapper: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper
    ) -> npt.NDArray[np.int32]:
        """Gives the wrapper its workspace for one plan; returns pinned memory for its indices."""
        wrapper._int_workspace_buffer = self._on_device
        wrapper._pin_memory_int_workspace_buffer = self._pinned.take()
        return self._indices.take().numpy().view(np.int32)

    def blocks_of(
        self, block_ids: Tensor, firsts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> Tensor:
        """The sequences' blocks one after the other, which flashinfer wants; on the device.

        Args:
            block_ids: of all rows.
            firsts: `[S]`, where each sequence's blocks begin.
            counts: `[S]`, their numbers.
        """
        ends = counts.cumsum()
        places = (firsts - ends + counts).repeat(counts) + np.arange(ends[-1])
        # The pinned copy returns to torch's allocator, which waits for the stream.
        given = torch.from_numpy(places).pin_memory().to(block_ids.device, non_blocking=True)
        return block_ids.index_select(0, given)

    def planned(self) -> None:
        """The copies of the plan are on the stream."""
        self._pinned.copied()
        self._indices.copied()


def make_float_workspace(device: torch.device) -> Tensor:
    """Scratch that all wrappers of a device share: one of them runs at a time."""
    return torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferDecode:
    """One new token of each sequence.

    Args:
        facts: of the model and the device.
        sizes: of the engine.
        device: a GPU.
        scratch: see `make_float_workspace`.
        tensor_cores: which of its kernels; None: as tuned.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        sizes: AttentionSizes,
        device: torch.device,
        scratch: Tensor,
        *,
        tensor_cores: bool | None = None,
    ) -> None:
        self._facts, self._sizes, self._device, self._scratch = facts, sizes, device, scratch
        # Decodes and chunks of one step are planned before either runs: a workspace each.
        self._workspaces = _Workspaces(sizes.max_num_sequences, device)
        tuned = size_class(facts).flashinfer_tensor_cores
        self._tensor_cores = tuned if tensor_cores is None else tensor_cores
        self._eager = BatchDecodeWithPagedKVCacheWrapper(
            scratch, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2"
        )
        self._captured: dict[int, BatchDecodeWithPagedKVCacheWrapper] = {}
        self._captured_block_ids: Tensor | None = None  # [most blocks of a batch] int32

    def plan(
        self, metadata: AttentionMetadata, num_blocks: npt.NDArray[np.int32], *, captured: bool
    ) -> BatchDecodeWithPagedKVCacheWrapper:
        """Plans the step's decodes; the wrapper runs them.

        Args:
            metadata: of the step.
            num_blocks: `[S]`, blocks of each sequence.
            captured: the plan is for a CUDA graph: what its kernels read stays in place.
        """
        count, facts = metadata.num_decodes, self._facts
        wrapper = self._for_graph(count) if captured else self._eager
        host = self._workspaces.assign(wrapper)
        blocks = num_blocks[:count]
        indptr, host = _cumulated(host, blocks)
        last_len, host = _copied(host, metadata.seq_lens[:count] - (blocks - 1) * facts.block_size)
        wrapper.plan(
            indptr,
            self._workspaces.blocks_of(metadata.block_ids, metadata.first_blocks[:count], blocks),
            last_len,
            facts.num_heads,
            facts.num_kv_heads,
            facts.head_dim,
            facts.block_size,
            q_data_type=facts.dtype,
            kv_data_type=facts.dtype,
        )
        self._workspaces.planned()
        return wrapper

    def _for_graph(self, batch_size: int) -> BatchDecodeWithPagedKVCacheWrapper:
        wrapper = self._captured.get(batch_size)
        if wrapper is None:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                self._scratch,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                backend="fa2",
                paged_kv_indptr_buffer=torch.zeros(
                    batch_size + 1, dtype=torch.int32, device=self._device
                ),
                paged_kv_indices_buffer=self._block_ids(),
                paged_kv_last_page_len_buffer=torch.zeros(
                    batch_size, dtype=torch.int32, device=self._device
                ),
            )
            self._captured[batch_size] = wrapper
        return wrapper

    def _block_ids(self) -> Tensor:
        """Where graphs read block ids; one step runs at a time, so that all share it."""
        if self._captured_block_ids is None:
            most = self._sizes.max_num_sequences * self._sizes.max_num_blocks
            self._captured_block_ids = torch.zeros(most, dtype=torch.int32, device=self._device)
        return self._captured_block_ids


class FlashInferPrefill:
    """Chunks of prompts; not for CUDA graphs."""

    def __init__(
        self, facts: AttentionFacts, sizes: AttentionSizes, device: torch.device, scratch: Tensor
    ) -> None:
        self._facts = facts
        self._workspaces = _Workspaces(sizes.max_num_sequences, device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            scratch, "NHD", backend="fa3" if facts.device.is_hopper else "fa2"
        )

    def plan(
        self, metadata: AttentionMetadata, num_blocks: npt.NDArray[np.int32]
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """Plans the step's chunks, which follow its decodes; the wrapper runs them."""
        decodes, facts = metadata.num_decodes, self._facts
        host = self._workspaces.assign(self._wrapper)
        starts, blocks = metadata.cu_query_lens[decodes:], num_blocks[decodes:]
        query_indptr, host = _copied(host, starts - starts[0])
        indptr, host = _cumulated(host, blocks)
        last_len, host = _copied(
            host, metadata.seq_lens[decodes:] - (blocks - 1) * facts.block_size
        )
        self._wrapper.plan(
            query_indptr,
            indptr,
            self._workspaces.blocks_of(metadata.block_ids, metadata.first_blocks[decodes:], blocks),
            last_len,
            facts.num_heads,
            facts.num_kv_heads,
            facts.head_dim,
            facts.block_size,
            causal=True,
            q_data_type=facts.dtype,
            kv_data_type=facts.dtype,
        )
        self._workspaces.planned()
        return self._wrapper


def _copied(host: np.ndarray, values: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Values at the start of pinned memory, and the rest of the memory."""
    host[: len(values)] = values
    return torch.from_numpy(host[: len(values)]), host[len(values) :]


def _cumulated(host: np.ndarray, counts: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Prefix sums of counts, from 0 to the total, at the start of pinned memory, and the rest."""
    host[0] = 0
    np.cumsum(counts, out=host[1 : len(counts) + 1])
    return torch.from_numpy(host[: len(counts) + 1]), host[len(counts) + 1 :]
