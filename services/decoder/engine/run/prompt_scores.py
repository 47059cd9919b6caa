"""Log-probabilities of a prompt's own tokens, from hidden states of the tokens before them.

The head runs over few tokens at a time, so that the logits of a long prompt never exist at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from services.decoder.engine.run.sampler import logprobs_of


def score_prompt(
    hidden: Tensor,
    followers: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    count: int,
    most_rows: int,
) -> tuple[Tensor, ...]:
    """Scores the tokens that follow.

    Args:
        hidden: `[n, hidden]`, the model's output for each token; n is at least 1.
        followers: `[n]` int64, the token after each.
        logits_of: the head: `[rows, hidden]` → `[rows, vocab_size]`.
        count: alternatives, m.
        most_rows: of one call of the head.

    Returns:
        The fields of `step.Scores`, on the device.
    """
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(hidden), most_rows):
        raw = logits_of(hidden[start : start + most_rows]).float()
        ids = followers[start : start + most_rows]
        found = logprobs_of(raw, ids, count)
        ranks = (raw > raw.gather(-1, ids[:, None])).sum(-1, dtype=torch.int32) + 1
        parts.append((found.chosen, ranks, found.top_ids, found.top))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
