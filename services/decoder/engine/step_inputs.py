"""A step's arrays as the model reads them: laid out and padded on the host, uploaded at once.

`ModelRunner` and the CUDA graphs use it. Nothing here waits for the device or knows a sequence; all
lengths and blocks come from the `Step` and the row table.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.decoder.attention.base import AttentionMetadata
from services.decoder.engine.images import ImageRun
from services.decoder.engine.staging import Staged, Staging
from services.decoder.engine.step import Step
from services.decoder.kernels.ops import Ops
from services.decoder.kernels.states import StateCache, StateLayout, prefill_pieces

IntArray = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.int32, np.int64)


class RowTable:
    """What the host keeps per row between steps: block ids and the position delta."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.blocks = np.zeros((num_rows, max_blocks), np.int32)
        self.position_delta = np.zeros(num_rows, np.int64)

    def update(self, step: Step) -> None:
        """Applies a step's row starts and block table entries."""
        for start in step.row_starts:
            self.position_delta[start.row] = start.position_delta
        taken = 0
        for row, start, count in step.block_updates.tolist():
            self.blocks[row, start : start + count] = step.block_ids[taken : taken + count]
            taken += count

    def slots(self, rows: IntArray, indices: IntArray, block_size: int) -> IntArray:
        """The slots of one token per row."""
        blocks = self.blocks[rows, indices // block_size].astype(np.int64)
        return blocks * block_size + indices % block_size


@dataclass(slots=True)
class Places:
    """Where a step's arrays are in the staging buffer.

    Reserved in one order and before anything else, so that steps with equal numbers of tokens and
    chunks have their arrays at equal places: a CUDA graph reads them where they were when it was
    captured.
    """

    input_ids: Staged
    input_rows: Staged
    positions: Staged
    slot_mapping: Staged
    seq_lens: Staged
    output_rows: Staged  # [S] int64: where each chunk's sampled token goes, in a captured step
    sampled_rows: Staged  # [B] int64: rows of the table
    sampled_tokens: Staged  # [B] int64: tokens of the step
    work: Staged | None  # the attention's, see AttentionBackend.list_work
    visual_mask: Staged | None  # [T] int32; None: no token can be an image's
    cu_query_lens: Staged | None  # [S + 1] int32, of a model with recurrent states
    pieces: Staged | None  # [W, 2] int32, of chunks of such a model
    block_ids: Staged


@dataclass(slots=True)
class StepInputs:
    """A step's arrays on the host: T tokens in S chunks.

    Padding tokens are added when the arrays are staged: id 0 at position 0, whose keys and values
    go to slot -1 and which no token attends to.
    """

    num_tokens: int  # padding included, at least T
    num_decodes: int
    input_ids: npt.NDArray[np.int32]  # [T]
    input_rows: IntArray  # [T]: row whose last sampled token is the input; -1: `input_ids` is
    positions: npt.NDArray[np.int32]  # [3, T]
    slot_mapping: IntArray  # [T]
    cu_query_lens: npt.NDArray[np.int32]  # [S + 1]
    seq_lens: npt.NDArray[np.int32]  # [S]
    table_rows: IntArray  # [S]
    samples: IntArray  # [B]: chunks that sample
    images: list[ImageRun]
    places: Places = field(init=False)  # set by `stage`

    @classmethod
    def scratch(cls, lengths: list[int], scratch_row: int) -> "StepInputs":
        """A step of meaningless sequences, all of them in the scratch row."""
        sizes = np.array(lengths, np.int64)
        num_tokens = int(sizes.sum())
        chunks = np.arange(len(lengths))
        return cls(
            num_tokens=num_tokens,
            num_decodes=_leading_ones(lengths),
            input_ids=np.zeros(num_tokens, np.int32),
            input_rows=np.full(num_tokens, -1),
            positions=np.zeros((3, num_tokens), np.int32),
            slot_mapping=np.full(num_tokens, -1),
            cu_query_lens=np.concatenate(([0], sizes.cumsum())).astype(np.int32),
            seq_lens=sizes.astype(np.int32),
            table_rows=np.full_like(chunks, scratch_row),
            samples=chunks,
            images=[],
        )


def lay_out(step: Step, table: RowTable, block_size: int) -> StepInputs:
    """The inputs of a step; `table` has its updates already."""
    if step.num_from_device == len(step.rows):
        return _decodes_from_device(step, table, block_size)
    # Plain Python per chunk, as in `Batch.to_step`.
    fed, lengths = step.num_from_device, step.lengths.tolist()
    rows, starts = step.rows.tolist(), step.starts.tolist()
    *firsts, num_tokens = accumulate(lengths, initial=0)
    decodes = _leading_ones(lengths)
    input_ids, positions = step.token_ids, step.positions
    if fed:
        of_device = np.empty((3, fed), np.int32)
        of_device[:] = step.starts[:fed] + table.position_delta[step.rows[:fed]]
        input_ids = np.concatenate((np.zeros(fed, np.int32), input_ids))
        positions = np.concatenate((of_device, positions), axis=1)
    inputs = StepInputs(
        num_tokens=num_tokens,
        num_decodes=decodes,
        input_ids=input_ids,
        input_rows=np.full(num_tokens, -1),
        positions=positions,
        slot_mapping=np.empty(num_tokens, np.int64),
        cu_query_lens=np.array([*firsts, num_tokens], np.int32),
        seq_lens=np.array([s + n for s, n in zip(starts, lengths, strict=True)], np.int32),
        table_rows=step.rows,
        samples=step.samples,
        images=[ImageRun(*run) for run in step.images.tolist()],
    )
    if decodes:
        inputs.slot_mapping[:decodes] = table.slots(
            step.rows[:decodes], step.starts[:decodes], block_size
        )
    if fed:
        inputs.input_rows[:fed] = step.rows[:fed]
    for index in range(decodes, len(lengths)):
        first = firsts[index]
        slots = inputs.slot_mapping[first : first + lengths[index]]
        _fill_slots(slots, table.blocks[rows[index]], starts[index], block_size)
    return inputs


def _decodes_from_device(step: Step, table: RowTable, block_size: int) -> StepInputs:
    """`lay_out` of the most frequent kind of step, in half the time."""
    rows, starts, count = step.rows, step.starts, len(step.rows)
    positions = np.empty((3, count), np.int32)
    positions[:] = starts + table.position_delta[rows]
    return StepInputs(
        num_tokens=count,
        num_decodes=count,
        input_ids=np.zeros(count, np.int32),
        input_rows=rows,
        positions=positions,
        slot_mapping=table.slots(rows, starts, block_size),
        cu_query_lens=np.arange(count + 1, dtype=np.int32),
        seq_lens=(starts + 1).astype(np.int32),
        table_rows=rows,
        samples=step.samples,
        images=[],
    )


def _fill_slots(
    slots: IntArray, blocks: npt.NDArray[np.int32], start: int, block_size: int
) -> None:
    """The slots of consecutive tokens from `start` on, of the sequence with these blocks."""
    stop = start + len(slots)
    first_block = start // block_size
    used = blocks[first_block : -(-stop // block_size)]
    every = (used[:, None] * np.int64(block_size) + np.arange(block_size)).reshape(-1)
    offset = start - first_block * block_size
    slots[:] = every[offset : offset + len(slots)]


def _leading_ones(lengths: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda length: length == 1, lengths))


def pad(step: StepInputs, num_chunks: int, scratch_row: int) -> StepInputs:
    """A step of decodes padded to a bucket.

    Padding has one token of context in the scratch block.
    """
    extra = num_chunks - len(step.table_rows)
    if extra == 0:
        return step
    return replace(
        step,
        num_tokens=num_chunks,
        num_decodes=num_chunks,
        cu_query_lens=np.arange(num_chunks + 1, dtype=np.int32),
        seq_lens=_padded(step.seq_lens, extra, 1),
        table_rows=_padded(step.table_rows, extra, scratch_row),
    )


def pad_prompt(step: StepInputs, num_tokens: int) -> StepInputs:
    """A step of one chunk, padded to `num_tokens` tokens.

    It samples, as every captured step does; before the end of a prompt the token is not read.
    """
    return replace(step, num_tokens=num_tokens, samples=np.zeros(1, np.int64))


def pad_mixed(
    step: StepInputs, num_tokens: int, num_decodes: int, num_chunks: int, scratch_row: int
) -> StepInputs:
    """A step of decodes and chunks, padded to these numbers of tokens, decodes and chunks.

    Padding chunks have no context. Tokens stay contiguous, decodes first, so that padding tokens
    are the last ones. `num_decodes` tokens are sampled: the step's own, then the step's last token
    repeatedly, for the scratch row.
    """
    decodes, count = step.num_decodes, len(step.seq_lens)
    used, end = len(step.input_ids), num_decodes + count - decodes
    total = num_decodes + num_chunks + 1  # one is always padding
    seq_lens = np.zeros(total, np.int32)
    table_rows = np.full(total, scratch_row)
    cu_query_lens = np.full(total + 1, used, np.int32)
    for target, source in ((seq_lens, step.seq_lens), (table_rows, step.table_rows)):
        target[:decodes], target[num_decodes:end] = source[:decodes], source[decodes:]
    cu_query_lens[: decodes + 1] = step.cu_query_lens[: decodes + 1]
    cu_query_lens[decodes : num_decodes + 1] = decodes
    cu_query_lens[num_decodes : end + 1] = step.cu_query_lens[decodes:]
    samples = np.full(num_decodes, total - 1)
    chosen = step.samples
    samples[: len(chosen)] = np.where(chosen < decodes, chosen, chosen + num_decodes - decodes)
    return replace(
        step,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        cu_query_lens=cu_query_lens,
        seq_lens=seq_lens,
        table_rows=table_rows,
        samples=samples,
    )


def _padded(array: npt.NDArray[_Number], extra: int, value: int) -> npt.NDArray[_Number]:
    """`array` with `extra` more elements; numpy.pad takes ten times as long."""
    padded = np.full(len(array) + extra, value, array.dtype)
    padded[: len(array)] = array
    return padded


def stage(
    step: StepInputs,
    table: RowTable,
    staging: Staging,
    block_size: int,
    *,
    work: npt.NDArray[np.int32] | None,
    masked: bool,
    with_states: bool = False,
) -> StepInputs:
    """Copies a step's arrays into the staging buffer; returns the step, with its places.

    Args:
        step: laid out, and padded if a graph runs it.
        table: of the rows.
        staging: the buffer.
        block_size: tokens per block.
        work: what the attention backend reads besides lengths and blocks, if anything.
        masked: the step has a mask of its visual tokens.
        with_states: the model has recurrent states.
    """
    num_tokens, num_chunks = step.num_tokens, len(step.table_rows)
    sampled_rows, sampled_tokens = step.table_rows, step.cu_query_lens[1:].astype(np.int64) - 1
    if len(step.samples) < num_chunks:  # else all chunks sample, in their order
        sampled_rows, sampled_tokens = sampled_rows[step.samples], sampled_tokens[step.samples]
    step.places = Places(
        input_ids=staging.add(step.input_ids, size=num_tokens),
        input_rows=staging.add(step.input_rows, size=num_tokens, fill=-1),
        positions=staging.add(step.positions, size=num_tokens),
        slot_mapping=staging.add(step.slot_mapping, size=num_tokens, fill=-1),
        seq_lens=staging.add(step.seq_lens),
        output_rows=staging.add(step.table_rows),
        sampled_rows=staging.add(sampled_rows, room=num_chunks),
        sampled_tokens=staging.add(sampled_tokens, room=num_chunks),
        work=None if work is None else staging.add(work),
        visual_mask=_stage_visual_mask(step, staging) if masked else None,
        cu_query_lens=staging.add(step.cu_query_lens) if with_states else None,
        pieces=_stage_pieces(step, staging) if with_states else None,
        block_ids=staging.add(_block_ids(step, table, block_size)),
    )
    return step


def _block_ids(step: StepInputs, table: RowTable, block_size: int) -> npt.NDArray[np.int32]:
    """The blocks of all sequences, one sequence after the other."""
    decodes = step.num_decodes
    parts: list[npt.NDArray[np.int32]] = []
    if decodes:
        counts = -(-step.seq_lens[:decodes] // block_size)
        blocks = table.blocks[step.table_rows[:decodes], : int(counts.max())]
        parts.append(blocks[np.arange(blocks.shape[1]) < counts[:, None]])
        if decodes == len(step.seq_lens):
            return parts[0]
    rows, seq_lens = step.table_rows[decodes:].tolist(), step.seq_lens[decodes:].tolist()
    for row, context in zip(rows, seq_lens, strict=True):
        parts.append(table.blocks[row, : -(-context // block_size)])
    return np.concatenate(parts)


def _stage_pieces(step: StepInputs, staging: Staging) -> Staged | None:
    if step.num_decodes == len(step.seq_lens):
        return None
    return staging.add(prefill_pieces(step.cu_query_lens, step.num_decodes, step.num_tokens))


def _stage_visual_mask(step: StepInputs, staging: Staging) -> Staged:
    mask = np.zeros(step.num_tokens, np.int32)
    for part in step.images:
        mask[part.row : part.row + part.num_rows] = 1
    return staging.add(mask)


def attention_metadata(
    step: StepInputs, staging: Staging, states: StateCache | None
) -> AttentionMetadata:
    """The uploaded step's layout; `plan` is not made yet."""
    places = step.places
    metadata = AttentionMetadata(
        num_decodes=step.num_decodes,
        cu_query_lens=step.cu_query_lens,
        seq_lens=step.seq_lens,
        slot_mapping=staging.device(places.slot_mapping),
        block_ids=staging.device(places.block_ids),
        seq_lens_device=staging.device(places.seq_lens),
        work=None if places.work is None else staging.device(places.work),
    )
    if states is not None:
        assert places.cu_query_lens is not None
        metadata.states = StateLayout(
            cache=states,
            num_decodes=step.num_decodes,
            cu_query_lens=step.cu_query_lens,
            seq_lens=step.seq_lens,
            slots=staging.device(places.output_rows),
            cu_query_lens_device=staging.device(places.cu_query_lens),
            seq_lens_device=metadata.seq_lens_device,
            work=None if places.pieces is None else staging.device(places.pieces),
        )
    return metadata


def captured_metadata(
    step: StepInputs, staging: Staging, states: StateCache | None
) -> AttentionMetadata:
    """The layout for a CUDA graph, which serves all steps that are padded to the same size. Their
    arrays are at the same places on the device; block ids come last, in any number.
    """
    metadata = attention_metadata(step, staging, states)
    metadata.block_ids = staging.device_from(step.places.block_ids)
    return metadata


def input_ids(step: StepInputs, staging: Staging, last_tokens: Tensor, ops: Ops) -> Tensor:
    """`[T]`: known ids, or what the row sampled last (`last_tokens`, `[rows + 1]` int32)."""
    known, rows = staging.device(step.places.input_ids), staging.device(step.places.input_rows)
    return ops.pick_tokens(known, rows, last_tokens)
