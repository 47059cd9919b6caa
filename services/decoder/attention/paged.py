"""Attention on a GPU: runs each step's decodes and chunks by the fastest implementation for them.

`services.decoder.attention.table` has the implementations, and counts their calls. Our own kernels
need no plan, so a CUDA graph can hold them. Launching Triton's kernels one by one takes the host
longer than launching flashinfer's, so an eager step uses ours only if it has enough tokens to hide
that.

An implementation that fails while kernels warm up is dropped, and the step is planned again.
Later failures are the caller's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from kernels.tuning import LAUNCH_HIDING_TOKENS
from services.common.nn.dispatch import PLAIN, KernelTable
from services.decoder.attention.base import AttentionMetadata, AttentionSizes, StepLengths
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.attention.table import DECODE, FLASHINFER, HOPPER, PAGED, PREFILL

# Runs some of a step's tokens: (queries `[n, num_heads, head_dim]`, the layer's KV cache, output of
# the same shape, the cache's scales).
_Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a step runs.

    Attributes:
        decode: name of the implementation for the decodes; None: the step has none.
        prefill: the same for the chunks.
        run_decodes: runs the decodes, unless our own kernel does.
        run_chunks: the same for the chunks.
    """

    decode: str | None = None
    prefill: str | None = None
    run_decodes: _Run | None = None
    run_chunks: _Run | None = None


class PagedBackend:
    """A `base.AttentionBackend` that composes a step of the implementations of its table.

    Args:
        facts: of the model and the device.
        sizes: of the engine.
        device: a GPU.
        table: has the rows of `attention.table`.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        sizes: AttentionSizes,
        device: torch.device,
        table: KernelTable[Any],
    ) -> None:
        self.table: KernelTable[Any] = table
        self._facts = facts
        self._plain = SdpaBackend(sizes)
        decode, prefill = self._names(DECODE), self._names(PREFILL)
        self._paged = PagedDecodeAttention(facts, device) if PAGED in decode else None
        self._hopper = PrefillAttention(facts, device) if HOPPER in prefill else None
        self._flashinfer_decode = self._flashinfer_prefill = None
        if FLASHINFER in decode or FLASHINFER in prefill:
            from services.decoder.attention import flashinfer

            scratch = flashinfer.make_float_workspace(device)
            if FLASHINFER in decode:
                self._flashinfer_decode = flashinfer.FlashInferDecode(facts, sizes, device, scratch)
            if FLASHINFER in prefill:
                self._flashinfer_prefill = flashinfer.FlashInferPrefill(
                    facts, sizes, device, scratch
                )
        self._entries = {
            (operation, entry.name): entry
            for operation in (DECODE, PREFILL)
            for entry in table.usable(operation)
        }

    @property
    def captures(self) -> bool:
        return self._paged is not None or self._flashinfer_decode is not None

    @property
    def captures_prompts(self) -> bool:
        """Only our own kernel needs no plan."""
        return self._hopper is not None

    @property
    def captures_mixed(self) -> bool:
        """Only our own kernels need no plan."""
        return self._paged is not None and self._hopper is not None

    def captures_chunks(self, step: StepLengths) -> bool:
        if self._hopper is None:
            return False
        if self._flashinfer_prefill is None:
            return True
        return self._hopper.is_faster_captured(self._chunks(step))

    def plans_from_blocks(self, num_decodes: int) -> bool:
        """Flashinfer's does."""
        return self._choose_captured_decode(num_decodes) == FLASHINFER

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """Work items of our own prefill kernel; None: it is not used."""
        kernel = self._hopper
        if kernel is None or step.num_decodes == len(step.seq_lens):
            return None
        chunks = self._chunks(step)
        if not captured and self._flashinfer_prefill is not None:
            hides_launches = step.num_tokens >= LAUNCH_HIDING_TOKENS
            if not (hides_launches and kernel.is_faster_than_fa3(chunks)):
                return None
        return kernel.list_work(chunks, kernel.count_work(step.num_tokens, len(chunks)))

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> _Plan:
        """Chooses implementations, and plans those that need it."""
        decodes, work = metadata.num_decodes, metadata.work
        metadata.wants_keys_values = work is not None
        has_chunks = decodes < len(metadata.seq_lens)
        decode = self._choose_decode(metadata, captured=captured) if decodes else None
        prefill = None
        if has_chunks:
            library = PLAIN if self._flashinfer_prefill is None else FLASHINFER
            prefill = library if work is None else HOPPER
            assert not captured or prefill == HOPPER
        run_decodes = run_chunks = None
        if decode in (FLASHINFER, PLAIN) or prefill in (FLASHINFER, PLAIN):
            num_blocks = -(-metadata.seq_lens // self._facts.block_size)
            if decode == FLASHINFER:
                run_decodes = self._plan_decodes(metadata, num_blocks, captured=captured)
                if run_decodes is None:
                    return self.plan(metadata, captured=captured)
            elif decode == PLAIN:
                assert not captured, "its rows of the pool would be those of the captured step"
                run_decodes = self._plan_plain(_decodes_of(metadata))
            if prefill == FLASHINFER:
                run_chunks = self._plan_chunks(metadata, num_blocks)
                if run_chunks is None:
                    return self.plan(metadata, captured=captured)
            elif prefill == PLAIN:
                run_chunks = self._plan_plain(_chunks_of(metadata))
        return _Plan(decode, prefill, run_decodes, run_chunks)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        plan: _Plan = metadata.plan
        decodes, block_ids = metadata.num_decodes, metadata.block_ids
        output = torch.empty_like(query)
        # Decodes are bound by memory and chunks by tensor cores: run concurrently, they take less.
        concurrent = plan.decode == PAGED and plan.prefill == HOPPER

        def run_paged() -> None:
            assert self._paged is not None
            self._paged(
                query[:decodes],
                kv_cache,
                block_ids,
                metadata.first_blocks_device,
                metadata.seq_lens_device,
                out=output[:decodes],
                kv_scales=kv_scales,
                beside_prefill=concurrent,
            )

        def run_hopper() -> None:
            assert keys_values is not None and metadata.work is not None
            assert self._hopper is not None
            self._hopper(
                query,
                keys_values,
                kv_cache,
                block_ids,
                metadata.work,
                out=output,
                kv_scales=kv_scales,
                beside_decode=concurrent,
            )

        def run_decodes() -> None:
            assert plan.run_decodes is not None
            plan.run_decodes(query[:decodes], kv_cache, output[:decodes], kv_scales)

        def run_chunks() -> None:
            assert plan.run_chunks is not None
            plan.run_chunks(query[decodes:], kv_cache, output[decodes:], kv_scales)

        done = True
        if plan.decode is not None:
            run = run_paged if plan.decode == PAGED else run_decodes
            done = self._succeeds(DECODE, plan.decode, run)
            self._entries[DECODE, plan.decode].num_calls += 1
        if done and plan.prefill is not None:
            run = run_hopper if plan.prefill == HOPPER else run_chunks
            done = self._succeeds(PREFILL, plan.prefill, run)
            self._entries[PREFILL, plan.prefill].num_calls += 1
        if not done:
            if self._hopper is None:
                metadata.work = None
            metadata.plan = self.plan(metadata)
            return self.forward(query, kv_cache, metadata, keys_values, kv_scales)
        return output

    def _succeeds(self, operation: str, name: str, run: Callable[[], None]) -> bool:
        """Runs an implementation; False: it failed while kernels warm up, and is not used again."""
        entry = self._entries[operation, name]
        try:
            run()
        except Exception as error:
            if not (self.table.is_warming_up and self.table.drop(entry, error)):
                raise
            usable = {DECODE: self._names(DECODE), PREFILL: self._names(PREFILL)}
            self._paged = self._paged if PAGED in usable[DECODE] else None
            self._hopper = self._hopper if HOPPER in usable[PREFILL] else None
            if FLASHINFER not in usable[DECODE]:
                self._flashinfer_decode = None
            if FLASHINFER not in usable[PREFILL]:
                self._flashinfer_prefill = None
            return False
        return True

    def _plan_decodes(
        self, metadata: AttentionMetadata, num_blocks: npt.NDArray[np.int32], *, captured: bool
    ) -> _Run | None:
        """Flashinfer's plan; None: it failed while kernels warm up, and is not used again."""
        planned: list[_Run] = []

        def plan() -> None:
            assert self._flashinfer_decode is not None
            wrapper = self._flashinfer_decode.plan(metadata, num_blocks, captured=captured)
            planned.append(_of_wrapper(wrapper))

        return planned[0] if self._succeeds(DECODE, FLASHINFER, plan) else None

    def _plan_chunks(
        self, metadata: AttentionMetadata, num_blocks: npt.NDArray[np.int32]
    ) -> _Run | None:
        """The same for the chunks."""
        planned: list[_Run] = []

        def plan() -> None:
            assert self._flashinfer_prefill is not None
            planned.append(_of_wrapper(self._flashinfer_prefill.plan(metadata, num_blocks)))

        return planned[0] if self._succeeds(PREFILL, FLASHINFER, plan) else None

    def _choose_decode(self, metadata: AttentionMetadata, *, captured: bool) -> str:
        # Beside our own prefill kernel it costs least, however few sequences there are. The table's
        # least number is for a choice between it and flashinfer, which may have been dropped.
        is_alone = metadata.work is not None or self._flashinfer_decode is None
        if self._paged is not None and is_alone:
            return PAGED
        hides_launches = captured or len(metadata.slot_mapping) >= LAUNCH_HIDING_TOKENS
        if not hides_launches and self._flashinfer_decode is not None:
            return FLASHINFER
        if captured:
            return self._choose_captured_decode(metadata.num_decodes)
        return self.table.choose(DECODE, metadata.num_decodes).name

    def _choose_captured_decode(self, num_decodes: int) -> str:
        """For a step of decodes alone."""
        if self._paged is not None and self._flashinfer_decode is None:
            return PAGED
        with self.table.for_graph():
            return self.table.choose(DECODE, num_decodes).name

    def _names(self, operation: str) -> set[str]:
        """Implementations of an operation that can be used here."""
        return {entry.name for entry in self.table.usable(operation)}

    def _chunks(self, step: StepLengths) -> list[PrefillChunk]:
        """The step's chunks, which follow its decodes."""
        decodes = step.num_decodes
        starts: list[int] = step.cu_query_lens[decodes:].tolist()
        seq_lens: list[int] = step.seq_lens[decodes:].tolist()
        firsts: list[int] = step.first_blocks[decodes:].tolist()
        return [
            PrefillChunk(start, end - start, context - (end - start), first)
            for (start, end), context, first in zip(pairwise(starts), seq_lens, firsts, strict=True)
        ]

    def _plan_plain(self, part: AttentionMetadata) -> _Run:
        part.plan = self._plain.plan(part)

        def run(query: Tensor, kv_cache: Tensor, out: Tensor, kv_scales: Tensor | None) -> None:
            out.copy_(self._plain.forward(query, kv_cache, part, kv_scales=kv_scales))

        return run


def _of_wrapper(wrapper: Any) -> _Run:  # noqa: ANN401 - flashinfer's
    def run(query: Tensor, kv_cache: Tensor, out: Tensor, _: Tensor | None) -> None:
        wrapper.run(query, kv_cache, out=out)

    return run


def _decodes_of(metadata: AttentionMetadata) -> AttentionMetadata:
    """The step's decodes alone."""
    count = metadata.num_decodes
    return replace(
        metadata,
        cu_query_lens=metadata.cu_query_lens[: count + 1],
        seq_lens=metadata.seq_lens[:count],
        first_blocks=metadata.first_blocks[:count],
        first_blocks_device=metadata.first_blocks_device[:count],
        seq_lens_device=metadata.seq_lens_device[:count],
    )


def _chunks_of(metadata: AttentionMetadata) -> AttentionMetadata:
    """The step's chunks alone."""
    count = metadata.num_decodes
    return replace(
        metadata,
        num_decodes=0,
        cu_query_lens=metadata.cu_query_lens[count:] - metadata.cu_query_lens[count],
        seq_lens=metadata.seq_lens[count:],
        first_blocks=metadata.first_blocks[count:],
        first_blocks_device=metadata.first_blocks_device[count:],
        seq_lens_device=metadata.seq_lens_device[count:],
    )
