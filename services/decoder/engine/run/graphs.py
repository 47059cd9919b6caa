"""CUDA graphs of steps.

Decodes are captured for several batch sizes, lone prompts for several lengths, and all other steps
for several numbers of tokens. Chunks behind long contexts have graphs of their own. A step is
padded to the next captured size.

A graph reads its inputs from the device side of the staging buffer. All graphs of a class of steps
write logits to the same buffer. All graphs share a memory pool, because they run one at a time.
`StepComputer` captures the graphs at warm-up and replays them. A step that fits no graph runs
eagerly.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import launches
from kernels.linear_attention.draft_runs import KeptInputs, StepRuns
from kernels.linear_attention.states import StateCache, StateLayout
from kernels.rows import DeviceRows, EnteredStep, OfChunk, OfToken, StepEntry
from kernels.tuning import (
    MAX_CAPTURED_CHUNKS,
    MAX_CAPTURED_DECODES,
    MOST_CAPTURED_DECODES,
)
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.dispatch import CapturedCalls
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.engine.run.draft_inputs import DraftEntry
from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.models.transformer import Transformer


def pad_decodes(step: StepInputs, num_chunks: int, scratch: StepInputs) -> StepInputs:
    """Pads a step of decodes to a captured size, in place, and returns the step.

    Args:
        step: a step of decodes alone.
        num_chunks: number of decodes after padding.
        scratch: the result of `StepInputs.scratch` for at least as many decodes. Padding is taken
            from it and has one token of context in the scratch block.
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
    """Pads a step of decodes and chunks to a captured size, in place, and returns the step.

    Padding chunks have no context. Tokens stay contiguous, decodes first, so the padding tokens are
    the last tokens. `num_decodes` tokens are sampled: those that the step samples, and then the
    last token repeatedly, for the scratch row.

    Args:
        step: a step with chunks.
        num_tokens: number of tokens after padding.
        num_decodes: number of decodes after padding.
        num_chunks: number of other chunks after padding, without the chunk that is always padding.
        scratch: the result of `StepInputs.scratch`, whose first row is the scratch row.
    """
    decodes, count = step.num_decodes, len(step.seq_lens)
    used, end = step.tokens.shape[1], num_decodes + count - decodes
    total = num_decodes + num_chunks + 1  # the last chunk is always padding
    seq_lens = np.zeros(total, np.int32)
    first_blocks = np.full(total, scratch.first_blocks[0])
    chunks = np.zeros((OfChunk.COUNT, total), np.int32)
    chunks[OfChunk.PLACE] = -1
    chunks[OfChunk.ROW] = scratch.chunks[OfChunk.ROW, 0]
    cu_query_lens = np.full(total + 1, used, np.int32)
    for target, source in (
        (seq_lens, step.seq_lens),
        (first_blocks, step.first_blocks),
        (chunks, step.chunks),
    ):
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
    """Tensors that stay on the device between steps.

    Attributes:
        kv_cache: `[num_layers, num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`. The last
            block is scratch.
        states: recurrent states of the rows. None if the model has no linear attention.
        checkpoints: recurrent states at block boundaries. None if there are no slots for them.
        kept: inputs of each row's last drafts. None if the model has no linear attention, or if
            sequences have no drafts.
        rows: tables of the rows. The last row is scratch, for padding.
    """

    kv_cache: Tensor
    states: StateCache | None
    checkpoints: StateCache | None
    rows: DeviceRows
    kept: KeptInputs | None = None


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that run a step, eagerly or in a graph.

    Attributes:
        model: the language model.
        backend: implementation of paged attention.
        images: reader of image embeddings. None if there is no arena.
        state: tensors that stay on the device between steps.
        entered: memory for the model's inputs of a step.
        staging: buffer with the uploaded arrays of a step.
        drafter: the user of the model's layer for multi-token prediction. None if there is none.
    """

    model: Transformer
    backend: AttentionBackend
    images: ImageReader | None
    state: DeviceState
    entered: EnteredStep
    staging: Staging
    drafter: Drafter | None = None

    def metadata(self, step: StepInputs, entered: EnteredStep) -> AttentionMetadata:
        """Returns the layout of an uploaded step, without a plan.

        The layout of a captured step serves all steps that are padded to the same size, because
        their arrays are at the same places on the device.

        Args:
            step: the uploaded step.
            entered: the model's inputs of the step.
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
                kept=state.kept,
            )
            # A graph serves steps with and without drafts, and steps that follow drafts.
            has_runs = step.has_drafts or step.folds or step.graphs is not None
            if places.runs is not None and has_runs:
                decodes = slice(step.num_decodes)
                metadata.states.runs = StepRuns(
                    device(places.runs),
                    step.chunks[OfChunk.ROW, decodes],
                    step.seq_lens[decodes],
                    step.folds,
                )
        return metadata

    def forward(
        self,
        step: StepInputs,
        rows: Tensor | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """Runs the layers of an uploaded step, and returns hidden states.

        Args:
            step: the uploaded step. Its images were read, or are read concurrently.
            rows: tokens whose hidden states are returned, see `Transformer.forward`.
            metadata: planned layout of the step. None if the layout is made and planned now.
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
        inputs = entered.input_ids, entered.positions, state.kv_cache, metadata, visual
        adapters = self.adapters(step)
        if adapters is not None:
            adapters = self.model.ops.group_adapters(adapters)  # once for all layers
        if self.drafter is None:
            return self.model.forward(*inputs, rows, adapters)
        hidden = self.model.forward(*inputs, None, adapters)
        self.drafter.observe(self._draft_entry(step), entered, hidden, visual)
        return hidden if rows is None else hidden[rows]

    def _draft_entry(self, step: StepInputs) -> DraftEntry:
        """Returns the arrays of an uploaded step for the layer for multi-token prediction."""
        places, device = step.places, self.staging.device
        assert places.draft_tokens is not None and places.draft_chunks is not None
        return DraftEntry(
            rows=device(places.tokens)[OfToken.ROW],
            tokens=device(places.draft_tokens),
            chunks=device(places.draft_chunks),
            keeps=step.num_decodes < len(step.seq_lens),
        )

    def adapters(self, step: StepInputs) -> AdapterRows | None:
        """Returns the adapters of an uploaded step's tokens. None if no token has one.

        A captured step, or one that only warms up, serves any adapters.
        """
        if step.adapters is None or self.model.adapters is None:
            return None
        assert step.places.adapters is not None
        slots, present = self.staging.device(step.places.adapters), np.unique(step.adapters)
        is_any = step.graphs is not None or present.max() < 0
        return self.model.adapters.rows(slots, None if is_any else present[present >= 0].tolist())


class GraphMemory:
    """The memory pool of all graphs, and the stream on which they are captured.

    The memory that torch's allocator caches for the graphs belongs to this stream.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


@dataclass(slots=True)
class _Captured:
    """A captured graph, with its outputs.

    Attributes:
        graph: the graph.
        metadata: layout with the lengths of the step that was planned last.
        logits: `[n, vocab_size]`.
        token_ids: `[n]` int32, the most likely tokens.
        calls: calls of kernels within the graph.
    """

    graph: torch.cuda.CUDAGraph
    metadata: AttentionMetadata
    logits: Tensor
    token_ids: Tensor
    calls: CapturedCalls


class Kind(NamedTuple):
    """The kind of steps that a graph is captured for.

    Attributes:
        size: number of sequences of decode steps, number of tokens of other steps.
        fused: True if attention is part of a fused operation, see `AttentionMetadata`.
        adapted: True if tokens may have adapters.
    """

    size: int
    fused: bool = False
    adapted: bool = False


class _GraphSet:
    """The captured graphs of one class of steps, by kind.

    A subclass has four methods:

    - `scratch` makes a step of a size to capture.
    - `capture` captures a padded step.
    - `pad` pads a step in place to a captured size. It returns False if the step must run eagerly.
    - `replay` runs an uploaded step. It returns logits `[n, vocab_size]` and greedy tokens `[n]`: a
      row for each chunk that samples, and then padding. Both are valid until the next replay.

    Args:
        parts: the objects that run a step.
        memory: memory pool and stream of all graphs.

    Attributes:
        masks_images: True if every step has a mask of its visual tokens.
        runs_decodes: True if the steps have decodes alone, each of which samples.
        lists_work: True if attention's chunks read a work list. False if there are none, or if they
            are planned before each replay.
        logits: `[n, vocab_size]`, buffer in which all graphs leave their logits. None before the
            first capture.
    """

    masks_images = False
    runs_decodes = False
    lists_work = True

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        self.parts, self._memory = parts, memory
        self._captured: dict[Kind, _Captured] = {}
        # Sizes of the captured kinds, ascending, of steps without and with adapters.
        self._sizes: dict[bool, list[int]] = {False: [], True: []}
        self.logits: Tensor | None = None

    def scratch_step(self, lengths: list[int]) -> StepInputs:
        """Returns a step of meaningless sequences of these lengths, in the scratch row."""
        num_rows, max_blocks = self.parts.state.rows.blocks.shape
        return StepInputs.scratch(lengths, num_rows - 1, max_blocks)

    @property
    def name(self) -> str:
        """Name of the class of steps, in logs and between ranks."""
        return type(self).__name__

    @property
    def kinds(self) -> set[Kind]:
        """The captured kinds."""
        return set(self._captured)

    def keep(self, kinds: set[Kind]) -> None:
        """Drops the graphs of all other kinds."""
        self._captured = {kind: found for kind, found in self._captured.items() if kind in kinds}
        self._note_sizes()

    def _note_sizes(self) -> None:
        for adapted in self._sizes:
            sizes = {kind.size for kind in self._captured if kind.adapted == adapted}
            self._sizes[adapted] = sorted(sizes)

    def _size(self, least: int, step: StepInputs) -> int | None:
        """Returns the smallest size that is captured for such a step, and at least `least`.

        Returns None if there is no such size.
        """
        sizes = self._sizes[step.is_adapted]
        place = bisect_left(sizes, least)
        return sizes[place] if place < len(sizes) else None

    def _capture(
        self, kind: Kind, step: StepInputs, rows: Tensor | None, sampled: Tensor | None = None
    ) -> None:
        """Captures an uploaded step; the kind that samples most has to be captured first.

        Args:
            kind: the kind that the graph is captured for.
            step: the uploaded and padded step.
            rows: `[n]` int64, row of each sampled token. None if each chunk samples.
            sampled: `[n]` int64, indices of the tokens that are sampled. None for all tokens.
        """
        parts, model = self.parts, self.parts.model
        entered = parts.entered.part(step.num_tokens, len(step.seq_lens))
        metadata = parts.metadata(step, entered)
        metadata.fused = kind.fused
        if not kind.fused:
            metadata.plan = parts.backend.plan(metadata, captured=True)

        def run() -> tuple[Tensor, Tensor]:
            hidden = parts.forward(step, sampled, metadata)
            if self.logits is None:
                self.logits = torch.empty_like(model.logits(hidden))
            logits = model.logits(hidden, out=self.logits[: len(hidden)])
            token_ids = model.ops.greedy(logits)
            sampling = entered.rows if rows is None else rows
            parts.state.rows.last_tokens.index_copy_(0, sampling, token_ids.clamp(min=0))
            return logits, token_ids

        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), model.ops.table.for_graph():
            run()  # libraries allocate and choose kernels at the first call
            if kind.fused and not self._is_fused(step):
                return  # the fused kernel has just failed and was dropped
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that the graph's pool can have the memory
            with (
                model.ops.table.capturing() as calls,
                launches.captured_graph(self._memory.pool) as graph,
            ):
                logits, token_ids = run()
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()  # the first replay takes longer
        self._add(kind, _Captured(graph, metadata, logits, token_ids, calls))

    def _add(self, kind: Kind, captured: _Captured) -> None:
        self._captured[kind] = captured
        self._note_sizes()

    def _replay(self, kind: Kind) -> tuple[Tensor, Tensor]:
        captured = self._captured[kind]
        captured.graph.replay()
        captured.calls.num_replays += 1
        return captured.logits, captured.token_ids

    def _plan(self, kind: Kind, step: StepInputs) -> None:
        """Plans attention of an uploaded step, which the graph of the kind runs next."""
        metadata = self._captured[kind].metadata
        metadata.cu_query_lens, metadata.seq_lens = step.cu_query_lens, step.seq_lens
        metadata.first_blocks = step.first_blocks
        self.parts.backend.plan(metadata, captured=True)

    def _is_fused(self, step: StepInputs) -> bool:
        """Returns whether attention is part of a fused operation."""
        longest = self.parts.model.ops.max_fused_context(step.num_decodes)
        return int(step.seq_lens.max()) <= longest


class DecodeGraphs(_GraphSet):
    """Graphs of steps with decodes alone.

    Args:
        parts: the objects that run a step.
        memory: memory pool and stream of all graphs.
    """

    runs_decodes = True
    lists_work = False

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        super().__init__(parts, memory)
        self._padding = self.scratch(len(parts.state.rows.lengths) - 1)
        # By size, from the first step after warm-up on: the longest context of the fused kernel,
        # and whether the plan of the other kernels reads block tables.
        self._choices: dict[int, tuple[int, bool]] = {}

    def scratch(self, size: int) -> StepInputs:
        """Returns a step of `size` decodes to capture."""
        return self.scratch_step([1] * size)

    def pad(self, step: StepInputs) -> bool:
        count = len(step.seq_lens)
        if step.num_decodes != count or len(step.samples) != count or step.images:
            return False
        if (size := self._size(count, step)) is None:
            return False
        pad_decodes(step, size, self._padding)
        if size not in self._choices:
            backend, ops = self.parts.backend, self.parts.model.ops
            self._choices[size] = ops.max_fused_context(size), backend.plans_from_blocks(size)
        longest, plans = self._choices[size]
        # The fused kernel stores a chunk's key while others attend, and a draft attends to those
        # before it in the same step.
        fits = longest > 0 and not step.has_drafts
        step.is_fused = fits and int(step.seq_lens.max()) <= longest
        step.plans_from_blocks = plans and not step.is_fused
        return True

    def capture(self, step: StepInputs) -> None:
        """Captures a padded step; the largest step has to be captured first."""
        parts, size = self.parts, step.num_decodes
        parts.staging.upload()
        kinds = [Kind(size, adapted=step.is_adapted)]
        if self._is_fused(step):
            kinds.append(Kind(size, fused=True, adapted=step.is_adapted))
        for kind in kinds:
            self._capture(kind, step, None)

    def replay(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        kind = Kind(step.num_decodes, step.is_fused, step.is_adapted)
        if step.plans_from_blocks:  # otherwise, the graph reads nothing of a plan
            self._plan(kind, step)
        return self._replay(kind)


class _ChunkGraphs(_GraphSet):
    """Graphs of steps with chunks of prompts, with or without images."""

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        super().__init__(parts, memory)
        self.masks_images = parts.images is not None

    def capture(self, step: StepInputs) -> None:
        """Captures a padded step; the largest step has to be captured first."""
        parts = self.parts
        parts.staging.upload()
        assert step.places.sampled_rows is not None and step.places.sampled_tokens is not None
        rows = parts.staging.device(step.places.sampled_rows)
        sampled = parts.staging.device(step.places.sampled_tokens)
        kind = Kind(step.num_tokens, adapted=step.is_adapted)
        self._capture(kind, step, rows, sampled)

    def replay(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Runs an uploaded step. It needs no plan if its work list for attention is staged."""
        kind = Kind(step.num_tokens, adapted=step.is_adapted)
        if not self.lists_work:
            self._plan(kind, step)
        if step.images and self.parts.images is not None:
            self.parts.images.read(step.images)
        return self._replay(kind)

    def _is_faster(self, step: StepInputs) -> bool:
        """Returns whether a graph can read the step's images and is faster for its chunks."""
        if step.images and self.parts.images is None:
            return False
        return self._captures(step)

    def _captures(self, step: StepInputs) -> bool:
        return self.parts.backend.captures_chunks(step)


class PromptGraphs(_ChunkGraphs):
    """Graphs of steps with one chunk alone."""

    def scratch(self, size: int) -> StepInputs:
        """Returns a step of one chunk of `size` tokens to capture."""
        return self.scratch_step([size])

    def pad(self, step: StepInputs) -> bool:
        if len(step.seq_lens) != 1 or step.num_decodes or not self._is_faster(step):
            return False
        size = self._size(step.tokens.shape[1], step)
        if size:  # every captured step samples; before the prompt's end the token is not read
            step.num_tokens, step.samples = size, np.zeros(1, np.int64)
        return size is not None


class MixedGraphs(_ChunkGraphs):
    """Graphs of steps with any chunks, and perhaps decodes before them.

    Args:
        parts: the objects that run a step.
        memory: memory pool and stream of all graphs.

    Attributes:
        least, most: the least and the most decodes of a step, or samples if these are more. All
            steps are padded to the most.
    """

    least, most = 0, MAX_CAPTURED_DECODES

    def __init__(self, parts: StepParts, memory: GraphMemory) -> None:
        super().__init__(parts, memory)
        self._padding = self.scratch_step([1])
        self._decodes = min(self.most, len(parts.state.rows.lengths) - 1)

    def scratch(self, size: int) -> StepInputs:
        """Returns a step of `size` tokens to capture, which is more than the most decodes."""
        lengths = [1] * (self._decodes - 1) + [size - self._decodes + 1]
        return self.padded(self.scratch_step(lengths), size)

    def pad(self, step: StepInputs) -> bool:
        if len(step.seq_lens) - step.num_decodes > MAX_CAPTURED_CHUNKS:
            return False
        if not self.least <= max(step.num_decodes, len(step.samples)) <= self._decodes:
            return False
        size = self._size(step.tokens.shape[1], step) if self._is_faster(step) else None
        if size:
            self.padded(step, size)
        return size is not None

    def padded(self, step: StepInputs, num_tokens: int) -> StepInputs:
        """Pads a step in place to `num_tokens` tokens, and returns the step."""
        return pad_mixed(step, num_tokens, self._decodes, MAX_CAPTURED_CHUNKS, self._padding)


class LongGraphs(MixedGraphs):
    """Graphs of mixed steps behind long contexts. FA3 is planned before each replay."""

    lists_work = False

    def _captures(self, step: StepInputs) -> bool:
        return self.parts.backend.captures_long(step)


class CrowdedGraphs(MixedGraphs):
    """Graphs of mixed steps of more decodes than `MixedGraphs` take."""

    least, most = MAX_CAPTURED_DECODES + 1, MOST_CAPTURED_DECODES


Graphs = DecodeGraphs | PromptGraphs | MixedGraphs
