"""The compiled grammars of a process that fills masks, and what is made of them for its sequences.

Only grammars that a process of their own has compiled get here (`compile_pool`). The cache is
bounded by the memory of this process.
"""

import asyncio
import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from services.common.process.work_limits import resident_bytes
from services.decoder.masks.compiler import Compiled, Vocabulary, compile_grammar
from services.decoder.masks.grammar import Demands, GrammarSource
from services.decoder.masks.matcher import (
    GrammarMatcher,
    Int32Array,
    Lexer,
    Matcher,
    MatcherFailed,
    UnexpectedToken,
    mask_of,
)
from services.decoder.masks.rows import num_mask_words

log = logging.getLogger(__name__)

_CACHE_ENTRIES = 256
CACHE_BYTES = 512 << 20  # that the process may grow by before compiled grammars are forgotten

# Whether a mask forbids any id, or why there is none.
Found = bool | MatcherFailed
During = Callable[[], AbstractContextManager[None]]


class Grammars:
    """Owner of the vocabulary, the compiled grammars and the thread that compiles.

    Attributes:
        compiler: the thread, for compilations and for first masks, which take as long.
        vocabulary: read in the thread, so that the first grammar waits for it as little as it can:
            a second for 150,000 tokens. A tokenizer that cannot be read is each grammar's error.
        num_words: of a mask.
        num_mask_words: of the memory that it is filled in.

    Args:
        directory: of the model.
        vocab_size: of the model's head, at least the tokenizer's.
        end_ids: of the model.
    """

    def __init__(self, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._end_ids = end_ids
        self.num_words = -(-vocab_size // 32)
        self.num_mask_words = num_mask_words(vocab_size)
        self.compiler = ThreadPoolExecutor(1, "grammar")
        self.vocabulary = self.compiler.submit(Vocabulary.read, directory, vocab_size, end_ids)
        # One that is being compiled is in it, too, so that it is compiled once.
        self._cache: OrderedDict[GrammarSource, Lexer] = OrderedDict()
        self._first_bytes = 0  # of the process, with the vocabulary

    async def matcher(self, demands: Demands, during: During = nullcontext) -> Matcher:
        """A matcher at the start of a sequence's completion.

        Args:
            during: a context in which its grammar is compiled, if it has to be.

        Raises:
            InvalidGrammar: it is not a grammar, or beyond what is supported; the message names it.
        """
        grammar, allowed_ids, bad_words = demands
        matcher = None
        if grammar is not None:
            lexer = self._lexer(grammar.source, during)
            compiled = await asyncio.shield(lexer.compiled)
            state, strings = compiled.state.deep_copy(), compiled.strings
            strings = strings and strings.copy()
            matcher = GrammarMatcher(
                state, lexer, grammar, self._end_ids, grammar.begins_after, strings
            )
        allowed = mask_of(list(allowed_ids), self.num_words) if allowed_ids else None
        return Matcher(matcher, allowed, bad_words)

    def fill(self, matcher: Matcher, token_ids: list[int], row: Int32Array) -> Found:
        """Feeds a matcher the sequence's new tokens and fills the mask for the next one. Raises
        nothing. A matcher is used by one thread at a time.

        Args:
            token_ids: may be none.
            row: `[num_mask_words]`; the mask is in its first `num_words` words.
        """
        try:
            matcher.consume(token_ids)
            return matcher.fill(row)
        except MatcherFailed as error:
            return error
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("a token mask failed")
            if matcher.grammar is not None:
                matcher.grammar.lexer.is_broken = True
            return UnexpectedToken("token masks failed")

    def trim(self) -> None:
        """Forgets the older half of the compiled grammars while the process is too large. Those of
        running sequences stay theirs.
        """
        while self._cache and resident_bytes() - self._first_bytes > CACHE_BYTES:
            for _ in range(-(-len(self._cache) // 2)):
                self._cache.popitem(last=False)
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    def close(self) -> None:
        """Ends the thread when it is idle."""
        self.compiler.shutdown(wait=False, cancel_futures=True)

    def _lexer(self, source: GrammarSource, during: During) -> Lexer:
        """For one more sequence."""
        found = self._cache.get(source)
        if found is None or found.is_broken:
            found = self._cache[source] = Lexer(self._compiling(source, during))
        self._cache.move_to_end(source)
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return found

    def _compiling(self, source: GrammarSource, during: During) -> "asyncio.Future[Compiled]":
        def compile_one() -> Compiled:
            vocabulary = self.vocabulary.result()
            self._first_bytes = self._first_bytes or resident_bytes()
            with during():
                return compile_grammar(vocabulary, source)

        def compiled(done: "asyncio.Future[Compiled]") -> None:
            if done.cancelled() or done.exception():
                self._cache.pop(source, None)
            self.trim()

        compiling = asyncio.get_running_loop().run_in_executor(self.compiler, compile_one)
        compiling.add_done_callback(compiled)
        return compiling


def is_failure(error: BaseException) -> bool:
    """Whether work failed, of which only its sequence ends; pyo3's `PanicException` derives from
    BaseException.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
