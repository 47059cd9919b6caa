"""Grammars of completions, compiled for the model's vocabulary by llguidance.

The decoder's front compiles a sequence's grammar in a thread and keeps a matcher of it; token_masks
asks the matcher what the sequence may have next. Schemas are strangers' input: their size, the work
that compiling and matching may take, the waiting compilations and the cache all have bounds.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask_par

from services.common.errors import InvalidGrammar, Overloaded
from services.common.grammar_bounds import check_grammar
from services.common.plain_strings import JSON_PROBE, has_plain_bounds
from services.common.pod_limits import num_cpus
from services.common.schema_formats import without_unknown_formats
from services.decoder.bounded_strings import (
    NUM_PROBES,
    PROBE_WORDS,
    BoundedStrings,
    PlainTokens,
)
from services.decoder.compiled_grammar import Compiled, CompiledGrammar
from services.decoder.matcher import (
    GrammarMatcher,
    Int32Array,
    Matcher,
    MatcherFailed,
    mask_of,
    short,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # of the stub alone


# Compiling is rare and must not take the cores from the masks of running sequences.
_COMPILE_THREADS = 2
_MAX_MASK_THREADS = 8
_MAX_COMPILING = 64
_COMPILE_TIMEOUT_S = 10.0
_CACHE_ENTRIES = 256
_CACHE_CHARS = 1 << 22  # of the texts, in all
_MAX_VOCABULARIES = 4  # a model has one set of end ids; each costs a second and 100 MB
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


_UNKNOWN_FORMAT = "Unknown format"
# What the library would have its caller change.
_OPTION_HINT = re.compile(r"\s*Enable \S+ option [^\n]*")
_WORDS = {
    "json_schema": "the schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "grammar": "the grammar",
}


# Whether a mask forbids any id, or why there is none.
Found = bool | MatcherFailed
_Key = tuple[str, str, tuple[int, ...], str]  # kind, text, end ids, probe


class Grammar(NamedTuple):
    """What a completion has to be; see proto/decoder.proto.

    Attributes:
        kind: `json_schema`, `regex`, `choice` or `grammar`.
        text: of that kind.
        begins_after: ids after which the grammar begins; empty: at once.
        end_ids: of a complete text.
        continued: ids of the completion that are in the prompt already.
        stop_ids: the sequence's; end ids that are not among them are sampled only where the text
            cannot be continued.
        min_tokens: the sequence's: before, no end id and no stop id is sampled, unless the text
            cannot be continued.
        probe: of the grammar, see `plain_strings`; empty: it is not known to have one.
    """

    kind: str
    text: str
    begins_after: tuple[int, ...]
    end_ids: tuple[int, ...]
    continued: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    probe: str = ""


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


class _Vocabulary(NamedTuple):
    """A tokenizer with certain end ids."""

    full: LLTokenizer
    plain: PlainTokens | None


class Grammars:
    """Owner of the vocabulary, the compiled grammars and the threads.

    Attributes:
        maskers: the thread for masks that take long.
        num_words: of a mask.
        num_mask_words: of the memory that it is filled in.

    Args:
        directory: of the model; its tokenizer.json is read by `preload` or the first grammar.
        vocab_size: of the model's head, at least the tokenizer's.
        observe_compile: called with the seconds that a compilation took.
        num_threads: that fill masks; default: by cores.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        observe_compile: Callable[[float], None],
        num_threads: int | None = None,
    ) -> None:
        self._file = directory / "tokenizer.json"
        self.vocab_size = vocab_size
        self._observe_compile = observe_compile
        self.num_words = -(-vocab_size // 32)
        self.num_mask_words = self.num_words + PROBE_WORDS
        self._vocabularies: dict[tuple[int, ...], _Vocabulary] = {}  # by end ids
        self._reading = Lock()
        self._compilers = ThreadPoolExecutor(_COMPILE_THREADS, "grammar")
        self.maskers = ThreadPoolExecutor(1, "token-masks")
        self._num_threads = num_threads or max(1, min(_MAX_MASK_THREADS, num_cpus() // 2))
        self._parallel: LLExecutor | None = None
        # One that is being compiled is in it, too, so that it is compiled once.
        self._cache: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._cached_chars = 0
        self._num_compiling = 0
        self._without: OrderedDict[tuple[int, ...], Int32Array] = OrderedDict()

    def preload(self, end_ids: tuple[int, ...]) -> None:
        """Reads the vocabulary in a thread, so that the first grammar does not wait for it: a
        second for 150,000 tokens. A tokenizer that cannot be read is that grammar's error.
        """
        self._compilers.submit(self._vocabulary, end_ids)

    async def matcher(self, demands: Demands) -> Matcher:
        """A matcher at the start of a sequence's completion.

        Raises:
            InvalidGrammar: it is not a grammar, or beyond what is supported; the message names it.
            Overloaded: too many grammars are being compiled.
        """
        allowed = demands.allowed_ids
        return Matcher(
            grammar=demands.grammar and await self._matcher(demands.grammar),
            allowed=mask_of(list(allowed), self.num_words) if allowed else None,
            bad_words=demands.bad_words,
        )

    async def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        lexer, end_ids = self._compiled(grammar).take(), grammar.end_ids
        stop_ids = (*end_ids, *grammar.stop_ids)
        try:
            if not lexer.compiled.done():
                await asyncio.wait_for(asyncio.shield(lexer.compiled), _COMPILE_TIMEOUT_S)
            compiled = lexer.compiled.result()
        except BaseException as error:
            lexer.grammar.give_back(lexer)
            if isinstance(error, TimeoutError):
                raise InvalidGrammar(
                    f"takes more than {_COMPILE_TIMEOUT_S:g} s to compile"
                ) from None
            raise
        matcher = GrammarMatcher(
            compiled.state.deep_copy(),
            lexer,
            grammar.begins_after,
            ends_early=set(end_ids) <= set(grammar.stop_ids),
            min_tokens=grammar.min_tokens,
            end_ids=end_ids,
            stop_ids=stop_ids,
            without_ends=self._mask_without(end_ids),
            without_stops=self._mask_without(stop_ids),
            strings=compiled.strings and compiled.strings.copy(),
        )
        try:
            matcher.consume(list(grammar.continued))
        except MatcherFailed as error:
            lexer.grammar.give_back(lexer)
            raise InvalidGrammar(f"the continued text does not fit it: {error}") from None
        return matcher

    async def first_mask(
        self, matcher: Matcher, generated: list[int], rows: Int32Array, row: int
    ) -> Found:
        """The mask for a sequence's first token, or for the one behind those `generated` elsewhere.

        The one that takes longest, as a second for a hostile grammar: beside compilations.
        """
        loop = asyncio.get_running_loop()
        work = [(matcher, generated, row)]
        return (await loop.run_in_executor(self._compilers, self.fill, work, rows))[0]

    def release(self, matcher: Matcher) -> None:
        """The sequence has ended."""
        if matcher.grammar is not None:
            lexer = matcher.grammar.lexer
            lexer.grammar.give_back(lexer)

    def close(self) -> None:
        """Ends the threads when they are idle."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.maskers.shutdown(wait=False, cancel_futures=True)

    def fill(self, work: list[tuple[Matcher, list[int], int]], rows: Int32Array) -> list[Found]:
        """Feeds each matcher the sequence's new tokens and fills the masks for the next ones. May
        be called in any thread; a matcher, and a row, is used by one at a time.

        Args:
            work: matchers, each once, tokens, which may be none, and the mask's row.
            rows: `[n, num_mask_words]`, contiguous; a mask is in its row's first `num_words` words.
        """
        results: list[Found | None] = [None] * len(work)
        running: list[tuple[LLMatcher, int]] = []
        for index, (matcher, token_ids, row) in enumerate(work):
            try:
                matcher.consume(token_ids)
            except MatcherFailed as error:
                results[index] = error
                continue
            if (state := matcher.filler()) is not None:
                running.append((state, row))
        if len(running) == 1 or self._num_threads == 1:
            first, num_bytes = rows.ctypes.data, rows.strides[0]
            for state, row in running:
                state.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)
        elif running:
            if self._parallel is None:
                self._parallel = LLExecutor(self._num_threads)
            fill_next_token_bitmask_par(self._parallel, running, rows)
        return [
            _finished(matcher, rows[row]) if (result := results[index]) is None else result
            for index, (matcher, _, row) in enumerate(work)
        ]

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        key = (grammar.kind, grammar.text, grammar.end_ids, grammar.probe)
        if (found := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return found
        found = CompiledGrammar(partial(self._start_compiling, grammar, key), self._num_threads)
        self._cache[key] = found
        self._cached_chars += len(grammar.text)
        while len(self._cache) > _CACHE_ENTRIES or self._cached_chars > _CACHE_CHARS:
            self._forget(next(iter(self._cache)))
        return found

    def _start_compiling(self, grammar: Grammar, key: _Key) -> "asyncio.Future[Compiled]":
        if self._num_compiling >= _MAX_COMPILING:
            raise Overloaded("too many grammars are being compiled", retry_after_s=1)
        self._num_compiling += 1
        compiling = asyncio.get_running_loop().run_in_executor(
            self._compilers, partial(self._compile, grammar)
        )
        compiling.add_done_callback(partial(self._compiled_one, key))
        return compiling

    def _compiled_one(self, key: _Key, done: "asyncio.Future[Compiled]") -> None:
        self._num_compiling -= 1
        if (done.cancelled() or done.exception()) and key in self._cache:
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        del self._cache[key]
        self._cached_chars -= len(key[1])

    def _compile(self, grammar: Grammar) -> Compiled:
        """In a thread."""
        # The gateway has checked it, too; the library would end the process.
        check_grammar(grammar.kind, grammar.text)
        vocabulary, started = self._vocabulary(grammar.end_ids), time.monotonic()
        try:
            text = grammar.text
            compiled = _build(vocabulary.full, grammar.kind, text)
            if compiled.get_error().startswith(_UNKNOWN_FORMAT):
                text = without_unknown_formats(text)
                compiled = _build(vocabulary.full, grammar.kind, text)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        if not compiled.is_error():
            compiled.compute_bitmask()  # the lexer's first states, which the copies share
        if compiled.is_error():
            raise _refused(grammar, compiled.get_error())
        strings, plain, probe = None, vocabulary.plain, grammar.probe
        if grammar.kind == "json_schema" and has_plain_bounds(text):
            probe = JSON_PROBE
        if plain is not None and probe:
            state = _build(plain.others[probe], grammar.kind, text)
            if not state.is_error():
                strings = BoundedStrings(state, plain, plain.probes[probe])
        self._observe_compile(time.monotonic() - started)
        return Compiled(compiled, strings)

    def _vocabulary(self, end_ids: tuple[int, ...]) -> _Vocabulary:
        with self._reading:
            found = self._vocabularies.get(end_ids)
            if found is None:
                if len(self._vocabularies) >= _MAX_VOCABULARIES:
                    raise InvalidGrammar("other grammars have other end_token_ids")
                path, size = str(self._file), 32 * self.num_words + NUM_PROBES
                full = LLTokenizer(path, n_vocab=size, eos_token=list(end_ids), slices=_SLICES)
                found = _Vocabulary(full, PlainTokens.of(full, self.num_words, end_ids))
                self._vocabularies[end_ids] = found
            return found

    def _mask_without(self, ids: tuple[int, ...]) -> Int32Array:
        found = self._without.get(ids)
        if found is None:
            found = ~mask_of(list(ids), self.num_words)
            self._without[ids] = found
            if len(self._without) > _CACHE_ENTRIES:
                self._without.popitem(last=False)
        return found


def _build(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Raises ValueError, or returns a matcher that may hold an error."""
    if kind == "json_schema":
        options = cast("JsonCompileOptions", _JSON_OPTIONS)
        source = LLMatcher.grammar_from_json_schema(text, overrides=options)
    else:
        source = grammar_from(kind, text)  # pyright: ignore[reportArgumentType]
    return LLMatcher(vocabulary, source, log_level=0, limits=_limits())


def _limits() -> LLParserLimits:
    """About 20 ms of work for a compilation, 7 ms for a mask, 100 MB for the states of a lexer."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=60_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _refused(grammar: Grammar, text: str) -> InvalidGrammar:
    what = _WORDS[grammar.kind]
    text = _OPTION_HINT.sub("", short(text))
    return InvalidGrammar(f"{what} is not valid or not supported: {text}")


def _finished(matcher: Matcher, filled: Int32Array) -> Found:
    try:
        return matcher.finish(filled)
    except MatcherFailed as error:
        return error
