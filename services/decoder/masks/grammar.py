"""The constraints that a request puts on the tokens of its completion, as plain values."""

from typing import NamedTuple

import msgspec


class GrammarSource(msgspec.Struct, frozen=True):
    """The text of a grammar.

    Attributes:
        kind: `json_schema`, `regex`, `choice` or `grammar`.
        text: the schema, expression, list of choices or grammar.
        plain_strings: True if the bounded strings are known to be plain; see `plain_strings`.
        by_client: True if a client has written the grammar, in Lark or GBNF. Such a grammar may be
            ambiguous, and no useful bound on the work for its masks is known.
    """

    kind: str
    text: str
    plain_strings: bool = False
    by_client: bool = False


class Grammar(NamedTuple):
    """The grammar that a completion has to follow; see proto/decoder.proto.

    Attributes:
        source: text of the grammar.
        begins_after: token ids after which the grammar begins. If empty, it begins at once.
        stop_ids: stop tokens of the sequence. An end token that is not a stop token is allowed only
            where the text cannot be continued.
        min_tokens: smallest number of tokens. Before, end tokens and stop tokens are allowed only
            where the text cannot be continued.
    """

    source: GrammarSource
    begins_after: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class TokenConstraints(NamedTuple):
    """The constraints on the tokens of a completion.

    Attributes:
        grammar: grammar of the completion. None if any text is allowed.
        allowed_ids: allowed tokens. If empty, all tokens are allowed.
        bad_words: token ids of each word. The last token of a word is forbidden after the others.
    """

    grammar: Grammar | None = None
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
