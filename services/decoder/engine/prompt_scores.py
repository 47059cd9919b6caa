"""Log-probabilities of a prompt's own tokens, from hidden states of the tokens before them.

The head runs over few tokens at a time, so that the logits of a long prompt never exist at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.sampling import by_rank


class PromptScores(NamedTuple):
    """Of n tokens, and of the m most likely ones in their places; see `step.Scores`."""

    logprobs: Tensor  # [n] float32
    ranks: Tensor  # [n] int32
    top_ids: Tensor  # [n, m] int32
    top: Tensor  # [n, m] float32


def score_prompt(
    hidden: Tensor,
    followers: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    count: int,
    most_rows: int,
) -> PromptScores:
    """Scores the tokens that follow.

    Args:
        hidden: `[n, hidden]`, the model's output for each token; n is at least 1.
        followers: `[n]` int64, the token after each.
        logits_of: the head: `[rows, hidden]` → `[rows, vocab_size]`.
        count: alternatives, m.
        most_rows: of one call of the head.
    """
    parts: list[PromptScores] = []
    for start in range(0, len(hidden), most_rows):
        raw = logits_of(hidden[start : start + most_rows]).float()
        ids = followers[start : start + most_rows, None]
        total = raw.logsumexp(-1, keepdim=True)
        own = raw.gather(-1, ids)
        ranks = (raw > own).sum(-1, dtype=torch.int32) + 1
        values, top_ids = by_rank(raw, count) if count else (raw[:, :0], ids[:, :0])
        parts.append(
            PromptScores((own - total)[:, 0], ranks, top_ids.to(torch.int32), values - total)
        )
    return PromptScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
