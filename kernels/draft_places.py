"""Where the layer for multi-token prediction begins to draft, and what its drafts read and store.

Which drafts of a step are accepted is known on the device alone. `draft_places` is the reference
implementation of the kernel in `step_entry`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
    """What rows keep of a step, by row and number of accepted drafts, flattened.

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
    block = blocks[rows, (index // block_size).clamp(0, blocks.shape[1] - 1)].long()
    is_stored = (index >= 0) & (index < capacity)
    slots = (block * block_size + index % block_size).where(is_stored, -1)
    positions = (kept.positions[at].T + places[:, None]).int()
    firsts = (rows * blocks.shape[1]).int()
    return DraftPlaces(kept.hidden[at], ids, positions, slots, lengths, firsts)
