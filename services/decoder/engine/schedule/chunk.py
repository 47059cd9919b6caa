"""A chunk: one sequence's part of a step, with the drafts that the step verifies. Pure Python.

A *draft* is a guess of a token that a sequence may have next. A chunk with k drafts computes the
sequence's last token and the drafts behind it, and a token is sampled behind each of them, exactly
as if the tokens before had been sampled one by one. The host accepts drafts from the left as long
as each is the token that was sampled in its place. So drafts do not change a sequence's tokens,
also if these are sampled.

The device knows no drafts: a chunk with k drafts becomes 1 + k chunks of one token of the same row,
which are computed as decodes are. Keys and values of all of them are stored before any attends to
them, and those of rejected drafts are overwritten by the next step.
"""

from array import array

import msgspec
import numpy as np

from services.decoder.engine.draft_counts import DraftCounts
from services.decoder.engine.messages import Logprobs
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.step import Int32Array, Int64Array, StepOutput


class Chunk(msgspec.Struct, gc=False, eq=False):
    """The part of a step that computes the tokens [start, start + length) of one sequence.

    Attributes:
        sequence: the sequence. It has a row, and blocks for start + length + limit - 1 tokens. If
            the step yields several tokens, it also stores keys and values for all of them except
            the last.
        start: number of the sequence's tokens whose keys and values are in the cache already. If
            steps in flight may yield fewer tokens than planned, it is an upper bound.
        length: number of tokens to compute now, at least 1, without drafts.
        from_device: True if the chunk computes the one token that the row has sampled last, which
            is on the device and whose id the host need not know. Otherwise the ids of the chunk's
            tokens are `token_ids`.
        samples: True if the chunk has the sequence's last token, so that a next token is sampled.
        limit: the most tokens that the step may yield for the sequence.
        checkpoints: recurrent states to save, as pairs (n, slot). The state after the sequence's
            first n tokens is copied to the slot.
        is_late: True if the sequence's token mask has not arrived when the step is launched.
        is_void: True if the mask was still missing when the step was sampled. The sequence then
            gets no token from this step.
        drafts: ids of the drafts that are computed behind the chunk's one token.
        num_before: number of drafts before the chunk's one token, if the chunk is one of `parts`.
        num_folded: number of the sequence's last accepted drafts that its recurrent state lacks,
            see `ComputeStep.folds`.
        group: row of the drafts among those of the step before, if the device still makes them and
            their ids are `UNKNOWN_DRAFT`; -1 if the host knows their ids.
    """

    sequence: Sequence
    start: int
    length: int
    from_device: bool
    samples: bool
    limit: int = 1
    checkpoints: tuple[tuple[int, int], ...] = ()
    is_late: bool = False
    is_void: bool = False
    drafts: tuple[int, ...] = ()
    num_before: int = 0
    num_folded: int = 0
    group: int = -1

    @property
    def token_ids(self) -> "array[int]":
        """Ids of the chunk's tokens, without those of its drafts."""
        if self.num_before:
            return array("i", self.drafts[self.num_before - 1 : self.num_before])
        return self.sequence.token_ids[self.start : self.start + self.length]

    @property
    def token_mask(self) -> Int32Array | None:
        """Token mask of the token that is sampled behind the chunk's last token. Empty if every
        token is allowed. None if the sequence has no masks.
        """
        mask = self.sequence.token_mask
        if self.num_before == 0 or mask is None:
            return mask
        return self.sequence.draft_masks[self.num_before - 1]

    @property
    def parts(self) -> "list[Chunk]":
        """Chunks of one token each: the last token of the sequence, then each of the drafts."""
        parts = [
            Chunk(
                self.sequence, self.start + i, 1, False, True, drafts=self.drafts, num_before=i
            )
            for i in range(1 + len(self.drafts))
        ]  # fmt: skip
        parts[0].num_folded = self.num_folded
        for part in parts[1:]:
            part.group = self.group
        return parts


Accepted = tuple[list[list[int]], list[int], dict[int, list[Logprobs]]]


def accept(chunks: list[Chunk], output: StepOutput) -> Accepted:
    """Returns the tokens of each chunk that samples: its tokens up to the first wrong draft.

    Args:
        chunks: the chunks of the step that sample.
        output: output of the step, with a sample for each chunk and for each of its drafts.

    Returns:
        Ids of each chunk, of which the first n are valid; n for each chunk; log-probabilities of
        the valid ids, by the index of the chunk.
    """
    rows, counts, logprobs = output.token_ids.tolist(), output.num_tokens.tolist(), output.logprobs
    if len(rows) == len(chunks):
        return rows, counts, logprobs
    accepted: list[list[int]] = []
    by_chunk: dict[int, list[Logprobs]] = {}
    first = 0
    for index, chunk in enumerate(chunks):
        count = 1
        # A sample below 0 is an error. The next step, which begins in its place, reports it.
        for draft in chunk.drafts:
            if rows[first + count - 1][0] != draft or rows[first + count][0] < 0:
                break
            count += 1
        accepted.append([row[0] for row in rows[first : first + count]])
        if first in logprobs:
            by_chunk[index] = [logprobs[first + place][0] for place in range(count)]
        first += 1 + len(chunk.drafts)
    return accepted, [len(ids) for ids in accepted], by_chunk


def counts_of(samples: list[Chunk]) -> DraftCounts | None:
    """Returns what penalties count for drafts. None if no sequence with drafts has penalties.

    Args:
        samples: the chunks of the step that sample; those with drafts as their parts.
    """
    accepted: list[tuple[int, int]] = []
    assumed: list[tuple[int, int]] = []
    skipped: list[int] = []
    for index, chunk in enumerate(samples):
        sequence, drafts = chunk.sequence, chunk.sequence.drafts
        if drafts is None or not sequence.message.sampling.has_penalties:
            continue
        accepted += [(sequence.row, token_id) for token_id in drafts.uncounted]
        drafts.uncounted = []
        if chunk.drafts:
            assumed += [(index, token_id) for token_id in chunk.drafts[: chunk.num_before]]
            skipped.append(index)
    if not accepted and not skipped:
        return None
    pairs = [np.array(found, np.int64).reshape(-1, 2) for found in (accepted, assumed)]
    return DraftCounts(pairs[0], pairs[1], np.array(skipped, np.int64))


def draft_sources(
    chunks: list[Chunk], num_from_device: int, token_ids: Int32Array
) -> Int64Array | None:
    """Returns `ComputeStep.draft_sources`, and replaces unknown ids by 0.

    Args:
        chunks: the chunks of the step; those with drafts as their parts, of one token each.
        num_from_device: number of chunks from the device, which come first.
        token_ids: ids of the tokens of the other chunks.
    """
    found = [(i, c.group, c.num_before - 1) for i, c in enumerate(chunks) if c.group >= 0]
    if not found:
        return None
    sources = np.array(found, np.int64)
    token_ids[sources[:, 0] - num_from_device] = 0
    return sources


def known_tokens(chunks: list[Chunk]) -> tuple[Int32Array, Int32Array]:
    """Returns the ids `[K]` and the positions `[3, K]` of the chunks' tokens, chunk by chunk."""
    if len(chunks) == 1:
        (chunk,) = chunks
        token_ids = chunk.token_ids
        positions = np.empty((3, chunk.length), np.int32)
        _fill_positions(chunk, positions)
        return np.frombuffer(token_ids, np.int32), positions
    # Decodes are the most frequent chunks. The loop below takes twice the time for them.
    if all([c.length == 1 and c.start >= c.sequence.num_prompt_tokens for c in chunks]):
        ids = [c.token_ids[0] for c in chunks]
        positions = np.empty((3, len(chunks)), np.int32)
        positions[:] = [c.start + c.sequence.message.position_delta for c in chunks]
        return np.array(ids, np.int32), positions
    num_tokens = sum([chunk.length for chunk in chunks])
    token_ids = np.empty(num_tokens, np.int32)
    positions = np.empty((3, num_tokens), np.int32)
    first = 0
    for chunk in chunks:
        end = first + chunk.length
        token_ids[first:end] = chunk.token_ids
        _fill_positions(chunk, positions[:, first:end])
        first = end
    return token_ids, positions


def _fill_positions(chunk: Chunk, positions: Int32Array) -> None:
    """Writes the positions `[3, length]` of a chunk's tokens."""
    sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.length
    num_prompt = max(0, min(end, sequence.num_prompt_tokens) - start)
    if num_prompt:
        given = sequence.positions
        positions[:, :num_prompt] = (
            np.arange(start, start + num_prompt)
            if given is None
            else given[:, start : start + num_prompt]
        )
    if num_prompt < chunk.length:  # completion tokens
        delta = sequence.message.position_delta
        positions[:, num_prompt:] = np.arange(start + num_prompt + delta, end + delta)
