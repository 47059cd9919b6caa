"""The arrays of a step: laid out and padded on the host, and uploaded at once.

On the device, `enter_step` makes the model's inputs of the arrays. `StepComputer` and the CUDA
graphs use this module. Nothing here waits for the device or knows a sequence: all lengths come from
the `ComputeStep`, and block tables are on the device (`kernels.rows`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.linear_attention.draft_runs import run_table
from kernels.linear_attention.states import prefill_pieces
from kernels.rows import MAX_CHANGING_CHUNKS, DeviceRows, OfChunk, OfToken
from services.decoder.engine.run.images import ImageRun
from services.decoder.engine.run.staging import Staged, Staging
from services.decoder.engine.step import ComputeStep, Int32Array

IntArray = npt.NDArray[np.int64]
# Changes of a tensor with one part per row: indices in the flat tensor, and the values there.
Updates = tuple[IntArray, Int32Array]
NO_UPDATES: Updates = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(slots=True)
class Places:
    """The places of a step's arrays in the staging buffer.

    The places are reserved in a fixed order and before anything else, so that steps with equal
    numbers of tokens and chunks have their arrays at equal places. A CUDA graph reads the arrays
    from the places where they were when the graph was captured.

    Attributes:
        tokens: `[6, T]` int32, see `kernels.rows.OfToken`.
        chunks: `[4, S]` int32, see `kernels.rows.OfChunk`.
        sampled_rows: `[B]` int64, rows of the samples. None if each chunk samples.
        sampled_tokens: `[n]` int64, indices of the tokens that are sampled, and then padding, which
            steps without a graph have only beside graphs of others. None if each chunk samples.
        work: work list of attention, see `AttentionBackend.list_work`. None if there is no list.
        visual_mask: `[T]` int32, not 0 at image tokens. None if no token can be an image token.
        cu_query_lens: `[S + 1]` int32. None if the model has no recurrent states.
        runs: `[3, D]` int32, runs of the D decodes, see `draft_runs.run_table`. None if rows keep
            no inputs of drafts.
        pieces: `[W, 2]` int32, pieces of chunks of linear attention. None if there are no chunks.
        saves: `[T]` int32, slot that takes the recurrent state after each token, or -1. None if
            there are no chunks.
        adapters: `[num_tokens]` int64, slot of each token's adapter, -1 for none. None if no token
            has an adapter.
        draft_tokens, draft_chunks, draft_groups, draft_saves: arrays for the layer for multi-token
            prediction, see `DraftArrays`, and places and slots `[2, C]` int64 of the
            saved states. None if there is no such layer, or if no state is saved.
        amends: `[2, 2 * D]` int64, elements of the buffer that take the ids of D drafts, and
            indices of these ids among the drafts of the step before. None if the host knows all
            drafts.
        updates: places of indices and values of the changes of block tables, and of position
            deltas. None for a kind without changes.
    """

    tokens: Staged
    chunks: Staged
    sampled_rows: Staged | None = None
    sampled_tokens: Staged | None = None
    work: Staged | None = None
    visual_mask: Staged | None = None
    cu_query_lens: Staged | None = None
    runs: Staged | None = None
    pieces: Staged | None = None
    saves: Staged | None = None
    adapters: Staged | None = None
    draft_tokens: Staged | None = None
    draft_chunks: Staged | None = None
    draft_groups: Staged | None = None
    draft_saves: Staged | None = None
    amends: Staged | None = None
    updates: Sequence[tuple[Staged, Staged] | None] = (None, None)


@dataclass(frozen=True, slots=True)
class DraftArrays:
    """The arrays of a step for the layer for multi-token prediction, laid out by `draft_inputs`.

    The step has T tokens in S chunks, padding included, and samples tokens of G rows.

    Attributes:
        tokens: `[2, T]` int32, see `draft_inputs.OfDraftToken`.
        chunks: `[2, S]` int32, see `draft_inputs.OfDraftChunk`.
        groups: `[4 + max_drafts, G]` int32, see `draft_inputs.OfDraftGroup`.
        amends: `[2, D]` int64, flat indices in `groups` of the drafts of the step's
            `draft_sources`, and flat indices of their ids among the drafts of the step before. None
            if there are none.
    """

    tokens: Int32Array
    chunks: Int32Array
    groups: Int32Array
    amends: IntArray | None = None


class StepGraphs(Protocol):
    """Captured graphs that can run a step; implemented by the classes of `graphs`."""

    def replay(self, step: "StepInputs") -> tuple[Tensor, Tensor]:
        """Runs an uploaded step, and returns logits `[n, vocab_size]` and greedy tokens `[n]`."""
        ...


@dataclass(slots=True)
class StepInputs:
    """The arrays of a step on the host: T tokens in S chunks.

    Padding tokens are added when the arrays are staged. They have id 0 at position 0, their keys
    and values are not stored, and no token attends to them.

    Attributes:
        num_tokens: number of tokens with padding, at least T.
        num_decodes: number of leading chunks of one token.
        tokens: `[6, T]`, see `kernels.rows.OfToken`.
        chunks: `[4, S]`, see `kernels.rows.OfChunk`.
        cu_query_lens: `[S + 1]`, prefix sums of the chunks' numbers of tokens.
        seq_lens: `[S]`, context of each chunk's sequence after the step.
        first_blocks: `[S]`, index of each sequence's first block in the flat block tables.
        samples: `[B]`, indices of the chunks that sample.
        images: runs of image tokens.
        state_saves, has_drafts, draft_sources: see `ComputeStep`.
        folds: numbers of `ComputeStep.folds` by index of the chunk.
        adapters: `[T]`, slot of each token's adapter, -1 for none. None if no token has an adapter.
            A step that is captured, or that warms kernels up, has no adapter in it and serves any.
        block_updates: changes of the flat block tables before the step runs.
        position_deltas: changes of the rows' position deltas before the step runs.
        places: places in the staging buffer, set by `stage`.
        graphs: graphs that run the step. None if the step runs eagerly.
        is_fused: True if attention is part of a fused operation, see `AttentionMetadata`.
        plans_from_blocks: True if attention's plan reads block tables before the graph runs.
    """

    num_tokens: int
    num_decodes: int
    tokens: Int32Array
    chunks: Int32Array
    cu_query_lens: Int32Array
    seq_lens: Int32Array
    first_blocks: Int32Array
    samples: IntArray
    images: list[ImageRun]
    state_saves: IntArray | None = None
    has_drafts: bool = False
    draft_sources: IntArray | None = None
    folds: dict[int, int] = field(default_factory=dict[int, int])
    adapters: IntArray | None = None
    block_updates: Updates = NO_UPDATES
    position_deltas: Updates = NO_UPDATES
    places: Places = field(init=False)
    graphs: StepGraphs | None = None
    is_fused: bool = False
    plans_from_blocks: bool = False

    @property
    def is_adapted(self) -> bool:
        """Returns whether tokens may have adapters."""
        return self.adapters is not None

    def for_adapters(self) -> "StepInputs":
        """Marks a step of meaningless sequences as one that serves any adapters; returns it."""
        self.adapters = np.full(self.tokens.shape[1], -1)
        return self

    @staticmethod
    def scratch(
        lengths: list[int], scratch_row: int, max_blocks: int, num_cached: int = 0
    ) -> "StepInputs":
        """Returns a step of meaningless sequences, all of them in the scratch row.

        Args:
            lengths: number of tokens of each sequence.
            scratch_row: number of the scratch row.
            max_blocks: number of blocks of a row.
            num_cached: number of cached tokens before those of each sequence.
        """
        count, zeros = len(lengths), np.zeros(sum(lengths), np.int32)
        rows, starts = np.full(count, scratch_row), np.full(count, num_cached, np.int64)
        step = ComputeStep(rows, starts, np.array(lengths), 0, np.arange(count), zeros)
        step.positions = np.stack((zeros, zeros, zeros))
        inputs = _chunks(step, max_blocks)
        inputs.tokens[OfToken.ROW], inputs.tokens[OfToken.INDEX] = -1, 0
        return inputs


def lay_out(step: ComputeStep, max_blocks: int) -> StepInputs:
    """Lays out the arrays of a step whose rows have `max_blocks` blocks each."""
    alone = step.num_from_device == len(step.rows)
    inputs = (_decodes_from_device if alone else _chunks)(step, max_blocks)
    if step.adapters is not None:
        inputs.adapters = step.adapters.repeat(step.lengths)
    if len(step.block_updates):
        rows, starts, counts = step.block_updates.T
        places = rows * max_blocks + starts
        if (counts != 1).any():
            within = np.arange(len(step.block_ids)) - (counts.cumsum() - counts).repeat(counts)
            places = places.repeat(counts) + within
        inputs.block_updates = places, step.block_ids
    if step.row_starts:
        starting = [start.row for start in step.row_starts]
        values = [start.position_delta for start in step.row_starts]
        inputs.position_deltas = np.array(starting, np.int64), np.array(values, np.int32)
    return inputs


def _chunks(step: ComputeStep, max_blocks: int) -> StepInputs:
    """Lays out any step, in plain Python per chunk, as `Batch.to_step` does."""
    fed, lengths = step.num_from_device, step.lengths.tolist()
    *firsts, num_tokens = accumulate(lengths, initial=0)
    tokens = np.zeros((OfToken.COUNT, num_tokens), np.int32)
    tokens[OfToken.ID, fed:] = step.token_ids
    tokens[OfToken.POSITION :, fed:] = step.positions
    if len(lengths) == 1:
        tokens[OfToken.ROW] = step.rows[0]
        tokens[OfToken.INDEX] = np.arange(step.starts[0], step.starts[0] + num_tokens)
    elif len(lengths) == num_tokens:
        tokens[OfToken.ROW], tokens[OfToken.INDEX] = step.rows, step.starts
    else:
        tokens[OfToken.ROW] = step.rows.repeat(step.lengths)
        tokens[OfToken.INDEX] = np.arange(num_tokens) + (step.starts - firsts).repeat(step.lengths)
    chunks = np.empty((OfChunk.COUNT, len(lengths)), np.int32)
    chunks[OfChunk.ROW], chunks[OfChunk.PLACE] = step.rows, -1
    chunks[OfChunk.END] = seq_lens = (step.starts + step.lengths).astype(np.int32)
    if fed:
        tokens[OfToken.INDEX, :fed] = chunks[OfChunk.END, :fed] = -1
    return StepInputs(
        num_tokens=num_tokens,
        num_decodes=_leading_ones(lengths),
        tokens=tokens,
        chunks=chunks,
        cu_query_lens=np.array([*firsts, num_tokens], np.int32),
        seq_lens=seq_lens,
        first_blocks=chunks[OfChunk.ROW] * max_blocks,
        samples=step.samples,
        images=[ImageRun(*run) for run in step.images.tolist()],
        state_saves=step.state_saves,
        has_drafts=step.has_drafts,
        draft_sources=step.draft_sources,
        folds={} if step.folds is None else dict(step.folds.tolist()),
    )


def _decodes_from_device(step: ComputeStep, max_blocks: int) -> StepInputs:
    """Lays out decodes from the device alone, the most frequent step, in half the time."""
    count = len(step.rows)
    tokens = np.zeros((OfToken.COUNT, count), np.int32)
    chunks = np.empty((OfChunk.COUNT, count), np.int32)
    tokens[OfToken.ROW] = chunks[OfChunk.ROW] = step.rows
    tokens[OfToken.INDEX] = chunks[OfChunk.END : OfChunk.PLACE + 1] = -1
    return StepInputs(
        num_tokens=count,
        num_decodes=count,
        tokens=tokens,
        chunks=chunks,
        cu_query_lens=np.arange(count + 1, dtype=np.int32),
        seq_lens=(step.starts + 1).astype(np.int32),
        first_blocks=chunks[OfChunk.ROW] * max_blocks,
        samples=step.samples,
        images=[],
    )


def _leading_ones(lengths: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda length: length == 1, lengths))


def stage(
    step: StepInputs,
    staging: Staging,
    *,
    work: Int32Array | None,
    masked: bool,
    with_states: bool = False,
    with_runs: bool = False,
    decodes: bool = False,
    num_samples: int = 0,
    drafts: DraftArrays | None = None,
) -> StepInputs:
    """Copies a step's arrays into the staging buffer, and returns the step with its places.

    Args:
        step: the arrays of a step, padded if a graph runs the step.
        staging: the staging buffer, in which the step has begun.
        work: work list of attention. None if there is no list.
        masked: True if the step has a mask of its visual tokens.
        with_states: True if the model has recurrent states.
        with_runs: True if rows keep the inputs of drafts.
        decodes: True if a graph of decodes alone runs the step. The graph changes block tables
            itself, unless attention's plan reads them before.
        num_samples: number to which `Places.sampled_tokens` is padded with the index 0. Without
            effect if the step has as many samples, or more.
        drafts: arrays for the layer for multi-token prediction. None if there is no such layer.
    """
    num_tokens, num_chunks = step.num_tokens, len(step.seq_lens)
    blocks = step.block_updates
    in_graph = decodes and not step.plans_from_blocks
    if in_graph and len(blocks[0]) <= num_chunks <= MAX_CHANGING_CHUNKS:
        places, block_ids = blocks
        step.chunks[OfChunk.PLACE, : len(places)], blocks = places, NO_UPDATES
        step.chunks[OfChunk.BLOCK, : len(places)] = block_ids
    tokens, chunks = staging.add(step.tokens, size=num_tokens), staging.add(step.chunks)
    if num_tokens > step.tokens.shape[1]:
        staging.host(tokens)[OfToken.ROW, step.tokens.shape[1] :] = -1
    found = step.places = Places(tokens, chunks)
    if drafts is not None:
        found.draft_tokens, found.draft_chunks = map(staging.add, (drafts.tokens, drafts.chunks))
    if not decodes:
        all_rows = step.chunks[OfChunk.ROW].astype(np.int64)
        last_tokens = step.cu_query_lens[1:].astype(np.int64) - 1
        if len(step.samples) < num_chunks:  # otherwise, all chunks sample in their order
            all_rows, last_tokens = all_rows[step.samples], last_tokens[step.samples]
        found.sampled_rows = staging.add(all_rows, min_elements=num_chunks)
        num_samples = max(num_samples, len(last_tokens))
        found.sampled_tokens = staging.add(last_tokens, min_elements=num_chunks, size=num_samples)
    if work is not None:
        found.work = staging.add(work)
    if masked:
        found.visual_mask = _stage_visual_mask(step, staging)
    if with_states:
        found.cu_query_lens = staging.add(step.cu_query_lens)
        if with_runs:
            rows, decodes_only = step.chunks[OfChunk.ROW], slice(step.num_decodes)
            table = run_table(rows[decodes_only], step.seq_lens[decodes_only], step.folds)
            found.runs = staging.add(table)
        if step.num_decodes < num_chunks:
            pieces = prefill_pieces(step.cu_query_lens, step.num_decodes, num_tokens)
            found.pieces, found.saves = staging.add(pieces), _stage_saves(step, staging)
    if step.adapters is not None:
        slots = np.full(num_tokens, -1)
        slots[: len(step.adapters)] = step.adapters
        found.adapters = staging.add(slots)
    if drafts is not None:  # No graph of the step reads these.
        found.draft_groups = staging.add(drafts.groups)
        if step.draft_sources is not None and drafts.amends is not None:
            ids = tokens.element + OfToken.ID * num_tokens + step.draft_sources[:, 0]
            of_groups, sources = drafts.amends
            amends = np.empty((2, 2, len(ids)), np.int64)
            amends[0], amends[1] = (ids, found.draft_groups.element + of_groups), sources
            found.amends = staging.add(amends.reshape(2, -1))
        if step.state_saves is not None and len(step.state_saves):
            found.draft_saves = staging.add(np.ascontiguousarray(step.state_saves.T, np.int64))
    found.updates = [
        (staging.add(places), staging.add(values)) if len(places) else None
        for places, values in (blocks, step.position_deltas)
    ]
    return step


def _stage_saves(step: StepInputs, staging: Staging) -> Staged:
    """Stages the slot that takes the state after each token, `[num_tokens]`, -1 without a slot."""
    saves = np.full(step.num_tokens, -1, np.int32)
    if step.state_saves is not None:
        saves[step.state_saves[:, 0]] = step.state_saves[:, 1]
    return staging.add(saves)


def _stage_visual_mask(step: StepInputs, staging: Staging) -> Staged:
    """Stages the mask `[num_tokens]` of image tokens."""
    mask = np.zeros(step.num_tokens, np.int32)
    for part in step.images:
        mask[part.row : part.row + part.num_rows] = 1
    return staging.add(mask)


def update_rows(step: StepInputs, staging: Staging, rows: DeviceRows) -> None:
    """Changes rows as an uploaded step says, except for changes that its graph makes."""
    blocks, position_deltas = step.places.updates
    if blocks is not None:
        rows.blocks.view(-1).index_copy_(0, *map(staging.device, blocks))
    if position_deltas is not None:
        rows.position_deltas.index_copy_(0, *map(staging.device, position_deltas))
