"""What a request demands of its completion's tokens, as values: no compiler here."""

from typing import NamedTuple

import msgspec


class GrammarSource(msgspec.Struct, frozen=True):
    """What is compiled.

    Attributes:
        kind: `json_schema`, `regex`, `choice` or `grammar`.
        text: of that kind.
        plain_strings: its bounded strings are known to be plain, see `plain_strings`.
    """

    kind: str
    text: str
    plain_strings: bool = False


class Grammar(NamedTuple):
    """What a completion has to be; see proto/decoder.proto.

    Attributes:
        begins_after: ids after which the grammar begins; empty: at once.
        stop_ids: the sequence's; end ids that are not among them are sampled only where the text
            cannot be continued.
        min_tokens: the sequence's: before, no end id and no stop id is sampled, unless the text
            cannot be continued.
    """

    source: GrammarSource
    begins_after: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class Demands(NamedTuple):
    """What a request demands of a completion's tokens.

    Attributes:
        grammar: None: any text.
        allowed_ids: empty: all.
        bad_words: token ids of each; the last one of a word is not sampled after its others.
    """

    grammar: Grammar | None = None
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
