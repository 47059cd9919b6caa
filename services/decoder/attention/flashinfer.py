"""Paged attention by flashinfer: decode, and prefill by FA3 (Hopper) or FA2.

Both are planned on the host, once per step. A plan is written to pinned memory and copied to the
device asynchronously. When the next step is planned, the copy may still wait for the device, so
plans are written to several pinned buffers in turn. All wrappers share one float workspace. Decode
on tensor cores uses the FA2 prefill kernel.
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
from services.decoder.attention.base import AttentionMetadata

_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_RING = 3


class _PinnedRing:
    """Pinned buffers for plans, used in turn. A buffer is free again when its event has passed.

    Args:
        size_bytes: size of one buffer.
    """

    def __init__(self, size_bytes: int) -> None:
        self._buffers = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)
        ]
        self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0

    def take(self) -> Tensor:
        """Returns the next buffer. Waits in the rare case that its last copy has not run."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def copied(self) -> None:
        """Notes that the copies from the buffer taken last are on the stream."""
        self._events[self._turn].record()


class _Workspaces:
    """Device and pinned memory that the wrappers of one kind share.

    flashinfer's own `reset_workspace_buffer` would allocate pinned memory at each call.

    Args:
        max_num_sequences: the most sequences of a step.
        device: the device that computes.
    """

    def __init__(self, max_num_sequences: int, device: torch.device) -> None:
        self._on_device = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = _PinnedRing(_INT_WORKSPACE_BYTES)
        self._indices = _PinnedRing(4 * (4 * max_num_sequences + 64))

    def assign(
        self, wrapper: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper
    ) -> npt.NDArray[np.int32]:
        """Gives a wrapper its workspace for one plan, and returns pinned memory for the indices."""
        wrapper._int_workspace_buffer = self._on_device
        wrapper._pin_memory_int_workspace_buffer = self._pinned.take()
        return self._indices.take().numpy().view(np.int32)

    def pages(
        self, host: np.ndarray, metadata: AttentionMetadata, sequences: slice, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the blocks of some sequences in flashinfer's form.

        Args:
            host: the pinned memory that `assign` returned.
            metadata: layout of the step.
            sequences: the sequences that are planned.
            block_size: tokens per block.

        Returns:
            Prefix sums of the sequences' numbers of blocks on the host, ids of the blocks one
            sequence after the other on the device, and numbers of tokens in each sequence's last
            block on the host.
        """
        seq_lens = metadata.seq_lens[sequences]
        counts = -(-seq_lens // block_size)
        ends, count = counts.cumsum(), len(counts)
        host[0], host[1 : count + 1] = 0, ends
        host[count + 1 : 2 * count + 1] = seq_lens - (counts - 1) * block_size
        indptr, last_len = torch.from_numpy(host[: 2 * count + 1]).split((count + 1, count))
        places = (metadata.first_blocks[sequences] - ends + counts).repeat(counts)
        places += np.arange(ends[-1])
        # The pinned copy returns to torch's allocator, which waits for the stream.
        given = torch.from_numpy(places).pin_memory()
        given = given.to(metadata.block_ids.device, non_blocking=True)
        return indptr, metadata.block_ids.index_select(0, given), last_len

    def planned(self) -> None:
        """Notes that the copies of the plan are on the stream."""
        self._pinned.copied()
        self._indices.copied()


def make_float_workspace(device: torch.device) -> Tensor:
    """Allocates scratch memory that all wrappers of a device share, because one runs at a time."""
    return torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferDecode:
    """Attention of sequences with one new token each.

    Args:
        facts: facts of the model and the device.
        device: the device that computes.
        scratch: the result of `make_float_workspace`.
        tensor_cores: True if the kernel for tensor cores is used. None chooses the kernel that was
            measured to be faster.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        device: torch.device,
        scratch: Tensor,
        *,
        tensor_cores: bool | None = None,
    ) -> None:
        self._facts, self._device, self._scratch = facts, device, scratch
        # The decodes and the chunks of a step are planned before either of them runs, so each kind
        # needs a workspace of its own.
        self._workspaces = _Workspaces(facts.max_num_sequences, device)
        tuned = size_class(facts).flashinfer_tensor_cores
        self._tensor_cores = tuned if tensor_cores is None else tensor_cores
        self._eager = BatchDecodeWithPagedKVCacheWrapper(
            scratch, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2"
        )
        self._captured: dict[int, BatchDecodeWithPagedKVCacheWrapper] = {}
        self._captured_block_ids: Tensor | None = None  # [most blocks of a batch] int32

    def plan(
        self, metadata: AttentionMetadata, *, captured: bool
    ) -> BatchDecodeWithPagedKVCacheWrapper:
        """Plans the step's decodes, and returns the wrapper that runs them.

        Args:
            metadata: layout of the step.
            captured: True if a CUDA graph runs the step, so that its kernels read from the same
                memory each time.
        """
        count, facts = metadata.num_decodes, self._facts
        wrapper = self._for_graph(count) if captured else self._eager
        host = self._workspaces.assign(wrapper)
        wrapper.plan(
            *self._workspaces.pages(host, metadata, slice(count), facts.block_size),
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
        """Returns the memory from which all graphs read block ids, because one runs at a time."""
        if self._captured_block_ids is None:
            most = self._facts.max_num_sequences * self._facts.max_num_blocks
            self._captured_block_ids = torch.zeros(most, dtype=torch.int32, device=self._device)
        return self._captured_block_ids


class FlashInferPrefill:
    """Attention of chunks of prompts, without CUDA graphs.

    Args:
        facts: facts of the model and the device.
        device: the device that computes.
        scratch: the result of `make_float_workspace`.
    """

    def __init__(self, facts: AttentionFacts, device: torch.device, scratch: Tensor) -> None:
        self._facts = facts
        self._workspaces = _Workspaces(facts.max_num_sequences, device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            scratch, "NHD", backend="fa3" if facts.device.is_hopper else "fa2"
        )

    def plan(self, metadata: AttentionMetadata) -> BatchPrefillWithPagedKVCacheWrapper:
        """Plans the step's chunks, and returns the wrapper that runs them."""
        decodes, facts = metadata.num_decodes, self._facts
        host = self._workspaces.assign(self._wrapper)
        starts = metadata.cu_query_lens[decodes:]
        host[: len(starts)] = starts - starts[0]
        query_indptr, host = torch.from_numpy(host[: len(starts)]), host[len(starts) :]
        self._wrapper.plan(
            query_indptr,
            *self._workspaces.pages(host, metadata, slice(decodes, None), facts.block_size),
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
