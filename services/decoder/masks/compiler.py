"""Compiles grammars with llguidance for a model's vocabulary.

The code runs first in the compile process, which finds out whether a grammar can be compiled. If
so, the code runs again in a mask process.
"""

import json
import re
import time
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

# Texts within a JSON string, by length. llguidance checks the tokens of each slice once rather than
# for each mask. With more lengths than its defaults (10, 30), masks of short strings take a third
# less time.
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{length}}}" for length in (2, 4, 7, 10, 30)),
    f"{_STRING_CHARACTER}+",
]
# Models write one space, or a new line and indentation. If more blanks were allowed, a sequence
# could fill max_tokens with blanks.
_JSON_OPTIONS = {
    "whitespace_pattern": r"[ ]?|\n[ ]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# By default, llguidance follows forced bytes (where only one byte is allowed) up to the next choice
# and tokenizes them. The tokenizer may compose characters, and mistakes the name of an added token
# for the token. After a lexeme that consumes all text that should follow it (`start: R "x"`,
# `R: "ab" "x"+`), this would not even end. The last value of an option applies, also to nested
# grammars.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_OF_SCHEMA = "at 1(8): failed to compile JSON schema: "
_UNKNOWN_FORMAT = f"{_OF_SCHEMA}Unknown format"
_MAX_MESSAGE_CHARS = 500
# The library's message for a mask that allows nothing.
_NOTHING_FITS = re.compile(r"NoExtensionBias(?: <non-verbose/>)?")
# Parts of messages that are meant for callers of the library.
_QUOTED = re.compile(r"\n *1 \| ")
_OPTION_HINT = re.compile(r"\s*Enable \S+ option [^\n]*")
_WORDS = {
    "json_schema": "the schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "grammar": "the grammar",
}


class Vocabulary(NamedTuple):
    """The tokens of a model. 150,000 tokens take about 100 MB and a second to read.

    Attributes:
        full: all tokens.
        plain: plain tokens, for masks within bounded strings. None if the vocabulary lacks bytes.
    """

    full: LLTokenizer
    plain: PlainTokens | None

    @classmethod
    def read(cls, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> "Vocabulary":
        """Reads the tokenizer of a model.

        Args:
            directory: directory of the checkpoint.
            vocab_size: number of rows of the model's head.
            end_ids: end tokens of the model.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        num_words = -(-vocab_size // 32)
        path, size = str(directory / "tokenizer.json"), 32 * num_words + NUM_PROBES
        full = LLTokenizer(path, n_vocab=size, eos_token=list(end_ids), slices=_SLICES)
        return cls(full, PlainTokens.of(full, num_words, end_ids))


class Compiled(NamedTuple):
    """A compiled grammar at its start, with a lexer of its own. Sequences use copies.

    Attributes:
        state: matcher of llguidance.
        strings: second matcher for bounded strings. None if the grammar has no plain strings.
        cpu_s: CPU seconds of the compilation.
    """

    state: LLMatcher
    strings: BoundedStrings | None
    cpu_s: float


def compile_grammar(vocabulary: Vocabulary, source: GrammarSource) -> Compiled:
    """Compiles a grammar and fills its first mask.

    The call may take any time and memory, overflow the stack, or raise pyo3's `PanicException`.

    Args:
        vocabulary: tokens of the model.
        source: text of the grammar.

    Raises:
        InvalidGrammar: the grammar is invalid, or uses features that are not supported.
    """
    kind, text, began = source.kind, source.text, time.thread_time()
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
    return Compiled(compiled, strings, time.thread_time() - began)


def _build(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Builds a matcher, which may hold an error.

    Raises:
        ValueError: the text cannot be parsed.
    """
    if kind == "json_schema":
        schema = json.loads(text) | {"x-guidance": _JSON_OPTIONS}
        lark = f"start: %json {json.dumps(schema)}"
    elif kind == "choice":
        lark = "start: " + " | ".join(map(json.dumps, json.loads(text)))
    elif kind == "regex":
        lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    else:  # the library detects Lark unreliably
        lark = _lark_of(text)
    return LLMatcher(vocabulary, lark + _NO_FORCING, log_level=0, limits=limits())


def _lark_of(text: str) -> str:
    """Returns a grammar in Lark's syntax.

    Raises:
        ValueError: the grammar is in GBNF and cannot be converted.
    """
    if not is_gbnf(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise ValueError(f"GBNF cannot be converted to Lark: {error}") from None


def limits() -> LLParserLimits:
    """Returns the limits of llguidance: about 20 ms for a compilation, 7 ms for a mask, and 20 MB
    for the states of a lexer.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=12_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def short(text: str) -> str:
    """Shortens a message of llguidance to one line, without the quoted grammar and its position."""
    text = _QUOTED.split(text.removeprefix(_OF_SCHEMA), maxsplit=1)[0]
    text = _NOTHING_FITS.sub("no text fits it (does a reference lead back to itself?)", text)
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


def _refused(kind: str, text: str) -> InvalidGrammar:
    text = short(_OPTION_HINT.sub("", text))
    return InvalidGrammar(f"{_WORDS[kind]} is not valid or not supported: {text}")
