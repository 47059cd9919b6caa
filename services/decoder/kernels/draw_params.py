"""What a draw is told, and what comes before it, whoever makes them."""

from typing import NamedTuple

from torch import Tensor


class DrawParams(NamedTuple):
    """How rows are drawn from.

    Attributes:
        floats: `[3 or more, B]` float32: temperatures (0: the most likely token), top_p, min_p.
        top_k: `[B]` int64, vocab_size where off.
        uniforms: `[B]` float64 in (0, 1).
        has_top_k: some row has; `has_top_p` as well.
        forbids: minus infinity is a token that is not to be drawn; else its row is not finite.
    """

    floats: Tensor
    top_k: Tensor
    uniforms: Tensor
    has_top_k: bool
    has_top_p: bool
    forbids: bool


class Penalties(NamedTuple):
    """What rows have seen, and what it costs them.

    Attributes:
        seen: `[rows of the runner's tables, vocab_size]` int32: 2 * times in the completion + (is
            in the prompt).
        rows: `[B]` int64: whose tables the rows' are; of those with penalties, no two are the same.
        floats: `[6, B]` float32: `DrawParams.floats`, then repetition, presence and frequency
            penalties (1, 0 and 0: none).
    """

    seen: Tensor
    rows: Tensor
    floats: Tensor
