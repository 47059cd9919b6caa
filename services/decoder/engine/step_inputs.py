"""A batch as arrays: numpy on the host, one upload, views on the device."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.decoder.attention.base import AttentionMetadata
from services.decoder.engine.batch import Batch, Chunk
from services.decoder.engine.images import VisualSegment, find_segments
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.staging import Staged, Staging
from services.decoder.kernels.ops import Ops

IntArray = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.int32, np.int64)


class RowTable:
    """What the host keeps per row: block ids and the position delta."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.blocks = np.zeros((num_rows, max_blocks), np.int32)
        self.position_delta = np.zeros(num_rows, np.int64)
        self._filled = [0] * num_rows

    def start(self, sequence: Sequence) -> None:
        """The sequence has its row."""
        self.position_delta[sequence.row] = sequence.position_delta
        self._filled[sequence.row] = 0

    def follow(self, sequence: Sequence) -> None:
        """Takes over the blocks that the sequence has been given since."""
        filled, count = self._filled[sequence.row], len(sequence.block_table)
        if filled < count:
            self.blocks[sequence.row, filled:count] = sequence.block_table[filled:]
            self._filled[sequence.row] = count


@dataclass(slots=True)
class HostStep:
    """A batch's arrays on the host, T tokens in S chunks.

    Padding tokens are made when the step is staged: id 0 at position 0, whose keys and values go to
    slot -1 and which nobody attends to.
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
    generated: IntArray  # [B]
    segments: list[VisualSegment]

    @classmethod
    def scratch(cls, lengths: list[int], scratch_row: int) -> "HostStep":
        """A step of meaningless sequences, all of them the scratch row's."""
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
            generated=np.zeros_like(chunks),
            segments=[],
        )


def build(batch: Batch, table: RowTable, block_size: int) -> HostStep:
    """Lays a batch out: leading decodes together, every other chunk by itself.

    Plain Python per chunk: on a processor that has rested, each kind of numpy's calls costs a lone
    prompt 10 to 80 µs at its first use.
    """
    chunks = batch.chunks
    for chunk in chunks:
        table.follow(chunk.sequence)
    lengths = [chunk.length for chunk in chunks]
    *firsts, num_tokens = accumulate(lengths, initial=0)
    decodes = _leading_ones(lengths)
    step = HostStep(
        num_tokens=num_tokens,
        num_decodes=decodes,
        input_ids=np.zeros(num_tokens, np.int32),
        input_rows=np.full(num_tokens, -1),
        positions=np.empty((3, num_tokens), np.int32),
        slot_mapping=np.empty(num_tokens, np.int64),
        cu_query_lens=np.array([*firsts, num_tokens], np.int32),
        seq_lens=np.array([chunk.start + chunk.length for chunk in chunks], np.int32),
        table_rows=np.array([chunk.sequence.row for chunk in chunks], np.int64),
        samples=np.array([i for i, chunk in enumerate(chunks) if chunk.samples], np.int64),
        generated=np.array([chunk.generated for chunk in chunks if chunk.samples], np.int64),
        segments=[],
    )
    if decodes:
        _fill_decodes(step, chunks[:decodes], table, block_size)
    for chunk, first in zip(chunks[decodes:], firsts[decodes:], strict=True):
        assert not chunk.from_device, "decodes come first"
        _fill_slots(step, chunk, first, table, block_size)
    for index in [i for i, chunk in enumerate(chunks) if not chunk.from_device]:
        _fill_known(step, chunks[index], firsts[index])
    return step


def _fill_decodes(step: HostStep, chunks: list[Chunk], table: RowTable, block_size: int) -> None:
    """The leading chunks of one token each: the last one of their contexts."""
    count = len(chunks)
    rows, indices = step.table_rows[:count], step.seq_lens[:count].astype(np.int64) - 1
    blocks = table.blocks[rows, indices // block_size].astype(np.int64)
    step.slot_mapping[:count] = blocks * block_size + indices % block_size
    step.positions[:, :count] = indices + table.position_delta[rows]
    step.input_rows[:count] = np.where([chunk.from_device for chunk in chunks], rows, -1)


def _fill_slots(step: HostStep, chunk: Chunk, first: int, table: RowTable, block_size: int) -> None:
    """Where the keys and values of a chunk go, whose first token is the step's token `first`."""
    start, stop = chunk.start, chunk.start + chunk.length
    first_block = start // block_size
    blocks = table.blocks[chunk.sequence.row, first_block : -(-stop // block_size)]
    slots = (blocks[:, None] * np.int64(block_size) + np.arange(block_size)).reshape(-1)
    offset = start - first_block * block_size
    step.slot_mapping[first : first + chunk.length] = slots[offset : offset + chunk.length]


def _fill_known(step: HostStep, chunk: Chunk, first: int) -> None:
    """Ids, positions and images of a chunk whose ids the host knows."""
    sequence, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
    step.input_ids[first : first + chunk.length] = sequence.token_ids[start:stop]
    positions = step.positions[:, first : first + chunk.length]
    prompt_tokens = max(0, min(stop, sequence.num_prompt_tokens) - start)
    given = sequence.positions
    if given is None:
        positions[:, :prompt_tokens] = np.arange(start, start + prompt_tokens)
    else:
        positions[:, :prompt_tokens] = given[:, start : start + prompt_tokens]
    if prompt_tokens < chunk.length:  # generated ones, computed anew
        generated = np.arange(start + prompt_tokens, stop)
        positions[:, prompt_tokens:] = generated + sequence.position_delta
    if sequence.images:
        step.segments += find_segments(chunk, first)


def _leading_ones(lengths: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda length: length == 1, lengths))


def pad(step: HostStep, num_chunks: int, scratch_row: int) -> HostStep:
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


def pad_prompt(step: HostStep, num_tokens: int) -> HostStep:
    """A step of one chunk padded to so many tokens.

    It samples, as a captured one must; before the end of a prompt, nobody reads what.
    """
    return replace(step, num_tokens=num_tokens, samples=np.zeros(1, np.int64))


def pad_mixed(
    step: HostStep, num_tokens: int, num_decodes: int, num_chunks: int, scratch_row: int
) -> HostStep:
    """A step of decodes and chunks, padded to so many tokens, decodes and, behind them, chunks.

    Padding has no context. Tokens stay together, decodes first, so that only the last are padding.
    As many tokens are sampled from as there are decodes: after the step's own the last one of the
    step, again and again, for the scratch row.
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
    """`array` with so many elements more; numpy.pad takes ten times as long."""
    padded = np.full(len(array) + extra, value, array.dtype)
    padded[: len(array)] = array
    return padded


@dataclass(slots=True)
class StagedStep:
    """A step's arrays in the staging buffer.

    Reserved in one order and first of all, so that equal numbers of tokens and chunks have equal
    places: a CUDA graph reads them where it found them when it was captured.
    """

    host: HostStep
    input_ids: Staged
    input_rows: Staged
    positions: Staged
    slot_mapping: Staged
    seq_lens: Staged
    output_rows: Staged  # [S] int64: where each chunk's sampled token goes, in a captured step
    sampled_rows: Staged  # [B] int64: rows of the table
    sampled_tokens: Staged  # [B] int64: tokens of the step
    work: Staged | None  # the attention's, see AttentionBackend.list_work
    visual_rows: Staged | None  # [V] int64
    visual_mask: Staged | None  # [T] int32, in a captured step with chunks
    block_ids: Staged
    block_tables: Staged


def stage(
    step: HostStep,
    table: RowTable,
    staging: Staging,
    block_size: int,
    *,
    work: npt.NDArray[np.int32] | None,
    as_tables: bool,
    masked: bool,
) -> StagedStep:
    """Puts a step's arrays into the staging buffer.

    Block ids go in as a table or one after the other, visual tokens as a mask or as a list.
    """
    num_tokens, num_chunks = step.num_tokens, len(step.table_rows)
    last_tokens = step.cu_query_lens[1:].astype(np.int64) - 1
    block_ids, block_tables = np.empty(0, np.int32), np.empty((0, 0), np.int32)
    if as_tables:
        block_tables = table.blocks[step.table_rows, : -(-int(step.seq_lens.max()) // block_size)]
    else:
        block_ids = _block_ids(step, table, block_size)
    return StagedStep(
        host=step,
        input_ids=staging.add(step.input_ids, size=num_tokens),
        input_rows=staging.add(step.input_rows, size=num_tokens, fill=-1),
        positions=staging.add(step.positions, size=num_tokens),
        slot_mapping=staging.add(step.slot_mapping, size=num_tokens, fill=-1),
        seq_lens=staging.add(step.seq_lens),
        output_rows=staging.add(step.table_rows),
        sampled_rows=staging.add(step.table_rows[step.samples], room=num_chunks),
        sampled_tokens=staging.add(last_tokens[step.samples], room=num_chunks),
        work=None if work is None else staging.add(work),
        visual_rows=_stage_visual_rows(step, staging) if step.segments and not masked else None,
        visual_mask=_stage_visual_mask(step, staging) if masked else None,
        block_ids=staging.add(block_ids),
        block_tables=staging.add(block_tables),
    )


def _block_ids(step: HostStep, table: RowTable, block_size: int) -> npt.NDArray[np.int32]:
    """The blocks of all sequences, one after the other; decodes together, as in `build`."""
    decodes = step.num_decodes
    parts: list[npt.NDArray[np.int32]] = []
    if decodes:
        counts = -(-step.seq_lens[:decodes] // block_size)
        blocks = table.blocks[step.table_rows[:decodes], : int(counts.max())]
        parts.append(blocks[np.arange(blocks.shape[1]) < counts[:, None]])
    rows, seq_lens = step.table_rows[decodes:].tolist(), step.seq_lens[decodes:].tolist()
    for row, context in zip(rows, seq_lens, strict=True):
        parts.append(table.blocks[row, : -(-context // block_size)])
    return np.concatenate(parts)


def _stage_visual_rows(step: HostStep, staging: Staging) -> Staged:
    return staging.add(
        np.concatenate([np.arange(part.row, part.row + part.num_rows) for part in step.segments])
    )


def _stage_visual_mask(step: HostStep, staging: Staging) -> Staged:
    mask = np.zeros(step.num_tokens, np.int32)
    for part in step.segments:
        mask[part.row : part.row + part.num_rows] = 1
    return staging.add(mask)


def attention_metadata(staged: StagedStep, staging: Staging) -> AttentionMetadata:
    """The uploaded step's layout; `plan` is not yet made."""
    step = staged.host
    return AttentionMetadata(
        num_decodes=step.num_decodes,
        cu_query_lens=step.cu_query_lens,
        seq_lens=step.seq_lens,
        slot_mapping=staging.device(staged.slot_mapping),
        block_tables=staging.device(staged.block_tables),
        block_ids=staging.device(staged.block_ids),
        seq_lens_device=staging.device(staged.seq_lens),
        work=None if staged.work is None else staging.device(staged.work),
    )


def captured_metadata(staged: StagedStep, staging: Staging) -> AttentionMetadata:
    """As `attention_metadata`, for all steps that are padded as this one is: what they have on the
    device lies in the same places, and block ids last, so that there may be any number of them.
    """
    metadata = attention_metadata(staged, staging)
    metadata.block_ids = staging.device_from(staged.block_ids)
    return metadata


def input_ids(staged: StagedStep, staging: Staging, last_tokens: Tensor, ops: Ops) -> Tensor:
    """`[T]`: known ids, or what the row sampled last (`last_tokens`, `[rows + 1]` int32)."""
    known, rows = staging.device(staged.input_ids), staging.device(staged.input_rows)
    return ops.pick_tokens(known, rows, last_tokens)
