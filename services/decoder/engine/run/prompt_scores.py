"""Log-probabilities of a prompt's own tokens, from hidden states of the tokens before them.

The head runs over few tokens at a time, so that the logits of a long prompt never exist at once.
"""

import torch
from torch import Tensor

from services.common.nn.adapter_stack import AdapterRows
from services.decoder.engine.run.sampler import logprobs_of
from services.decoder.models.transformer import Transformer


def score_prompt(
    model: Transformer,
    hidden: Tensor,
    followers: Tensor,
    count: int,
    most_rows: int,
    adapters: AdapterRows | None = None,
) -> tuple[Tensor, ...]:
    """Scores the tokens of a prompt by the hidden states before them.

    Args:
        model: the model whose head computes logits.
        hidden: `[n, hidden]`, the model's hidden state for each token; n is at least 1.
        followers: `[n]` int64, the token after each of these tokens.
        count: number m of alternatives.
        most_rows: the most rows of one call of the head.
        adapters: adapters of the tokens. None if no token has one.

    Returns:
        The fields of `step.Scores`, on the device.
    """
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(hidden), most_rows):
        part = None if adapters is None else adapters.piece(start, start + most_rows)
        raw = model.logits(hidden[start : start + most_rows], adapters=part).float()
        ids = followers[start : start + most_rows]
        found = logprobs_of(raw, ids, count)
        ranks = (raw > raw.gather(-1, ids[:, None])).sum(-1, dtype=torch.int32) + 1
        parts.append((found.chosen, ranks, found.top_ids, found.top))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
