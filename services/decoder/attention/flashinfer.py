"""Paged attention by flashinfer: decode, and prefill by FA3 (Hopper) or FA2.

Both are planned on the host, once per step. A plan is written to pinned memory and copied to the
device asynchronously. When the next step is planned, the copy may still wait for the device, so
plans are written to several pinned buffers in turn. All wrappers share one float workspace. Decode
on tensor cores uses the FA2 prefill kernel.

FA3 takes less time for keys that are dense than for keys in blocks, so they are copied in each
layer if enough queries share the copy. A plan for FA3 is a list of tiles for each SM. Its places
depend on the largest step alone, so a CUDA graph can contain the kernel.
"""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# (where flashinfer is not installed, pyright takes this file for it)

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from torch import Tensor

from kernels.attention.attention_tuning import (
    CAPTURED_MIN_CHUNK,
    DENSE_MIN_CHUNK,
    AttentionFacts,
    size_class,
)
from kernels.attention.dense_keys import (
    MAX_SEQUENCES,
    TILE,
    DenseKeys,
    dense_chunks,
    padded_to_tiles,
)
from kernels.tuning import MAX_CAPTURED_CHUNKS
from services.decoder.attention.base import AttentionMetadata, StepLengths

_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_RING = 3
_MEASURED_DIM = 128  # largest head_dim for which FA3 over dense keys was run

_Wrapper = (
    BatchDecodeWithPagedKVCacheWrapper
    | BatchPrefillWithPagedKVCacheWrapper
    | BatchPrefillWithRaggedKVCacheWrapper
)


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

    def assign(self, wrapper: _Wrapper) -> npt.NDArray[np.int32]:
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


class PagedChunks:
    """A planned wrapper that reads keys and values in blocks.

    Args:
        wrapper: the wrapper.
        first: the first token of the chunks, which are the last tokens of the step.
    """

    def __init__(self, wrapper: BatchPrefillWithPagedKVCacheWrapper, first: int) -> None:
        self._wrapper, self._tokens = wrapper, slice(first, None)

    def run(self, query: Tensor, kv_cache: Tensor, *, out: Tensor) -> None:
        """Computes attention of the chunks in one layer, see `AttentionBackend.forward`."""
        self._wrapper.run(query[self._tokens], kv_cache, out=out[self._tokens])


class DenseChunks:
    """A planned wrapper that reads dense keys and values, which are copied before.

    Args:
        wrapper: the wrapper.
        dense: memory of the dense keys and values.
        metadata: layout of the step.
    """

    def __init__(
        self,
        wrapper: BatchPrefillWithRaggedKVCacheWrapper,
        dense: DenseKeys,
        metadata: AttentionMetadata,
    ) -> None:
        self._wrapper, self._dense = wrapper, dense
        chunks = slice(metadata.num_decodes, len(metadata.seq_lens))
        self._block_ids = metadata.block_ids
        self._first_blocks = metadata.first_blocks_device[chunks]
        self._seq_lens = metadata.seq_lens_device[chunks]

    def run(self, query: Tensor, kv_cache: Tensor, *, out: Tensor) -> None:
        """Computes attention of the chunks in one layer, see `AttentionBackend.forward`.

        The plan has the places of the chunks among all tokens of the step.
        """
        dense = self._dense
        dense.gather(kv_cache, self._block_ids, self._first_blocks, self._seq_lens)
        self._wrapper.run(query, dense.keys, dense.values, out=out)


class FlashInferPrefill:
    """Attention of chunks of prompts.

    Args:
        facts: facts of the model and the device.
        device: the device that computes.
        scratch: the result of `make_float_workspace`.
    """

    def __init__(self, facts: AttentionFacts, device: torch.device, scratch: Tensor) -> None:
        self._facts, self._device, self._scratch = facts, device, scratch
        self._heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
        self._options = {"causal": True, "q_data_type": facts.dtype, "kv_data_type": facts.dtype}
        self._workspaces = _Workspaces(facts.max_num_sequences + MAX_CAPTURED_CHUNKS, device)
        is_hopper = facts.device.is_hopper
        self._paged = BatchPrefillWithPagedKVCacheWrapper(
            scratch, "NHD", backend="fa3" if is_hopper else "fa2"
        )
        self._dense: DenseKeys | None = None
        if is_hopper and facts.head_dim <= _MEASURED_DIM and not TILE % facts.block_size:
            self._dense = DenseKeys(facts, device)
            self._ragged = BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD", backend="fa3")
        self._captured: BatchPrefillWithRaggedKVCacheWrapper | None = None

    @property
    def can_be_captured(self) -> bool:
        """True if CUDA graphs can contain the kernel."""
        return self._dense is not None

    def suits_graph(self, step: StepLengths) -> bool:
        """Returns whether a graph with dense keys is a good choice for a step's chunks."""
        return self._copies(step, CAPTURED_MIN_CHUNK)

    def _copies(self, step: StepLengths | AttentionMetadata, least: int) -> bool:
        """Returns whether a copy of the keys of a step's chunks has room, and saves time.

        Args:
            step: lengths of the step.
            least: number of queries that have to share the copy in the mean.
        """
        starts, contexts = step.cu_query_lens[step.num_decodes :], step.seq_lens[step.num_decodes :]
        if self._dense is None or len(contexts) > MAX_SEQUENCES:
            return False
        lengths, contexts = starts[1:] - starts[:-1], contexts.astype(np.int64)
        if int(padded_to_tiles(contexts).sum()) > len(self._dense.keys):
            return False
        return int(lengths @ contexts) >= least * int(contexts.sum())

    def plan(
        self, metadata: AttentionMetadata, *, captured: bool = False
    ) -> PagedChunks | DenseChunks:
        """Plans the step's chunks.

        Args:
            metadata: layout of the step. Its chunks are the last tokens.
            captured: True if a CUDA graph runs the step. Then each step has as many chunks, some of
                which may be padding without tokens, and the first one that is planned has most
                tokens.
        """
        if not captured and not self._copies(metadata, DENSE_MIN_CHUNK):
            return self._plan_paged(metadata)
        assert self._dense is not None
        decodes = metadata.num_decodes
        starts, contexts = metadata.cu_query_lens[decodes:], metadata.seq_lens[decodes:]
        places = dense_chunks(starts, contexts)
        count = places.shape[1]
        wrapper = self._for_graphs(count - 1) if captured else self._ragged
        host = self._workspaces.assign(wrapper)
        host[: 2 * count] = places.ravel()
        indptrs = torch.from_numpy(host[: 2 * count]).split(count)
        wrapper.plan(*indptrs, *self._heads, **self._options)
        self._workspaces.planned()
        return DenseChunks(wrapper, self._dense, metadata)

    def _plan_paged(self, metadata: AttentionMetadata) -> PagedChunks:
        decodes, block_size = metadata.num_decodes, self._facts.block_size
        host = self._workspaces.assign(self._paged)
        starts = metadata.cu_query_lens[decodes:]
        host[: len(starts)] = starts - starts[0]
        query_indptr, host = torch.from_numpy(host[: len(starts)]), host[len(starts) :]
        self._paged.plan(
            query_indptr,
            *self._workspaces.pages(host, metadata, slice(decodes, None), block_size),
            *self._heads,
            block_size,
            **self._options,
        )
        self._workspaces.planned()
        return PagedChunks(self._paged, int(starts[0]))

    def _for_graphs(self, num_chunks: int) -> BatchPrefillWithRaggedKVCacheWrapper:
        """Returns the wrapper of all graphs, each of which has as many planned chunks."""
        if self._captured is None:
            query_indptr, key_indptr = torch.zeros(
                (2, num_chunks + 1), dtype=torch.int32, device=self._device
            )
            self._captured = BatchPrefillWithRaggedKVCacheWrapper(
                self._scratch,
                "NHD",
                use_cuda_graph=True,
                backend="fa3",
                qo_indptr_buf=query_indptr,
                kv_indptr_buf=key_indptr,
            )
        return self._captured
