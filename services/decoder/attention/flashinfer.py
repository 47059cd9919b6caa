"""Paged attention by flashinfer's kernels, and by our own where those are faster.

In a graph, many decodes go through `ManyAttention` and chunks of prompts through `PromptAttention`.
Launched one by one, Triton's kernels keep the host longer than flashinfer's, so that only steps
with many tokens, which hide it, go through ours then. Decodes of large groups go through the
tensor-core path, which is the FA2 prefill kernel. All wrappers share one float workspace. A plan is
written to pinned memory and copied to the device asynchronously, so that memory is a ring: a plan's
copy may still wait behind the previous step when the next is planned.
"""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# (where flashinfer is not installed, pyright takes this file for it)

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from services.common.nn import launches
from services.decoder.attention.base import AttentionMetadata, AttentionSizes, StepLengths
from services.decoder.kernels.many_attention import ManyAttention
from services.decoder.kernels.overlap import overlaps
from services.decoder.kernels.prompt_attention import PromptAttention, PromptChunk

_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_RING = 3


@dataclass(frozen=True, slots=True)
class _Plan:
    decode: BatchDecodeWithPagedKVCacheWrapper | ManyAttention | None
    prefill: BatchPrefillWithPagedKVCacheWrapper | Tensor | None  # the tensor: `list_work`


class _PinnedRing:
    """Host memory for plans in flight: turn k is free again when its event has passed."""

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


class FlashInferBackend:
    """See `base.AttentionBackend`."""

    reads_block_tables = False
    captures = True

    def __init__(self, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cuda":
            raise ValueError(f"attention backend 'flashinfer' needs a GPU, not {device.type}")
        if dtype == torch.float32:
            raise ValueError("attention backend 'flashinfer' needs bfloat16 or float16")
        self._sizes, self._device, self._dtype = sizes, device, dtype
        self._float_workspace = torch.zeros(
            _FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device
        )
        # Decodes and prefills of one step are planned before either runs: two workspaces.
        self._int_workspaces = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._workspace_rings = [_PinnedRing(_INT_WORKSPACE_BYTES) for _ in range(2)]
        self._index_ring = _PinnedRing(4 * (4 * sizes.max_num_sequences + 64))
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace, "NHD", backend="fa3" if hopper else "fa2"
        )
        # Measured on an H200: with two query heads per key head the plain kernel is up to a sixth
        # faster; with more, the tensor cores have something to do.
        group = sizes.num_heads // sizes.num_kv_heads
        self._tensor_cores = group > 2 or sizes.head_dim != 128
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            "NHD",
            use_tensor_cores=self._tensor_cores,
            backend="fa2",
        )
        shape = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
        self._many: ManyAttention | None = None
        if overlaps() and ManyAttention.fits(*shape, sizes.block_size):
            self._many = ManyAttention(device, *shape)
        self._captured: dict[int, BatchDecodeWithPagedKVCacheWrapper] = {}
        self._prompts: PromptAttention | None = None
        if hopper and PromptAttention.fits(sizes.head_dim):
            self._prompts = PromptAttention(device, sizes.num_heads, sizes.head_dim)
        self._captured_block_ids: Tensor | None = None  # [most blocks of a batch] int32

    @property
    def captures_prompts(self) -> bool:
        """See `base.AttentionBackend`: only `PromptAttention` needs no plan."""
        return self._prompts is not None

    @property
    def captures_mixed(self) -> bool:
        """See `base.AttentionBackend`: only `ManyAttention` needs no plan for any decodes."""
        return self._many is not None and self._prompts is not None

    def captures_chunks(self, step: StepLengths) -> bool:
        """See `base.AttentionBackend`."""
        return self._prompts is not None and self._prompts.gains(self._chunks(step))

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """The blocks of chunks that go through `PromptAttention`; None: not through it."""
        prompts = self._prompts
        if step.num_decodes == len(step.seq_lens):
            return None
        if not captured and (prompts is None or not launches.are_free(step.num_tokens)):
            return None
        assert prompts is not None
        chunks = self._chunks(step)
        if not captured and not prompts.outruns_fa3(chunks):
            return None
        return prompts.list_items(chunks, prompts.count_items(step.num_tokens, len(chunks)))

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> _Plan:
        """Plans decodes and chunks apart; our own kernels find their work by themselves, or in
        `list_work`.
        """
        decodes, items = metadata.num_decodes, metadata.work
        decode: ManyAttention | None = None
        if items is not None:
            metadata.wants_keys_values = True
            if decodes:
                decode = self._many  # beside chunks it costs least, however few
        elif captured or launches.are_free(len(metadata.slot_mapping)):
            decode = self._many_for(decodes)
        has_chunks = decodes < len(metadata.seq_lens)
        if (items is not None or not has_chunks) and (decode is not None or not decodes):
            return _Plan(decode, items)
        return self._plan_wrappers(metadata, decode, items, captured=captured)

    def _plan_wrappers(
        self,
        metadata: AttentionMetadata,
        decode: ManyAttention | None,
        items: Tensor | None,
        *,
        captured: bool,
    ) -> _Plan:
        """Plans with flashinfer what our own kernels do not do."""
        count, decodes = len(metadata.seq_lens), metadata.num_decodes
        wrapper = prefill = None
        size = self._sizes.block_size
        seq_lens, queries = metadata.seq_lens, metadata.cu_query_lens
        num_blocks = -(-seq_lens // size)
        last = seq_lens - (num_blocks - 1) * size
        total_decode_blocks = int(num_blocks[:decodes].sum())
        host = self._index_ring.take().numpy().view(np.int32)
        if decodes and decode is None:
            indptr, host = _cumulated(host, num_blocks[:decodes])
            last_len, host = _copied(host, last[:decodes])
            wrapper = self._captured_wrapper(decodes) if captured else self._decode
            self._plan_decode(wrapper, indptr, metadata.block_ids[:total_decode_blocks], last_len)
        if decodes < count and items is None:
            query_indptr, host = _copied(host, queries[decodes:] - queries[decodes])
            indptr, host = _cumulated(host, num_blocks[decodes:])
            last_len, host = _copied(host, last[decodes:])
            prefill = self._prefill
            block_ids = metadata.block_ids[total_decode_blocks:]
            self._plan_prefill(prefill, query_indptr, indptr, block_ids, last_len)
        self._index_ring.copied()
        return _Plan(decode or wrapper, prefill if items is None else items)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
    ) -> Tensor:
        """See the contract."""
        plan: _Plan = metadata.plan
        decodes, block_ids = metadata.num_decodes, metadata.block_ids
        output = torch.empty_like(query)
        # Decodes wait for memory and chunks for products: side by side they take less.
        together = isinstance(plan.decode, ManyAttention) and isinstance(plan.prefill, Tensor)
        if isinstance(plan.decode, ManyAttention):
            plan.decode(
                query[:decodes],
                kv_cache,
                block_ids,
                metadata.seq_lens_device,
                out=output[:decodes],
                accompanied=together,
            )
        elif plan.decode is not None:
            plan.decode.run(query[:decodes], kv_cache, out=output[:decodes])
        if isinstance(plan.prefill, Tensor):
            assert keys_values is not None and self._prompts is not None
            self._prompts(
                query,
                keys_values,
                kv_cache,
                block_ids,
                plan.prefill,
                out=output,
                accompanies=together,
            )
        elif plan.prefill is not None:
            plan.prefill.run(query[decodes:], kv_cache, out=output[decodes:])
        return output

    def _many_for(self, decodes: int) -> ManyAttention | None:
        """The kernel of many decodes, if these are. It finds its work by itself."""
        return self._many if self._many is not None and self._many.gains(decodes) else None

    def _chunks(self, step: StepLengths) -> list[PromptChunk]:
        """What the step has behind its decodes."""
        decodes, size = step.num_decodes, self._sizes.block_size
        first_block = int((-(-step.seq_lens[:decodes] // size)).sum()) if decodes else 0
        starts: list[int] = step.cu_query_lens[decodes:].tolist()
        chunks: list[PromptChunk] = []
        seq_lens: list[int] = step.seq_lens[decodes:].tolist()
        for (start, end), context in zip(pairwise(starts), seq_lens, strict=True):
            chunks.append(PromptChunk(start, end - start, context - (end - start), first_block))
            first_block += -(-context // size)
        return chunks

    def _plan_decode(
        self,
        wrapper: BatchDecodeWithPagedKVCacheWrapper,
        indptr: Tensor,
        block_ids: Tensor,
        last_len: Tensor,
    ) -> None:
        self._lend_workspace(wrapper, 0)
        wrapper.plan(
            indptr,
            block_ids,
            last_len,
            self._sizes.num_heads,
            self._sizes.num_kv_heads,
            self._sizes.head_dim,
            self._sizes.block_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        self._workspace_rings[0].copied()

    def _plan_prefill(
        self,
        wrapper: BatchPrefillWithPagedKVCacheWrapper,
        query_indptr: Tensor,
        indptr: Tensor,
        block_ids: Tensor,
        last_len: Tensor,
    ) -> None:
        self._lend_workspace(wrapper, 1)
        wrapper.plan(
            query_indptr,
            indptr,
            block_ids,
            last_len,
            self._sizes.num_heads,
            self._sizes.num_kv_heads,
            self._sizes.head_dim,
            self._sizes.block_size,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        self._workspace_rings[1].copied()

    def _lend_workspace(
        self,
        wrapper: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper,
        which: int,
    ) -> None:
        """One device and a ring of pinned workspaces for all wrappers of a kind.

        flashinfer's own `reset_workspace_buffer` would allocate pinned memory at each call.
        """
        wrapper._int_workspace_buffer = self._int_workspaces[which]
        wrapper._pin_memory_int_workspace_buffer = self._workspace_rings[which].take()

    def _captured_wrapper(self, batch_size: int) -> BatchDecodeWithPagedKVCacheWrapper:
        """The wrapper of one graph; what its kernels read stays in place."""
        wrapper = self._captured.get(batch_size)
        if wrapper is None:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace,
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


def _copied(host: np.ndarray, values: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Puts values at the head of pinned memory; returns them there, and the rest of the memory."""
    host[: len(values)] = values
    return torch.from_numpy(host[: len(values)]), host[len(values) :]


def _cumulated(host: np.ndarray, counts: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """As `_copied`, with the sums of the counts before each: `[len + 1]`."""
    host[0] = 0
    np.cumsum(counts, out=host[1 : len(counts) + 1])
    return torch.from_numpy(host[: len(counts) + 1]), host[len(counts) + 1 :]
