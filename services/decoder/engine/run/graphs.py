"""Steps as CUDA graphs: decodes by bucket of batch size, lone prompts by bucket of length, and
mixtures of both by bucket of tokens.

A graph reads its inputs from the device side of the staging buffer, and writes logits to one buffer
that all graphs of a kind share. All graphs share one memory pool: one runs at a time.

`ModelRunner` captures them at warm-up and replays them. The runner launches a step that
fits no graph eagerly.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import launches
from kernels.linear_attention.states import StateCache, StateLayout
from kernels.rows import DeviceRows, EnteredStep, OfChunk, StepEntry
from kernels.tuning import (
    MAX_CAPTURED_CHUNKS,
    MAX_CAPTURED_DECODES,
    MAX_CAPTURED_PROMPT,
    MAX_CAPTURED_TOKENS,
)
from services.common.nn.dispatch import CapturedCalls
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.models.transformer import Transformer


def decode_buckets(max_num_sequences: int) -> list[int]:
    """Batch sizes to capture: dense where a step is short, at most an eighth of padding above."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < max_num_sequences:
        step = max(4, 1 << (sizes[-1].bit_length() - 4))
        sizes.append(sizes[-1] + step)
    return sorted({min(size, max_num_sequences) for size in sizes})


def prompt_buckets(max_num_tokens: int) -> list[int]:
    """Lengths to capture, up to where launches no longer matter. Above 1,408, GEMM tiles fill the
    SMs no better in steps of 64.
    """
    sizes = [*range(64, 1408, 64), *range(1408, MAX_CAPTURED_PROMPT + 1, 128)]
    return [size for size in sizes if size <= max_num_tokens]


def mixed_buckets(max_num_tokens: int) -> list[int]:
    """Numbers of tokens, decodes among them, to capture mixed steps for."""
    sizes = [*range(256, 1408, 64), *range(1408, MAX_CAPTURED_TOKENS + 1, 128)]
    return [size for size in sizes if size <= max_num_tokens]


def pad_decodes(step: StepInputs, num_chunks: int, scratch: StepInputs) -> StepInputs:
    """Pads a step of decodes to a bucket; returns it.

    Args:
        step: of decodes alone.
        scratch: `StepInputs.scratch` of at least as many decodes. Padding has one token of context
            in the scratch block.
    """
    count = len(step.seq_lens)
    if num_chunks > count:
        padding = slice(count, num_chunks)
        step.num_tokens = step.num_decodes = num_chunks
        step.chunks = np.concatenate((step.chunks, scratch.chunks[:, padding]), axis=1)
        step.cu_query_lens = scratch.cu_query_lens[: num_chunks + 1]
        step.seq_lens = np.concatenate((step.seq_lens, scratch.seq_lens[padding]))
        step.first_blocks = np.concatenate((step.first_blocks, scratch.first_blocks[padding]))
    return step


def pad_mixed(
    step: StepInputs, num_tokens: int, num_decodes: int, num_chunks: int, scratch: StepInputs
) -> StepInputs:
    """Pads a step of decodes and chunks to these numbers of tokens, decodes and chunks; returns it.

    Padding chunks have no context. Tokens stay contiguous, decodes first, so that padding tokens
    are the last ones. `num_decodes` tokens are sampled: the step's own, then the step's last token
    repeatedly, for the scratch row.
    """
    decodes, count = step.num_decodes, len(step.seq_lens)
    used, end = step.tokens.shape[1], num_decodes + count - decodes
    total = num_decodes + num_chunks + 1  # one is always padding
    seq_lens = np.zeros(total, np.int32)
    first_blocks = np.full(total, scratch.first_blocks[0])
    chunks = np.zeros((OfChunk.COUNT, total), np.int32)
    chunks[OfChunk.PLACE] = -1
    chunks[OfChunk.ROW] = scratch.chunks[OfChunk.ROW, 0]
    cu_query_lens = np.full(total + 1, used, np.int32)
    for target, source in (
        (seq_lens, step.seq_lens), (first_blocks, step.first_blocks), (chunks, step.chunks),
    ):  # fmt: skip
        target[..., :decodes] = source[..., :decodes]
        target[..., num_decodes:end] = source[..., decodes:]
    cu_query_lens[: decodes + 1] = step.cu_query_lens[: decodes + 1]
    cu_query_lens[decodes : num_decodes + 1] = decodes
    cu_query_lens[num_decodes : end + 1] = step.cu_query_lens[decodes:]
    samples = np.full(num_decodes, total - 1)
    chosen = step.samples
    samples[: len(chosen)] = np.where(chosen < decodes, chosen, chosen + num_decodes - decodes)
    step.num_tokens, step.num_decodes = num_tokens, num_decodes
    step.chunks, step.cu_query_lens, step.samples = chunks, cu_query_lens, samples
    step.seq_lens, step.first_blocks = seq_lens, first_blocks
    return step


@dataclass(slots=True)
class DeviceState:
    """Tensors that stay on the device between steps."""

    kv_cache: Tensor  # [num_layers, num_blocks + 1, 2, block_size, num_kv_heads, head_dim]
    states: StateCache | None  # of rows, and one more for padding; None: the model has none
    checkpoints: StateCache | None
    rows: DeviceRows  # the last one is scratch, for padding


@dataclass(frozen=True, slots=True)
class StepParts:
    """What runs a step, eagerly or in a graph."""

    model: Transformer
    backend: AttentionBackend
    images: ImageReader | None
    state: DeviceState
    entered: EnteredStep
    staging: Staging

    def metadata(self, step: StepInputs, entered: EnteredStep) -> AttentionMetadata:
        """The uploaded step's layout; `plan` is not made yet. For a CUDA graph it serves all steps
        that are padded to the same size: their arrays are at the same places on the device.
        """
        places, device, state = step.places, self.staging.device, self.state
        metadata = AttentionMetadata(
            num_decodes=step.num_decodes,
            cu_query_lens=step.cu_query_lens,
            seq_lens=step.seq_lens,
            first_blocks=step.first_blocks,
            slot_mapping=entered.slots,
            block_ids=state.rows.blocks.view(-1),
            first_blocks_device=entered.first_blocks,
            seq_lens_device=entered.lengths,
            work=None if places.work is None else device(places.work),
        )
        if state.states is not None:
            assert places.cu_query_lens is not None
            metadata.states = StateLayout(
                cache=state.states,
                num_decodes=step.num_decodes,
                cu_query_lens=step.cu_query_lens,
                seq_lens=step.seq_lens,
                slots=entered.rows,
                cu_query_lens_device=device(places.cu_query_lens),
                seq_lens_device=entered.lengths,
                work=None if places.pieces is None else device(places.pieces),
                checkpoints=state.checkpoints,
                saves=None if places.saves is None else device(places.saves),
            )
        return metadata

    def forward(
        self,
        step: StepInputs,
        rows: Tensor | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """Runs an uploaded step, whose images are read by another; see `Transformer.forward` for
        `rows`. `metadata` is planned; None: it is planned now.
        """
        state, device, visual = self.state, self.staging.device, None
        entered = self.entered.part(step.num_tokens, len(step.seq_lens))
        entry = StepEntry(device(step.places.tokens), device(step.places.chunks))
        self.model.ops.enter_step(entry, state.rows, entered, state.kv_cache.shape[3])
        if metadata is None:
            metadata = self.metadata(step, entered)
            metadata.plan = self.backend.plan(metadata)
        if step.places.visual_mask is not None:
            assert self.images is not None
            visual = self.images.visual(device(step.places.visual_mask))
        return self.model.forward(
            entered.input_ids, entered.positions, state.kv_cache, metadata, visual, rows
        )


class GraphMemory:
    """What all graphs share: their pool, and the stream that they are captured on, to which torch's
    cached memory belongs.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    metadata: AttentionMetadata  # with the lengths of the step that was planned last
    logits: Tensor  # [n, vocab_size]
    token_ids: Tensor  # [n] int32
    calls: CapturedCalls


class Kind(NamedTuple):
    """What a graph is captured for."""

    size: int  # sequences or tokens
    fused: bool = False  # see AttentionMetadata


class _GraphSet:
    """Captured steps by kind.

    `pad` pads a step to a captured size; False: it must run eagerly. `replay` runs an uploaded one:
    logits `[n, vocab_size]` and greedy tokens `[n]`, a row per sampling chunk, then padding, valid
    until the next replay.

    Attributes:
        masks_images: every step has a mask of its visual tokens.
        runs_decodes: alone, each of which samples.
    """

    masks_images = False
    runs_decodes = False

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        self.parts, self._memory = parts, memory
        self._captured: dict[Kind, _Captured] = {}
        self._sizes: list[int] = []  # of them, ascending
        self._logits: Tensor | None = None

    @property
    def name(self) -> str:
        """For people, and other ranks."""
        return type(self).__name__

    @property
    def kinds(self) -> set[Kind]:
        return set(self._captured)

    def keep(self, kinds: set[Kind]) -> None:
        """Forgets all other graphs."""
        self._captured = {kind: found for kind, found in self._captured.items() if kind in kinds}
        self._sizes = sorted({kind.size for kind in self._captured})

    def _size(self, wanted: int) -> int | None:
        place = bisect_left(self._sizes, wanted)
        return self._sizes[place] if place < len(self._sizes) else None

    def _capture(
        self, kind: Kind, step: StepInputs, rows: Tensor | None, sampled: Tensor | None = None
    ) -> None:
        """Captures an uploaded step; the kind that samples most must be the first.

        Args:
            rows: of each sampled token; None: each chunk samples.
            sampled: indices of the tokens whose logits are sampled; None: all.
        """
        parts, model = self.parts, self.parts.model
        entered = parts.entered.part(step.num_tokens, len(step.seq_lens))
        metadata = parts.metadata(step, entered)
        metadata.fused = kind.fused
        if not kind.fused:
            metadata.plan = parts.backend.plan(metadata, captured=True)

        def run() -> tuple[Tensor, Tensor]:
            hidden = parts.forward(step, sampled, metadata)
            if self._logits is None:
                self._logits = torch.empty_like(model.logits(hidden))
            logits = model.logits(hidden, out=self._logits[: len(hidden)])
            token_ids = model.ops.greedy(logits)
            sampling = entered.rows if rows is None else rows
            parts.state.rows.last_tokens.index_copy_(0, sampling, token_ids.clamp(min=0))
            return logits, token_ids

        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), model.ops.table.for_graph():
            run()  # libraries allocate and choose kernels at the first call
            if kind.fused and not self._is_fused(step):
                return  # the fused kernel has just failed
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that the graph's pool can have the memory
            with (
                model.ops.table.capturing() as calls,
                launches.captured_graph(self._memory.pool) as graph,
            ):
                logits, token_ids = run()
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()  # the first one takes longer
        self._captured[kind] = _Captured(graph, metadata, logits, token_ids, calls)
        self._sizes = sorted({kind.size for kind in self._captured})

    def _replay(self, kind: Kind) -> tuple[Tensor, Tensor]:
        captured = self._captured[kind]
        captured.graph.replay()
        captured.calls.num_replays += 1
        return captured.logits, captured.token_ids

    def _is_fused(self, step: StepInputs) -> bool:
        """Whether attention is part of a fused operation."""
        longest = self.parts.model.ops.max_fused_context(step.num_decodes)
        return int(step.seq_lens.max()) <= longest


class DecodeGraphs(_GraphSet):
    """Steps of decodes alone."""

    runs_decodes = True

    def __init__(self, parts: StepParts, memory: GraphMemory, scratch: StepInputs) -> None:
        super().__init__(parts, memory)
        self._scratch = scratch
        # Of a size, as of the first step after warm-up: the longest context of the fused kernel,
        # and whether the plan of any other reads block tables.
        self._choices: dict[int, tuple[int, bool]] = {}

    def pad(self, step: StepInputs) -> bool:
        count = len(step.seq_lens)
        if step.num_decodes != count or len(step.samples) != count or step.images:
            return False
        if (size := self._size(count)) is None:
            return False
        pad_decodes(step, size, self._scratch)
        if size not in self._choices:
            backend, ops = self.parts.backend, self.parts.model.ops
            self._choices[size] = ops.max_fused_context(size), backend.plans_from_blocks(size)
        longest, plans = self._choices[size]
        step.is_fused = longest > 0 and int(step.seq_lens.max()) <= longest
        step.plans_from_blocks = plans and not step.is_fused
        return True

    def capture(self, step: StepInputs) -> None:
        """Captures a padded step; the largest must be the first."""
        parts, size = self.parts, step.num_decodes
        parts.staging.upload()
        kinds = [Kind(size)]
        if self._is_fused(step):
            kinds.append(Kind(size, fused=True))
        for kind in kinds:
            self._capture(kind, step, None)

    def replay(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        kind = Kind(step.num_decodes, step.is_fused)
        if step.plans_from_blocks:  # else nothing of a plan is read when the graph runs
            metadata = self._captured[kind].metadata
            metadata.cu_query_lens, metadata.seq_lens = step.cu_query_lens, step.seq_lens
            metadata.first_blocks = step.first_blocks
            self.parts.backend.plan(metadata, captured=True)
        return self._replay(kind)


class _ChunkGraphs(_GraphSet):
    """Steps with chunks of prompts, with or without images."""

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        super().__init__(parts, memory)
        self.masks_images = parts.images is not None

    def capture(self, step: StepInputs) -> None:
        """Captures a padded step; the largest must be the first."""
        parts = self.parts
        parts.staging.upload()
        assert step.places.sampled_rows is not None and step.places.sampled_tokens is not None
        rows = parts.staging.device(step.places.sampled_rows)
        sampled = parts.staging.device(step.places.sampled_tokens)
        self._capture(Kind(step.num_tokens), step, rows, sampled)

    def replay(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Runs an uploaded step. The attention's work list is staged, so no plan is made."""
        if step.images and self.parts.images is not None:
            self.parts.images.read(step.images)
        return self._replay(Kind(step.num_tokens))

    def _is_faster(self, step: StepInputs) -> bool:
        """Whether its images can be read, and a graph is the faster way to run its chunks."""
        if step.images and self.parts.images is None:
            return False
        return self.parts.backend.captures_chunks(step)


class PromptGraphs(_ChunkGraphs):
    """Steps of one chunk alone."""

    def pad(self, step: StepInputs) -> bool:
        if len(step.seq_lens) != 1 or step.num_decodes or not self._is_faster(step):
            return False
        size = self._size(step.tokens.shape[1])
        if size:  # it samples, as every captured step does: before a prompt's end nobody reads it
            step.num_tokens, step.samples = size, np.zeros(1, np.int64)
        return size is not None


class MixedGraphs(_ChunkGraphs):
    """Steps of any chunks, and perhaps decodes before them."""

    def __init__(self, parts: StepParts, memory: GraphMemory, scratch: StepInputs) -> None:
        super().__init__(parts, memory)
        self._scratch = scratch
        self._decodes = min(MAX_CAPTURED_DECODES, len(parts.state.rows.lengths) - 1)

    def scratch(self, num_tokens: int) -> StepInputs:
        """A step of `num_tokens` tokens to capture, more than the most decodes."""
        lengths = [1] * (self._decodes - 1) + [num_tokens - self._decodes + 1]
        row, max_blocks = (size - 1 for size in self.parts.state.rows.blocks.shape)
        return self._padded(StepInputs.scratch(lengths, row, max_blocks + 1), num_tokens)

    def pad(self, step: StepInputs) -> bool:
        if len(step.seq_lens) - step.num_decodes > MAX_CAPTURED_CHUNKS:
            return False
        if max(step.num_decodes, len(step.samples)) > self._decodes:
            return False
        size = self._size(step.tokens.shape[1]) if self._is_faster(step) else None
        if size:
            self._padded(step, size)
        return size is not None

    def _padded(self, step: StepInputs, num_tokens: int) -> StepInputs:
        return pad_mixed(step, num_tokens, self._decodes, MAX_CAPTURED_CHUNKS, self._scratch)


Graphs = DecodeGraphs | PromptGraphs | MixedGraphs
