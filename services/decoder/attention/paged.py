"""Attention on a GPU: runs each step's decodes and chunks by the fastest implementation for them.

`services.decoder.attention.table` has the implementations, and counts their calls. Our own kernels
need no plan, so a CUDA graph can hold them. Launching Triton's kernels one by one takes the host
longer than launching flashinfer's, so an eager step uses ours only if it has enough tokens to hide
that.

An implementation that fails while kernels warm up is dropped, and the step is planned again.
Later failures are the caller's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from kernels.tuning import LAUNCH_HIDING_TOKENS
from services.common.nn.dispatch import PLAIN, KernelTable
from services.decoder.attention.base import AttentionMetadata, StepKind, StepLengths
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.attention.table import DECODE, FLASHINFER, HOPPER, PAGED, PREFILL

# Implementations other than torch's, by operation and name.
_PAGED, _LIBRARY_DECODE = (DECODE, PAGED), (DECODE, FLASHINFER)
_HOPPER, _LIBRARY_PREFILL = (PREFILL, HOPPER), (PREFILL, FLASHINFER)

# Runs some of a step's tokens in one layer: its queries and outputs `[T, num_heads, head_dim]`, the
# step's own keys and values, the layer's KV cache, and the cache's scales.
_Run = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], None]


class _Part(NamedTuple):
    """A step's decodes, or its chunks, and the implementation that runs them."""

    operation: str
    name: str
    run: _Run


class PagedBackend:
    """A `base.AttentionBackend` that composes a step of the implementations of its table.

    Args:
        table: has the rows of `attention.table`.
    """

    def __init__(
        self, facts: AttentionFacts, device: torch.device, table: KernelTable[Any]
    ) -> None:
        self.table: KernelTable[Any] = table
        self._plain = SdpaBackend(facts)
        self._entries = {
            (operation, entry.name): entry
            for operation in (DECODE, PREFILL)
            for entry in table.usable(operation)
        }
        makers: dict[tuple[str, str], Callable[..., Any]] = {
            _PAGED: PagedDecodeAttention,
            _HOPPER: PrefillAttention,
        }
        if _LIBRARY_DECODE in self._entries or _LIBRARY_PREFILL in self._entries:
            from services.decoder.attention import flashinfer

            scratch = flashinfer.make_float_workspace(device)
            makers[_LIBRARY_DECODE] = partial(flashinfer.FlashInferDecode, scratch=scratch)
            makers[_LIBRARY_PREFILL] = partial(flashinfer.FlashInferPrefill, scratch=scratch)
        # Of all implementations but torch's, until they are dropped.
        self._kernels: dict[tuple[str, str], Any] = {
            key: make(facts, device) for key, make in makers.items() if key in self._entries
        }

    def captures(self, kind: StepKind) -> bool:
        """Only our own kernels need no plan; a library's decodes can be planned for a graph."""
        paged, hopper = _PAGED in self._kernels, _HOPPER in self._kernels
        decodes = paged or _LIBRARY_DECODE in self._kernels
        return {"decodes": decodes, "prompts": hopper, "mixed": paged and hopper}[kind]

    def captures_chunks(self, step: StepLengths) -> bool:
        if (kernel := self._kernels.get(_HOPPER)) is None:
            return False
        return _LIBRARY_PREFILL not in self._kernels or kernel.is_faster_captured(_chunks(step))

    def plans_from_blocks(self, num_decodes: int) -> bool:
        """Flashinfer's does."""
        return self._choose_captured_decode(num_decodes) == FLASHINFER

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """Work items of our own prefill kernel; None: it is not used."""
        kernel = self._kernels.get(_HOPPER)
        if kernel is None or step.num_decodes == len(step.seq_lens):
            return None
        chunks = _chunks(step)
        if not captured and _LIBRARY_PREFILL in self._kernels:
            hides_launches = step.num_tokens >= LAUNCH_HIDING_TOKENS
            if not (hides_launches and kernel.is_faster_than_fa3(chunks)):
                return None
        return kernel.list_work(chunks, kernel.count_work(step.num_tokens, len(chunks)))

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> list[_Part]:
        """Chooses implementations, and plans those that need it; decodes first."""
        decodes, work = metadata.num_decodes, metadata.work
        metadata.wants_keys_values = work is not None
        decode = self._choose_decode(metadata, captured=captured) if decodes else ""
        prefill = ""
        if decodes < len(metadata.seq_lens):
            library = FLASHINFER if _LIBRARY_PREFILL in self._kernels else PLAIN
            prefill = library if work is None else HOPPER
        assert not captured or (decode != PLAIN and prefill in ("", HOPPER)), "plans on the host"
        # Decodes are bound by memory and chunks by tensor cores: run concurrently, they take less.
        concurrent = decode == PAGED and prefill == HOPPER
        parts: list[_Part] = []

        def plan_decodes() -> None:
            run = self._plan_decodes(decode, metadata, captured=captured, concurrent=concurrent)
            parts.append(_Part(DECODE, decode, run))

        def plan_chunks() -> None:
            run = self._plan_chunks(prefill, metadata, concurrent=concurrent)
            parts.append(_Part(PREFILL, prefill, run))

        done = not decode or self._succeeds(DECODE, decode, plan_decodes)
        done = done and (not prefill or self._succeeds(PREFILL, prefill, plan_chunks))
        return parts if done else self.plan(metadata, captured=captured)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty_like(query)
        parts: list[_Part] = metadata.plan
        for operation, name, run in parts:
            arguments = query, output, keys_values, kv_cache, kv_scales
            self._entries[operation, name].num_calls += 1
            if not self._succeeds(operation, name, run, *arguments):
                if _HOPPER not in self._kernels:
                    metadata.work = None
                metadata.plan = self.plan(metadata)
                return self.forward(query, kv_cache, metadata, keys_values, kv_scales)
        return output

    def _succeeds(
        self, operation: str, name: str, run: Callable[..., None], *arguments: Tensor | None
    ) -> bool:
        """Runs an implementation; False: it failed while kernels warm up, and is not used again."""
        entry = self._entries[operation, name]
        try:
            run(*arguments)
        except Exception as error:
            if not (self.table.is_warming_up and self.table.drop(entry, error)):
                raise
            self._kernels.pop((operation, name), None)
            return False
        return True

    def _plan_decodes(
        self, name: str, metadata: AttentionMetadata, *, captured: bool, concurrent: bool
    ) -> _Run:
        count = metadata.num_decodes
        if name == PLAIN:
            return self._plan_plain(metadata, slice(count))
        kernel = self._kernels[DECODE, name]
        if name == FLASHINFER:
            return _of_wrapper(kernel.plan(metadata, captured=captured), slice(count))

        def run(
            query: Tensor, output: Tensor, _: Tensor | None, cache: Tensor, scales: Tensor | None
        ) -> None:
            kernel(
                query[:count], cache, metadata.block_ids, metadata.first_blocks_device,
                metadata.seq_lens_device, out=output[:count], kv_scales=scales,
                beside_prefill=concurrent,
            )  # fmt: skip

        return run

    def _plan_chunks(self, name: str, metadata: AttentionMetadata, *, concurrent: bool) -> _Run:
        chunks, work = slice(metadata.num_decodes, None), metadata.work
        if name == PLAIN:
            return self._plan_plain(metadata, chunks)
        kernel = self._kernels[PREFILL, name]
        if name == FLASHINFER:
            return _of_wrapper(kernel.plan(metadata), chunks)

        def run(
            query: Tensor, output: Tensor, own: Tensor | None, cache: Tensor, scales: Tensor | None
        ) -> None:
            kernel(
                query, own, cache, metadata.block_ids, work, out=output, kv_scales=scales,
                beside_decode=concurrent,
            )  # fmt: skip

        return run

    def _plan_plain(self, metadata: AttentionMetadata, sequences: slice) -> _Run:
        part = _part(metadata, sequences)
        part.plan = self._plain.plan(part)

        def run(
            query: Tensor, output: Tensor, _: Tensor | None, cache: Tensor, scales: Tensor | None
        ) -> None:
            found = self._plain.forward(query[sequences], cache, part, kv_scales=scales)
            output[sequences] = found

        return run

    def _choose_decode(self, metadata: AttentionMetadata, *, captured: bool) -> str:
        # Beside our own prefill kernel it costs least, however few sequences there are. The table's
        # least number is for a choice between it and flashinfer, which may have been dropped.
        has_library = _LIBRARY_DECODE in self._kernels
        if _PAGED in self._kernels and (metadata.work is not None or not has_library):
            return PAGED
        hides_launches = captured or len(metadata.slot_mapping) >= LAUNCH_HIDING_TOKENS
        if not hides_launches and has_library:
            return FLASHINFER
        if captured:
            return self._choose_captured_decode(metadata.num_decodes)
        return self.table.choose(DECODE, metadata.num_decodes).name

    def _choose_captured_decode(self, num_decodes: int) -> str:
        """For a step of decodes alone."""
        if _PAGED in self._kernels and _LIBRARY_DECODE not in self._kernels:
            return PAGED
        with self.table.for_graph():
            return self.table.choose(DECODE, num_decodes).name


def _chunks(step: StepLengths) -> list[PrefillChunk]:
    """The step's chunks, which follow its decodes."""
    decodes = step.num_decodes
    starts: list[int] = step.cu_query_lens[decodes:].tolist()
    seq_lens: list[int] = step.seq_lens[decodes:].tolist()
    firsts: list[int] = step.first_blocks[decodes:].tolist()
    return [
        PrefillChunk(start, end - start, context - (end - start), first)
        for (start, end), context, first in zip(pairwise(starts), seq_lens, firsts, strict=True)
    ]


def _of_wrapper(wrapper: Any, tokens: slice) -> _Run:  # noqa: ANN401 - flashinfer's
    def run(
        query: Tensor, output: Tensor, _: Tensor | None, cache: Tensor, __: Tensor | None
    ) -> None:
        wrapper.run(query[tokens], cache, out=output[tokens])

    return run


def _part(metadata: AttentionMetadata, sequences: slice) -> AttentionMetadata:
    """A step's decodes alone, or its chunks: decodes are tokens, so that a slice is of both."""
    starts = metadata.cu_query_lens[sequences.start or 0 :]
    count = len(metadata.seq_lens[sequences])
    return replace(
        metadata,
        num_decodes=0 if sequences.start is not None else count,
        cu_query_lens=starts[: count + 1] - starts[0],
        seq_lens=metadata.seq_lens[sequences],
        first_blocks=metadata.first_blocks[sequences],
        first_blocks_device=metadata.first_blocks_device[sequences],
        seq_lens_device=metadata.seq_lens_device[sequences],
    )
