"""The arrays that the layer for multi-token prediction needs of a step, laid out on the host.

They are staged with the step's other arrays. Which drafts are accepted is known on the device
alone, so nothing here depends on it. See `Drafter`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.draft_places import OfDraftChunk, OfDraftGroup, OfDraftToken
from kernels.rows import OfChunk, OfToken
from services.decoder.engine.run.step_inputs import DraftArrays, IntArray, StepInputs
from services.decoder.engine.step import Int32Array

# An id that no sampled token is equal to, errors of the sampler included.
NO_DRAFT = np.iinfo(np.int32).min
# Plain Python lays out up to so many decodes in less time than numpy.
_FEW_DECODES = 32


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """Uploaded arrays of a step.

    Attributes:
        rows: `[T]` int32, row of each token, -1 for padding.
        tokens: `[2, T]` int32, see `OfDraftToken`.
        chunks: `[2, S]` int32, see `OfDraftChunk`.
        keeps: True if the hidden states of the step's tokens are needed after the step, because
            checkpoints may be saved.
    """

    rows: Tensor
    tokens: Tensor
    chunks: Tensor
    keeps: bool


def lay_out(
    step: StepInputs, capacities: IntArray, max_drafts: int, max_blocks: int, block_size: int
) -> DraftArrays:
    """Lays out the arrays of a step that is padded already.

    Args:
        step: the step.
        capacities: `[R + 1]`, number of tokens for which each row had blocks before the step. The
            last row is scratch.
        max_drafts: the most drafts of a row in a step.
        max_blocks: number of blocks of a row.
        block_size: tokens per KV block.
    """
    if len(step.block_updates[0]):
        changed, last = np.divmod(step.block_updates[0], max_blocks)
        capacities = capacities.copy()
        capacities[changed] = (last + 1) * block_size  # a row's new blocks come in their order
    samples_all = len(step.samples) == step.tokens.shape[1]
    if step.num_decodes == len(step.seq_lens) and samples_all:
        few = len(step.seq_lens) <= _FEW_DECODES
        return (of_few_decodes if few else of_decodes)(step, capacities, max_drafts)
    return of_chunks(step, capacities, max_drafts)


def of_decodes(step: StepInputs, capacities: IntArray, max_drafts: int) -> DraftArrays:
    """Lays out a step of decodes alone, each of which samples: the most frequent step, in a third
    of the time.
    """
    rows, count = step.chunks[OfChunk.ROW], len(step.seq_lens)
    order = np.arange(-1, count, dtype=np.int32)
    is_first = np.empty(count, bool)
    is_first[0] = True
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    kept = rows * np.int32(1 + max_drafts)
    tokens = np.empty((OfDraftToken.COUNT, count), np.int32)
    tokens[OfDraftToken.BEFORE] = np.where(is_first, -1 - kept, order[:-1])
    for chunk, num_folded in step.folds.items():
        tokens[OfDraftToken.BEFORE, chunk] -= num_folded
    np.subtract(step.seq_lens, 2, out=tokens[OfDraftToken.INDEX])
    chunks = np.empty((OfDraftChunk.COUNT, count), np.int32)
    chunks[OfDraftChunk.LAST] = order[1:]
    if not is_first.all():  # drafts, or padding
        places = order[1:] - np.maximum.accumulate(np.where(is_first, order[1:], 0))
        kept += np.minimum(places, max_drafts)
    chunks[OfDraftChunk.KEPT] = kept
    num_samples = len(step.samples)
    if rows[num_samples - 1] == len(capacities) - 1:  # a meaningless step
        num_samples = 0
    rows, is_first = rows[:num_samples], is_first[:num_samples]
    return DraftArrays(tokens, chunks, _groups(step, rows, is_first, capacities, max_drafts))


def of_few_decodes(step: StepInputs, capacities: IntArray, max_drafts: int) -> DraftArrays:
    """Lays out a step of decodes alone like `of_decodes`, in plain Python per decode.

    For four decodes this takes a quarter of the time. The step of a lone sequence is laid out while
    the device drafts, and the device waits for the host if that takes longer than the drafts.
    """
    rows, seq_lens = step.chunks[OfChunk.ROW].tolist(), step.seq_lens.tolist()
    ids, num_samples, num_kept = step.tokens[OfToken.ID].tolist(), len(step.samples), 1 + max_drafts
    if rows[num_samples - 1] == len(capacities) - 1:  # a meaningless step
        num_samples = 0
    before, kept = list[int](), list[int]()
    groups, group, row_before = list[list[int]](), list[int](), -1
    for index, row in enumerate(rows):
        if row == row_before:
            before.append(index - 1)
            kept.append(min(kept[-1] + 1, row * num_kept + max_drafts))
            if step.has_drafts and index < num_samples:
                group.append(ids[index])
            continue
        row_before = row
        before.append(-1 - row * num_kept)
        kept.append(row * num_kept)
        if index < num_samples:
            group = [row, index, seq_lens[index] - 1, int(capacities[row])]
            groups.append(group)
    for chunk, num_folded in step.folds.items():
        before[chunk] -= num_folded
    size = OfDraftGroup.DRAFT + max_drafts
    fields = [[*group, *[NO_DRAFT] * (size - len(group))] for group in groups]
    return DraftArrays(
        np.array((before, [length - 2 for length in seq_lens]), np.int32),
        np.array((range(len(rows)), kept), np.int32),
        np.array(fields, np.int32).reshape(-1, size).T,
    )


def of_chunks(step: StepInputs, capacities: IntArray, max_drafts: int) -> DraftArrays:
    """Lays out a step of any chunks, see `lay_out`."""
    rows, starts = step.chunks[OfChunk.ROW].astype(np.int64), step.cu_query_lens[:-1]
    lengths, num_chunks = np.diff(step.cu_query_lens), len(step.seq_lens)
    # The parts of rows: each begins with the chunk of the row's first token in the step.
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    places = np.arange(num_chunks) - begins.repeat(np.diff(begins, append=num_chunks))
    kept = rows * (1 + max_drafts)
    count = int(step.cu_query_lens[-1])
    tokens = np.zeros((OfDraftToken.COUNT, step.num_tokens), np.int32)
    tokens[OfDraftToken.INDEX] = -1
    tokens[OfDraftToken.BEFORE, :count] = np.arange(-1, count - 1)
    index = np.arange(count) + (step.seq_lens - lengths - starts).repeat(lengths)
    tokens[OfDraftToken.INDEX, :count] = index - 1
    begins = begins[lengths[begins] > 0]  # without padding chunks
    folds = np.array([step.folds.get(chunk, 0) for chunk in begins.tolist()], np.int64)
    tokens[OfDraftToken.BEFORE, starts[begins]] = -1 - (kept[begins] + folds)
    chunks = np.empty((OfDraftChunk.COUNT, num_chunks), np.int32)
    chunks[OfDraftChunk.LAST] = np.maximum(step.cu_query_lens[1:] - 1, 0)
    chunks[OfDraftChunk.KEPT] = kept + np.minimum(places, max_drafts)
    of_samples = rows[step.samples]
    of_samples = of_samples[of_samples < len(capacities) - 1]  # padding comes last
    is_first = np.diff(of_samples, prepend=-1) != 0
    return DraftArrays(tokens, chunks, _groups(step, of_samples, is_first, capacities, max_drafts))


def _groups(
    step: StepInputs,
    rows: npt.NDArray[np.integer],
    is_first: npt.NDArray[np.bool_],
    capacities: IntArray,
    max_drafts: int,
) -> Int32Array:
    """Returns `DraftArrays.groups`.

    Args:
        step: the step.
        rows: `[B]`, row of each sample.
        is_first: `[B]`, true for the first sample of each group.
        capacities: see `lay_out`.
        max_drafts: the most drafts of a row in a step.
    """
    firsts = np.flatnonzero(is_first)
    groups = np.full((OfDraftGroup.DRAFT + max_drafts, len(firsts)), NO_DRAFT, np.int32)
    groups[OfDraftGroup.ROW] = of_groups = rows[firsts]
    groups[OfDraftGroup.SAMPLE] = firsts
    groups[OfDraftGroup.INDEX] = step.seq_lens[step.samples[firsts]] - 1
    groups[OfDraftGroup.CAPACITY] = capacities[of_groups]
    if not step.has_drafts:
        return groups
    counts = np.diff(firsts, append=len(rows))
    for place in range(1, int(counts.max(initial=1))):
        has_draft = counts > place
        chunks = step.samples[firsts[has_draft] + place]
        ids = step.tokens[OfToken.ID, step.cu_query_lens[chunks]]
        groups[OfDraftGroup.DRAFT + place - 1, has_draft] = ids
    return groups


def places_of_drafts(groups: Int32Array, chunks: IntArray, size: int) -> IntArray:
    """Returns the flat indices of drafts in groups that are padded to `size`.

    Args:
        groups: the groups without padding.
        chunks: indices of the drafts' chunks in the step, each of which samples.
        size: number of groups with padding.
    """
    firsts = groups[OfDraftGroup.SAMPLE]
    group = np.searchsorted(firsts, chunks, side="right") - 1
    return (OfDraftGroup.DRAFT - 1 + chunks - firsts[group]) * size + group


def padded(groups: Int32Array, size: int, scratch_row: int) -> Int32Array:
    """Returns groups padded to `size` with groups of the scratch row, which store nothing."""
    count = groups.shape[1]
    if count == size:
        return groups
    found = np.zeros((len(groups), size), np.int32)
    found[:, :count] = groups
    found[OfDraftGroup.ROW, count:] = scratch_row
    found[OfDraftGroup.DRAFT :, count:] = NO_DRAFT
    return found
