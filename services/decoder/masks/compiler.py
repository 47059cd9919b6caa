"""Grammars compiled by llguidance for a model's vocabulary.

The same code runs in the process that finds out whether a grammar can be compiled and, for those
that can, in the processes that fill masks.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_bounds import is_gbnf
from services.common.grammar.plain_strings import has_plain_bounds
from services.common.grammar.schema_formats import without_unknown_formats
from services.decoder.masks.bounded_strings import NUM_PROBES, BoundedStrings, PlainTokens
from services.decoder.masks.grammar import GrammarSource

# Texts within a JSON string, by length: the tokens of each are checked once, and not for each mask.
# More lengths than the library's own (10, 30) take a third off the masks of short strings.
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{length}}}" for length in (2, 4, 7, 10, 30)),
    f"{_STRING_CHARACTER}+",
]
# One space, or a new line and indentation: what models write. More lets a sequence that has lost
# its way fill max_tokens with blanks.
_JSON_OPTIONS = {
    "whitespace_pattern": r"[ ]?|\n[ ]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# Where one byte alone may come next, the library reads on to where two may, and asks the tokenizer
# for the token: it composes characters, and takes an added token's name for that token. And behind
# a lexeme that takes all that should follow it (`start: R "x"`, `R: "ab" "x"+`) the reading has no
# end. The last value of an option holds, in grammars within it, too.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_OF_SCHEMA = "at 1(8): failed to compile JSON schema: "
_UNKNOWN_FORMAT = f"{_OF_SCHEMA}Unknown format"
_MAX_MESSAGE_CHARS = 500
# What the library would have its caller change.
_QUOTED = re.compile(r"\n *1 \| ")
_OPTION_HINT = re.compile(r"\s*Enable \S+ option [^\n]*")
_WORDS = {
    "json_schema": "the schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "grammar": "the grammar",
}


class Vocabulary(NamedTuple):
    """A model's tokens. About 100 MB for 150,000 tokens, read in a second."""

    full: LLTokenizer
    plain: PlainTokens | None

    @classmethod
    def read(cls, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> "Vocabulary":
        """Of the model in this directory; raises ValueError."""
        num_words = -(-vocab_size // 32)
        path, size = str(directory / "tokenizer.json"), 32 * num_words + NUM_PROBES
        full = LLTokenizer(path, n_vocab=size, eos_token=list(end_ids), slices=_SLICES)
        return cls(full, PlainTokens.of(full, num_words, end_ids))


class Compiled(NamedTuple):
    """A grammar at its start, with a lexer of its own; sequences get copies."""

    state: LLMatcher
    strings: BoundedStrings | None


def compile_grammar(vocabulary: Vocabulary, source: GrammarSource) -> Compiled:
    """The grammar, compiled, its first mask included.

    May take any time and memory, overflow the stack, or raise pyo3's `PanicException`.

    Raises:
        InvalidGrammar: it is none, or beyond what is supported.
    """
    kind, text = source.kind, source.text
    try:
        compiled = _build(vocabulary.full, kind, text)
        if compiled.get_error().startswith(_UNKNOWN_FORMAT):
            text = without_unknown_formats(text)
            compiled = _build(vocabulary.full, kind, text)
    except ValueError as error:
        raise _refused(kind, str(error)) from None
    if not compiled.is_error():
        compiled.compute_bitmask()  # the lexer's first states, which the copies share
    if compiled.is_error():
        raise _refused(kind, compiled.get_error())
    strings, plain = None, vocabulary.plain
    is_plain = source.plain_strings or (kind == "json_schema" and has_plain_bounds(text))
    if plain is not None and is_plain:
        state = _build(plain.others, kind, text)
        if not state.is_error():
            strings = BoundedStrings(state, plain)
    return Compiled(compiled, strings)


def _build(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Raises ValueError, or returns a matcher that may hold an error."""
    if kind == "json_schema":
        schema = json.loads(text) | {"x-guidance": _JSON_OPTIONS}
        lark = f"start: %json {json.dumps(schema)}"
    elif kind == "choice":
        lark = "start: " + " | ".join(map(json.dumps, json.loads(text)))
    elif kind == "regex":
        lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    else:  # what the library takes for Lark is not all of it, and not only it
        lark = _lark_of(text)
    return LLMatcher(vocabulary, lark + _NO_FORCING, log_level=0, limits=limits())


def _lark_of(text: str) -> str:
    """A grammar in Lark; raises ValueError where GBNF cannot be converted."""
    if not is_gbnf(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise ValueError(f"GBNF cannot be converted to Lark: {error}") from None


def limits() -> LLParserLimits:
    """About 20 ms of work for a compilation, 7 ms for a mask, 20 MB for the states of a lexer."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=12_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def short(text: str) -> str:
    """A message of llguidance in a line, without the grammar that it quotes or a schema's place."""
    text = _QUOTED.split(text.removeprefix(_OF_SCHEMA), maxsplit=1)[0]
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


def _refused(kind: str, text: str) -> InvalidGrammar:
    text = short(_OPTION_HINT.sub("", text))
    return InvalidGrammar(f"{_WORDS[kind]} is not valid or not supported: {text}")
