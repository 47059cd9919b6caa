"""A step's arrays, which `enter_step` makes the model's of: laid out and padded on the host,
uploaded at once.

`ModelRunner` and the CUDA graphs use it. Nothing here waits for the device or knows a sequence; all
lengths come from the `ComputeStep`, and blocks are on the device (`kernels.rows`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.linear_attention.states import prefill_pieces
from kernels.rows import MAX_CHANGING_CHUNKS, DeviceRows, OfChunk, OfToken
from services.decoder.engine.run.images import ImageRun
from services.decoder.engine.run.staging import Staged, Staging
from services.decoder.engine.step import ComputeStep, Int32Array

IntArray = npt.NDArray[np.int64]
Updates = tuple[IntArray, Int32Array]  # of a row's tensor: places, and the values there
NO_UPDATES: Updates = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(slots=True)
class Places:
    """Where a step's arrays are in the staging buffer.

    Reserved in one order and before anything else, so that steps with equal numbers of tokens and
    chunks have their arrays at equal places: a CUDA graph reads them where they were when it was
    captured.
    """

    tokens: Staged
    chunks: Staged
    sampled_rows: Staged | None = None  # [B] int64: rows of the table; None: each chunk samples
    sampled_tokens: Staged | None = None  # [B] int64: tokens of the step; None: the same
    work: Staged | None = None  # the attention's, see AttentionBackend.list_work
    visual_mask: Staged | None = None  # [T] int32; None: no token can be an image's
    cu_query_lens: Staged | None = None  # [S + 1] int32, of a model with recurrent states
    pieces: Staged | None = None  # [W, 2] int32, of chunks of such a model
    saves: Staged | None = None  # [T] int32, the same
    # Of block tables, and of position deltas.
    updates: Sequence[tuple[Staged, Staged] | None] = (None, None)


@dataclass(slots=True)
class StepInputs:
    """A step's arrays on the host: T tokens in S chunks.

    Padding tokens are added when the arrays are staged: id 0 at position 0, whose keys and values
    go nowhere and which no token attends to.
    """

    num_tokens: int  # padding included, at least T
    num_decodes: int
    tokens: Int32Array  # [6, T], see kernels.rows
    chunks: Int32Array  # [4, S], the same
    cu_query_lens: Int32Array  # [S + 1]
    seq_lens: Int32Array  # [S]
    first_blocks: Int32Array  # [S]
    samples: IntArray  # [B]: chunks that sample
    images: list[ImageRun]
    state_saves: IntArray | None = None  # see `ComputeStep`
    # What changes of the rows before the step runs: of the block tables, flat; and of the deltas.
    block_updates: Updates = NO_UPDATES
    position_deltas: Updates = NO_UPDATES
    places: Places = field(init=False)  # set by `stage`
    # Set by the graphs that run it, see `engine.graphs`; None: it runs eagerly.
    graphs: Any = None
    is_fused: bool = False  # see AttentionMetadata
    plans_from_blocks: bool = False  # its plan reads block tables, before the graph runs

    @staticmethod
    def scratch(lengths: list[int], scratch_row: int, max_blocks: int) -> "StepInputs":
        """A step of meaningless sequences, all of them in the scratch row."""
        count, zeros = len(lengths), np.zeros(sum(lengths), np.int32)
        rows, starts = np.full(count, scratch_row), np.zeros(count, np.int64)
        step = ComputeStep(rows, starts, np.array(lengths), 0, np.arange(count), zeros)
        step.positions = np.stack((zeros, zeros, zeros))
        inputs = _chunks(step, max_blocks)
        inputs.tokens[OfToken.ROW], inputs.tokens[OfToken.INDEX] = -1, 0
        return inputs


def lay_out(step: ComputeStep, max_blocks: int) -> StepInputs:
    """The inputs of a step; `max_blocks`: of a row."""
    alone = step.num_from_device == len(step.rows)
    inputs = (_decodes_from_device if alone else _chunks)(step, max_blocks)
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
    """`lay_out` of any step. Plain Python per chunk, as in `Batch.to_step`."""
    fed, lengths = step.num_from_device, step.lengths.tolist()
    *firsts, num_tokens = accumulate(lengths, initial=0)
    tokens = np.zeros((OfToken.COUNT, num_tokens), np.int32)
    tokens[OfToken.ID, fed:] = step.token_ids
    tokens[OfToken.POSITION :, fed:] = step.positions
    if len(lengths) == 1:
        tokens[OfToken.ROW] = step.rows[0]
        tokens[OfToken.INDEX] = np.arange(step.starts[0], step.starts[0] + num_tokens)
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
    )


def _decodes_from_device(step: ComputeStep, max_blocks: int) -> StepInputs:
    """`lay_out` of the most frequent kind of step, in half the time."""
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
    decodes: bool = False,
) -> StepInputs:
    """Copies a step's arrays into the staging buffer; returns the step, with its places.

    Args:
        step: laid out, and padded if a graph runs it.
        work: what the attention backend reads besides lengths and blocks, if anything.
        masked: the step has a mask of its visual tokens.
        with_states: the model has recurrent states.
        decodes: a graph of decodes alone runs it, which changes block tables itself, unless its
            plan reads them.
    """
    num_tokens, num_chunks = step.num_tokens, len(step.seq_lens)
    blocks = step.block_updates
    itself = decodes and not step.plans_from_blocks
    if itself and len(blocks[0]) <= num_chunks <= MAX_CHANGING_CHUNKS:
        places, block_ids = blocks
        step.chunks[OfChunk.PLACE, : len(places)], blocks = places, NO_UPDATES
        step.chunks[OfChunk.BLOCK, : len(places)] = block_ids
    tokens, chunks = staging.add(step.tokens, size=num_tokens), staging.add(step.chunks)
    if num_tokens > step.tokens.shape[1]:
        staging.host(tokens)[OfToken.ROW, step.tokens.shape[1] :] = -1
    found = step.places = Places(tokens, chunks)
    if not decodes:
        all_rows = step.chunks[OfChunk.ROW].astype(np.int64)
        last_tokens = step.cu_query_lens[1:].astype(np.int64) - 1
        if len(step.samples) < num_chunks:  # else all chunks sample, in their order
            all_rows, last_tokens = all_rows[step.samples], last_tokens[step.samples]
        found.sampled_rows = staging.add(all_rows, room=num_chunks)
        found.sampled_tokens = staging.add(last_tokens, room=num_chunks)
    if work is not None:
        found.work = staging.add(work)
    if masked:
        found.visual_mask = _stage_visual_mask(step, staging)
    if with_states:
        found.cu_query_lens = staging.add(step.cu_query_lens)
        if step.num_decodes < num_chunks:
            pieces = prefill_pieces(step.cu_query_lens, step.num_decodes, num_tokens)
            found.pieces, found.saves = staging.add(pieces), _stage_saves(step, staging)
    found.updates = [
        (staging.add(places), staging.add(values)) if len(places) else None
        for places, values in (blocks, step.position_deltas)
    ]
    return step


def _stage_saves(step: StepInputs, staging: Staging) -> Staged:
    saves = np.full(step.num_tokens, -1, np.int32)
    if step.state_saves is not None:
        saves[step.state_saves[:, 0]] = step.state_saves[:, 1]
    return staging.add(saves)


def _stage_visual_mask(step: StepInputs, staging: Staging) -> Staged:
    mask = np.zeros(step.num_tokens, np.int32)
    for part in step.images:
        mask[part.row : part.row + part.num_rows] = 1
    return staging.add(mask)


def update_rows(step: StepInputs, staging: Staging, rows: DeviceRows) -> None:
    """Makes an uploaded step's changes of rows, but for those that it makes itself."""
    blocks, position_deltas = step.places.updates
    if blocks is not None:
        rows.blocks.view(-1).index_copy_(0, *map(staging.device, blocks))
    if position_deltas is not None:
        rows.position_deltas.index_copy_(0, *map(staging.device, position_deltas))
