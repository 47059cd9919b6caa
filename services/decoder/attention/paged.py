"""Attention on a GPU: runs each step's decodes and chunks by the fastest implementation for them.

`services.decoder.attention.table` lists the implementations and counts their calls. Our own kernels
need no plan, so CUDA graphs can contain them. Graphs of chunks behind long contexts contain FA3,
which is planned before each replay. Outside of graphs, the host takes longer to launch Triton's
kernels than flashinfer's. An eager step therefore uses our kernels only if it has so many tokens
that the device is busy during the launches.

An implementation that fails while kernels warm up is dropped, and the step is planned again. A
later failure is raised to the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk, is_long
from kernels.tuning import LEAST_CAPTURED_LONG, MAX_CAPTURED_CHUNKS, MAX_CAPTURED_DECODES
from services.common.nn.dispatch import PLAIN, KernelTable
from services.decoder.attention.base import AttentionMetadata, StepKind, StepLengths
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.attention.table import DECODE, FLASHINFER, HOPPER, PAGED, PREFILL

Key = tuple[str, str]  # operation and name of an implementation

# Implementations other than torch's.
_PAGED, _LIBRARY_DECODE = (DECODE, PAGED), (DECODE, FLASHINFER)
_HOPPER, _LIBRARY_PREFILL = (PREFILL, HOPPER), (PREFILL, FLASHINFER)


class StepPart(Protocol):
    """The decodes or the chunks of a step, with the planned implementation that runs them."""

    @property
    def key(self) -> Key:
        """Operation and name of the implementation."""
        ...

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        """Runs the part in one layer; see `AttentionBackend.forward`.

        Args:
            query: `[T, num_heads, head_dim]`, queries of the whole step.
            output: `[T, num_heads, head_dim]`, gets the result of the part's tokens.
            keys_values: `[T, 2 * num_kv_heads, head_dim]`, the step's own keys and values. None if
                no part reads them.
            kv_cache: KV cache of the layer.
            kv_scales: scales of an e4m3 cache.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedDecodes:
    """Decodes by our own kernel.

    Attributes:
        kernel: the kernel.
        metadata: layout of the step.
        concurrent: True if the step's chunks run concurrently by our own kernel.
    """

    kernel: PagedDecodeAttention
    metadata: AttentionMetadata
    concurrent: bool
    key: Key = _PAGED

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        metadata = self.metadata
        count = metadata.num_decodes
        self.kernel(
            query[:count],
            kv_cache,
            metadata.block_ids,
            metadata.first_blocks_device,
            metadata.seq_lens_device,
            out=output[:count],
            kv_scales=kv_scales,
            beside_prefill=self.concurrent,
        )


@dataclass(frozen=True, slots=True)
class HopperChunks:
    """Chunks by our own kernel.

    Attributes:
        kernel: the kernel.
        block_ids: the blocks of all rows.
        work: work list of the step.
        concurrent: True if the step's decodes run concurrently by our own kernel.
    """

    kernel: PrefillAttention
    block_ids: Tensor
    work: Tensor
    concurrent: bool
    key: Key = _HOPPER

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        assert keys_values is not None
        self.kernel(
            query,
            keys_values,
            kv_cache,
            self.block_ids,
            self.work,
            out=output,
            kv_scales=kv_scales,
            beside_decode=self.concurrent,
        )


@dataclass(frozen=True, slots=True)
class LibraryDecodes:
    """Decodes by flashinfer.

    Attributes:
        wrapper: flashinfer's planned wrapper.
        count: number of decodes.
    """

    wrapper: Any
    count: int
    key: Key = _LIBRARY_DECODE

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        self.wrapper.run(query[: self.count], kv_cache, out=output[: self.count])


@dataclass(frozen=True, slots=True)
class LibraryChunks:
    """Chunks by flashinfer.

    Attributes:
        planned: the result of `FlashInferPrefill.plan`.
    """

    planned: Any
    key: Key = _LIBRARY_PREFILL

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        self.planned.run(query, kv_cache, out=output)


@dataclass(frozen=True, slots=True)
class PlainPart:
    """Decodes or chunks by torch.

    Attributes:
        key: operation and name.
        backend: the backend in torch.
        metadata: planned layout of the part alone.
        tokens: the tokens of the part.
    """

    key: Key
    backend: SdpaBackend
    metadata: AttentionMetadata
    tokens: slice

    def run(
        self,
        query: Tensor,
        output: Tensor,
        keys_values: Tensor | None,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
    ) -> None:
        output[self.tokens] = self.backend.forward(
            query[self.tokens], kv_cache, self.metadata, kv_scales=kv_scales
        )


def create_kernels(
    facts: AttentionFacts, device: torch.device, table: KernelTable[Any]
) -> dict[Key, Any]:
    """Creates the usable implementations other than torch's, by operation and name.

    Args:
        facts: facts of the model and the device.
        device: the device that computes.
        table: the resolved rows of `attention.table`.
    """
    usable = {(name, row.name) for name in (DECODE, PREFILL) for row in table.usable(name)}
    kernels: dict[Key, Any] = {}
    if _PAGED in usable:
        kernels[_PAGED] = PagedDecodeAttention(facts, device)
    if _HOPPER in usable:
        kernels[_HOPPER] = PrefillAttention(facts, device)
    if _LIBRARY_DECODE in usable or _LIBRARY_PREFILL in usable:
        from services.decoder.attention import flashinfer

        scratch = flashinfer.make_float_workspace(device)
        if _LIBRARY_DECODE in usable:
            kernels[_LIBRARY_DECODE] = flashinfer.FlashInferDecode(facts, device, scratch)
        if _LIBRARY_PREFILL in usable:
            kernels[_LIBRARY_PREFILL] = flashinfer.FlashInferPrefill(facts, device, scratch)
    return kernels


class PagedBackend:
    """A `base.AttentionBackend` that composes a step of the implementations of its table.

    Args:
        facts: facts of the model and the device.
        table: the resolved rows of `attention.table`.
        kernels: the result of `create_kernels`.
    """

    def __init__(
        self, facts: AttentionFacts, table: KernelTable[Any], kernels: Mapping[Key, Any]
    ) -> None:
        self.table: KernelTable[Any] = table
        self._hiding_tokens = facts.launch_hiding_tokens
        self._plain = SdpaBackend(facts)
        self._entries = {
            (operation, entry.name): entry
            for operation in (DECODE, PREFILL)
            for entry in table.usable(operation)
        }
        self._kernels = dict(kernels)

    def captures(self, kind: StepKind) -> bool:
        paged, hopper = self._has(_PAGED), self._has(_HOPPER)
        if kind == "decodes":
            return paged or self._has(_LIBRARY_DECODE)
        if kind == "long":
            return paged and self._has(_LIBRARY_PREFILL) and self._library_prefill.can_be_captured
        return hopper and (paged or kind == "prompts")

    def captures_chunks(self, step: StepLengths) -> bool:
        if not self._has(_HOPPER):
            return False
        if not self._has(_LIBRARY_PREFILL):
            return True
        chunks = _chunks(step)
        if self._may_be_long(step) and not is_long(chunks):
            return True  # A step of this size is faster in one of the two kinds of graphs.
        return not self.captures_long(step) and self._kernels[_HOPPER].is_faster_captured(chunks)

    def captures_long(self, step: StepLengths) -> bool:
        if not (self._may_be_long(step) and is_long(_chunks(step))):
            return False
        return self._library_prefill.suits_graph(step)

    def plans_from_blocks(self, num_decodes: int) -> bool:
        return self._choose_captured_decode(num_decodes) == FLASHINFER

    @property
    def plans_on_device(self) -> bool:
        return self._has(_PAGED)

    def plan_on_device(self, metadata: AttentionMetadata) -> list[StepPart]:
        return [PagedDecodes(self._kernels[_PAGED], metadata, concurrent=False)]

    def list_work(self, step: StepLengths, *, captured: bool) -> npt.NDArray[np.int32] | None:
        """Returns the work list of our own prefill kernel, or None if the step does not use it."""
        if not self._has(_HOPPER) or step.num_decodes == len(step.seq_lens):
            return None
        kernel, chunks = self._kernels[_HOPPER], _chunks(step)
        if not captured and self._has(_LIBRARY_PREFILL):
            hides_launches = step.num_tokens >= self._hiding_tokens
            if not (hides_launches and kernel.is_faster_than_fa3(chunks)):
                return None
        return kernel.list_work(chunks, kernel.count_work(step.num_tokens, len(chunks)))

    def plan(self, metadata: AttentionMetadata, *, captured: bool = False) -> list[StepPart]:
        """Chooses and plans the implementations of a step's decodes and of its chunks."""
        decodes, work = metadata.num_decodes, metadata.work
        metadata.wants_keys_values = work is not None
        decode = self._choose_decode(metadata, captured=captured) if decodes else ""
        prefill = ""
        if decodes < len(metadata.seq_lens):
            library = FLASHINFER if self._has(_LIBRARY_PREFILL) else PLAIN
            prefill = library if work is None else HOPPER
        assert not captured or PLAIN not in (decode, prefill), "plans on the host"
        # Decodes are bound by memory and chunks by tensor cores: run concurrently, they take less.
        concurrent = decode == PAGED and prefill == HOPPER
        parts: list[StepPart] = []
        chosen = (DECODE, "")
        try:
            if decode:
                chosen = DECODE, decode
                parts.append(
                    self._plan_decodes(decode, metadata, captured=captured, concurrent=concurrent)
                )
            if prefill:
                chosen = PREFILL, prefill
                parts.append(
                    self._plan_chunks(prefill, metadata, captured=captured, concurrent=concurrent)
                )
        except Exception as error:
            if not self._drops(chosen, error):
                raise
            return self.plan(metadata, captured=captured)
        return parts

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty_like(query)
        parts: list[StepPart] = metadata.plan
        for part in parts:
            self._entries[part.key].num_calls += 1
            try:
                part.run(query, output, keys_values, kv_cache, kv_scales)
            except Exception as error:
                if not self._drops(part.key, error):
                    raise
                if not self._has(_HOPPER):
                    metadata.work = None
                metadata.plan = self.plan(metadata)
                return self.forward(query, kv_cache, metadata, keys_values, kv_scales)
        return output

    def _drops(self, key: Key, error: Exception) -> bool:
        """Stops using an implementation that failed, if kernels warm up.

        Returns False if the failure has to be raised.
        """
        if not (self.table.is_warming_up and self.table.drop(self._entries[key], error)):
            return False
        self._kernels.pop(key, None)
        return True

    def _plan_decodes(
        self, name: str, metadata: AttentionMetadata, *, captured: bool, concurrent: bool
    ) -> StepPart:
        decodes = slice(metadata.num_decodes)
        if name == PLAIN:
            return self._plan_plain(DECODE, metadata, decodes)
        kernel = self._kernels[DECODE, name]
        if name == FLASHINFER:
            wrapper = kernel.plan(metadata, captured=captured)
            return LibraryDecodes(wrapper, metadata.num_decodes)
        return PagedDecodes(kernel, metadata, concurrent)

    def _plan_chunks(
        self, name: str, metadata: AttentionMetadata, *, captured: bool, concurrent: bool
    ) -> StepPart:
        chunks, work = slice(metadata.num_decodes, None), metadata.work
        if name == PLAIN:
            return self._plan_plain(PREFILL, metadata, chunks)
        kernel = self._kernels[PREFILL, name]
        if name == FLASHINFER:
            return LibraryChunks(kernel.plan(metadata, captured=captured))
        assert work is not None
        return HopperChunks(kernel, metadata.block_ids, work, concurrent)

    def _plan_plain(
        self, operation: str, metadata: AttentionMetadata, sequences: slice
    ) -> StepPart:
        part = _part(metadata, sequences)
        part.plan = self._plain.plan(part)
        return PlainPart((operation, PLAIN), self._plain, part, sequences)

    def _choose_decode(self, metadata: AttentionMetadata, *, captured: bool) -> str:
        """Returns the name of the implementation of a step's decodes."""
        # Beside our own prefill kernel, our decode kernel costs least, however few sequences there
        # are. A captured step with chunks has many decodes, most of which may be padding.
        is_padded = captured and metadata.num_decodes < len(metadata.seq_lens)
        if (metadata.work is not None or is_padded) and self._has(_PAGED):
            return PAGED
        if captured:
            return self._choose_captured_decode(metadata.num_decodes)
        hides_launches = len(metadata.slot_mapping) >= self._hiding_tokens
        if not hides_launches and self._has(_LIBRARY_DECODE):
            return FLASHINFER
        return self.table.choose(DECODE, metadata.num_decodes).name

    def _choose_captured_decode(self, num_decodes: int) -> str:
        """Returns the name of the implementation of a captured step of decodes alone."""
        with self.table.for_graph():
            return self.table.choose(DECODE, num_decodes).name

    def _may_be_long(self, step: StepLengths) -> bool:
        """Returns whether a graph of the kind "long" has room for a step and may be faster."""
        num_chunks, num_sequences = len(step.seq_lens) - step.num_decodes, len(step.seq_lens)
        if num_chunks > MAX_CAPTURED_CHUNKS or num_sequences > MAX_CAPTURED_DECODES:
            return False  # Each sequence may sample.
        return int(step.cu_query_lens[-1]) >= LEAST_CAPTURED_LONG and self.captures("long")

    @property
    def _library_prefill(self) -> Any:  # noqa: ANN401 - a type that needs flashinfer
        return self._kernels[_LIBRARY_PREFILL]

    def _has(self, key: Key) -> bool:
        """Returns whether an implementation can run here and was not dropped."""
        return (entry := self._entries.get(key)) is not None and self.table.has(entry)


def _chunks(step: StepLengths) -> list[PrefillChunk]:
    """Returns the step's chunks, which follow its decodes."""
    decodes = step.num_decodes
    starts: list[int] = step.cu_query_lens[decodes:].tolist()
    seq_lens: list[int] = step.seq_lens[decodes:].tolist()
    firsts: list[int] = step.first_blocks[decodes:].tolist()
    return [
        PrefillChunk(start, end - start, context - (end - start), first)
        for (start, end), context, first in zip(pairwise(starts), seq_lens, firsts, strict=True)
    ]


def _part(metadata: AttentionMetadata, sequences: slice) -> AttentionMetadata:
    """Returns the layout of a step's decodes alone, or of its chunks alone."""
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
