"""Inputs of the layer for multi-token prediction, and the places that its drafts begin at.

Which drafts of a step are accepted is known on the device alone. The functions are the reference
implementations of the kernels in `step_entry` and `draft_states`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class OfDraftToken:
    """Indices of the fields of a token of a step.

    Attributes:
        BEFORE: index in the step of the token before the token; or `-1 - k` if that token was in
            the row's step before, whose hidden state is kept at the flat index k.
        INDEX: index in the sequence of the token before. -1 if there is none to store.
        COUNT: number of fields.
    """

    BEFORE, INDEX = 0, 1
    COUNT = 2


class OfDraftChunk:
    """Indices of the fields of a chunk of a step.

    Attributes:
        LAST: index in the step of the chunk's last token.
        KEPT: flat index at which the hidden state of that token is kept for the row's next step.
        COUNT: number of fields.
    """

    LAST, KEPT = 0, 1
    COUNT = 2


class OfDraftGroup:
    """Indices of the fields of a group, which is the samples of one row.

    Attributes:
        ROW: row of the sequence.
        SAMPLE: index of the group's first sample.
        INDEX: index in the sequence of the token before that sample.
        CAPACITY: number of tokens for which the row has blocks.
        DRAFT: first of the fields with the drafts that the step verifies, behind which there are
            ids that no sampled token is equal to.
    """

    ROW, SAMPLE, INDEX, CAPACITY, DRAFT = 0, 1, 2, 3, 4


class KeptHidden(NamedTuple):
    """States that rows keep of a step, by row and number of accepted drafts, flattened.

    Attributes:
        hidden: `[N, hidden]`, hidden states after the final norm.
        positions: `[N, 3]` int32, positions of these tokens.
    """

    hidden: Tensor
    positions: Tensor


class DraftPlaces(NamedTuple):
    """Inputs of D drafts of each of G groups.

    Attributes:
        hidden: `[G, hidden]`, hidden states of the tokens before the last sampled ones.
        ids: `[G]` int32, the last sampled tokens, 0 in place of ids below 0.
        positions: `[D, 3, G]` int32, positions of the hidden states.
        slots: `[D, G]` int64, places of the keys and values in the KV cache. -1 if the row has no
            block for them.
        lengths: `[D, G]` int32, number of tokens that a draft attends to, at least 1.
        firsts: `[G]` int32, index of the first block of each row.
    """

    hidden: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    firsts: Tensor


def draft_places(
    groups: Tensor, sampled: Tensor, kept: KeptHidden, blocks: Tensor, count: int, block_size: int
) -> DraftPlaces:
    """Implements `Ops.draft_places`."""
    given = groups[OfDraftGroup.DRAFT :].T
    samples = groups[OfDraftGroup.SAMPLE][:, None]
    following = samples + torch.arange(given.shape[1], device=groups.device)
    accepted = (sampled[following] == given).int().cumprod(1).sum(1)
    rows = groups[OfDraftGroup.ROW].long()
    at = rows * (1 + given.shape[1]) + accepted
    ids = sampled[samples[:, 0] + accepted].clamp(min=0)
    places = torch.arange(count, device=groups.device)[:, None]
    index, capacity = groups[OfDraftGroup.INDEX] + accepted + places, groups[OfDraftGroup.CAPACITY]
    lengths = torch.minimum(index + 1, capacity).clamp(min=1).int()
    slots = _slots(blocks, rows, index, block_size).where(index < capacity, -1)
    positions = (kept.positions[at].T + places[:, None]).int()
    firsts = (rows * blocks.shape[1]).int()
    return DraftPlaces(kept.hidden[at], ids, positions, slots, lengths, firsts)


def draft_sources(
    tokens: Tensor,
    rows: Tensor,
    hidden: Tensor,
    positions: Tensor,
    kept: KeptHidden,
    blocks: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `Ops.draft_sources`."""
    source = tokens[OfDraftToken.BEFORE].long()
    is_kept, at, source = source < 0, (-1 - source).clamp(min=0), source.clamp(min=0)
    before = torch.where(is_kept[:, None], kept.hidden[at], hidden[source])
    places = torch.where(is_kept, kept.positions[at].T, positions[:, source]).contiguous()
    slots = _slots(blocks, rows.clamp(min=0), tokens[OfDraftToken.INDEX].long(), block_size)
    return before, places, slots


def keep_hidden(chunks: Tensor, hidden: Tensor, positions: Tensor, kept: KeptHidden) -> None:
    """Implements `Ops.keep_hidden`."""
    last, target = chunks[OfDraftChunk.LAST], chunks[OfDraftChunk.KEPT].long()
    kept.hidden.index_copy_(0, target, hidden[last])
    kept.positions.index_copy_(0, target, positions[:, last].T)


def _slots(blocks: Tensor, rows: Tensor, index: Tensor, block_size: int) -> Tensor:
    """Returns the places int64 in the KV cache of tokens of rows; -1 for an index below 0."""
    block = blocks[rows, (index // block_size).clamp(0, blocks.shape[1] - 1)].long()
    return (block * block_size + index % block_size).where(index >= 0, -1)
