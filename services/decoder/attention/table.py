"""The attention rows of the dispatch table, in order of preference.

Operations: `decode_attention`, by number of sequences, and `prefill_attention`, by number of
tokens. `PagedBackend` composes a step of them, so that the rows create nothing. The row of
`fused_decode_attention` is in `services.decoder.kernels.table`.
"""

from collections.abc import Callable
from typing import TypeVar

from services.common.nn.dispatch import PLAIN, Implementation, TokenRange
from services.decoder.kernels.attention_tuning import (
    AttentionFacts,
    paged_decode_obstacle,
    prefill_obstacle,
    size_class,
)
from services.decoder.kernels.tuning import LAUNCH_HIDING_TOKENS

FactsT = TypeVar("FactsT")
DECODE, PREFILL = "decode_attention", "prefill_attention"
PAGED, HOPPER, FLASHINFER = "paged", "hopper", "flashinfer"
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def implementations(facts_of: Callable[[FactsT], AttentionFacts]) -> list[Implementation[FactsT]]:
    """The rows, for a table whose facts have those of attention.

    Args:
        facts_of: the table's facts → attention's.
    """

    def row(
        operation: str,
        name: str,
        obstacle: Callable[[AttentionFacts], str],
        tokens: Callable[[AttentionFacts], TokenRange],
    ) -> Implementation[FactsT]:
        return Implementation(
            operation,
            name,
            create=lambda _: None,
            obstacle=lambda facts: obstacle(facts_of(facts)),
            tokens=lambda facts: tokens(facts_of(facts)),
        )

    return [
        row(DECODE, PAGED, paged_decode_obstacle, _paged_sequences),
        row(DECODE, FLASHINFER, flashinfer_obstacle, lambda _: TokenRange()),
        row(DECODE, PLAIN, lambda _: "", lambda _: TokenRange()),
        row(PREFILL, HOPPER, prefill_obstacle, _prefill_tokens),
        row(PREFILL, FLASHINFER, flashinfer_obstacle, lambda _: TokenRange()),
        row(PREFILL, PLAIN, lambda _: "", lambda _: TokenRange()),
    ]


def flashinfer_obstacle(facts: AttentionFacts) -> str:
    """Why flashinfer cannot serve these facts, or ""."""
    if facts.device.kind != "cuda":
        return "needs a GPU"
    if not facts.has_flashinfer:
        return "needs the package flashinfer-python: pip install 'triptych[gpu]'"
    if facts.dtype.itemsize != 2:
        return f"needs bfloat16 or float16, not {facts.dtype}"
    if facts.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"needs a head_dim of 64, 128 or 256, not {facts.head_dim}"
    return ""


def _paged_sequences(facts: AttentionFacts) -> TokenRange:
    if flashinfer_obstacle(facts):
        return TokenRange()
    tuned = size_class(facts.group_size, facts.head_dim)
    return TokenRange(
        tuned.paged_min_sequences,
        condition=f"sequences, captured or >= {LAUNCH_HIDING_TOKENS} tokens; any beside {HOPPER}",
    )


def _prefill_tokens(facts: AttentionFacts) -> TokenRange:
    if flashinfer_obstacle(facts):
        return TokenRange()
    return TokenRange(
        condition=f"captured, or >= {LAUNCH_HIDING_TOKENS} tokens of which few are cached"
    )
