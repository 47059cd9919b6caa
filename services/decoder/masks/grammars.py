"""The compiled grammars of a mask process, and the matchers that are created from them.

All these grammars have been compiled in the compile process before (`compile_pool`). The tenants
take turns here, too (`compilations`). The memory of the grammars is bounded (`grammar_memory`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from services.decoder.masks.compilations import Compilation, Compilations, Waiter
from services.decoder.masks.compiler import Compiled, Vocabulary
from services.decoder.masks.grammar import GrammarSource, TokenConstraints
from services.decoder.masks.grammar_memory import GrammarMemory
from services.decoder.masks.matcher import (
    GrammarMatcher,
    Int32Array,
    Lexer,
    Matcher,
    MatcherFailed,
    UnexpectedToken,
    mask_of,
)
from services.decoder.masks.rows import CLIENTS, QUICK, SLOW, Marks, num_mask_words
from services.decoder.masks.work_thread import WorkThread, is_failure

log = logging.getLogger(__name__)

_CACHE_ENTRIES = 256
# Masks of a grammar that takes longer to compile are filled in a thread from the first one on. A
# parser's row takes time quadratic in the alternatives that begin at one place, and is limited only
# when it is complete: 400 lists beside each other compile in 0.1 s of CPU time, and a mask within
# them takes 0.6 s. Of JSONSchemaBench, one schema in a hundred takes longer than this.
_LARGE_S = 0.02
# Honest masks take 7 ms of CPU time at most, those of an ambiguous grammar seconds. The time that
# the token before takes to be read is counted, too.
_SLOW_MASK_S = 0.02
_MAX_MASK_S = 0.2
_MAX_READ_S = 2.0  # of CPU time for the tokens that a sequence had before
_SLOW_NICENESS = 10

# True if a mask forbids any token, False if all tokens are allowed, or the reason of a failure.
Found = bool | MatcherFailed


class Grammars:
    """Owner of the vocabulary, the compiled grammars and the threads of a mask process.

    Attributes:
        quick: thread for the first work on sequences whose grammars compile quickly.
        slow: thread for grammars that take long to compile, and for slow masks.
        clients: thread for all work on grammars that clients write.
        vocabulary: future of the vocabulary, which the quick thread reads at the start: a second
            for 150,000 tokens. If the tokenizer cannot be read, every grammar fails.
        num_words: number of words of a mask.
        num_mask_words: number of words in which a mask and its probes are filled.
        memory: bound on the memory of grammars and matchers.

    Args:
        directory: directory of the model.
        vocab_size: number of rows of the model's head.
        end_ids: end tokens of the model.
        marks: marks of the process. By default, they are not shared.
        memory: bound on the memory of grammars and matchers.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        end_ids: tuple[int, ...],
        marks: Marks | None = None,
        memory: GrammarMemory | None = None,
    ) -> None:
        self._end_ids = end_ids
        self.num_words = -(-vocab_size // 32)
        self.num_mask_words = num_mask_words(vocab_size)
        marks = marks or Marks.unshared()
        self.quick = WorkThread("quick", QUICK, marks)
        self.slow = WorkThread("slow", SLOW, marks, _SLOW_NICENESS)
        self.clients = WorkThread("clients", CLIENTS, marks, _SLOW_NICENESS)
        self.threads = self.quick, self.slow, self.clients
        self.vocabulary = self.quick.submit(
            partial(Vocabulary.read, directory, vocab_size, end_ids)
        )
        self.memory = memory or GrammarMemory()
        self._compilations = Compilations(self.vocabulary, self.memory)
        # A grammar that waits or is being compiled is in both, too, so that it is compiled once. A
        # grammar of running sequences stays in the second after it was dropped from the first.
        self._cache: OrderedDict[GrammarSource, Lexer] = OrderedDict()
        self._lexers: WeakValueDictionary[GrammarSource, Lexer] = WeakValueDictionary()

    async def matcher(
        self,
        constraints: TokenConstraints,
        number: int = 0,
        thread: WorkThread | None = None,
        *,
        tenant: str = "",
        background: bool = False,
    ) -> Matcher:
        """Creates a matcher at the start of a sequence's completion.

        Args:
            constraints: constraints of the sequence.
            number: the engine's number of the sequence.
            thread: thread that compiles the grammar, if necessary. Defaults to the quick thread.
            tenant: tenant in whose turn the grammar may be compiled, and which is then charged.
            background: True if this turn comes behind the turns of all other tenants.

        Raises:
            InvalidGrammar: the grammar is invalid, or uses features that are not supported.
            Overloaded: the grammars of other sequences take all time or memory.
        """
        grammar, allowed_ids, bad_words = constraints
        matcher = None
        if grammar is not None:
            await asyncio.shield(asyncio.wrap_future(self.vocabulary))
            self.memory.begin()
            lexer = self._lexer(grammar.source, thread or self.quick)
            waiter = Waiter(number, tenant, background)
            compiled = await self._compilations.wait(lexer.compilation, waiter)
            lexer.is_slow |= compiled.cpu_s > _LARGE_S
            state, strings = compiled.state.deep_copy(), compiled.strings
            strings = strings and strings.copy()
            matcher = GrammarMatcher(
                state, lexer, grammar, self._end_ids, grammar.begins_after, strings
            )
        allowed = mask_of(list(allowed_ids), self.num_words) if allowed_ids else None
        return Matcher(matcher, allowed, bad_words)

    def fill(self, matcher: Matcher, token_ids: list[int], row: Int32Array) -> Found:
        """Reads the new tokens of a sequence and fills the mask for the next token. Failures are
        returned, not raised. Only one thread at a time may use a matcher.

        Args:
            matcher: matcher of the sequence.
            token_ids: new tokens, if any.
            row: `[num_mask_words]`. The mask is in its first `num_words` words.

        Returns:
            Whether the mask forbids any token, or the failure.
        """
        try:
            began = now = time.thread_time()
            for token_id in token_ids:
                # The library holds the interpreter's lock while it reads, so that tokens are read
                # one by one. A token of a hostile grammar takes up to 0.07 s.
                matcher.consume([token_id])
                now = time.thread_time()
                if now - began > _MAX_READ_S:
                    raise MatcherFailed(f"its text takes more than {_MAX_READ_S:g} s to read")
            found = matcher.fill(row)
            ended = time.thread_time()
            if (grammar := matcher.grammar) is not None:
                token_s = (now - began) / max(1, len(token_ids)) + ended - now
                self._account(grammar, ended - began, token_s)
            return found
        except MatcherFailed as error:
            return error
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("a token mask could not be filled")
            if matcher.grammar is not None:
                matcher.grammar.lexer.is_broken = True
            return UnexpectedToken("the token mask could not be filled")

    def fill_drafts(self, matcher: Matcher, drafts: list[int], rows: Int32Array) -> int:
        """Fills the masks behind drafts, see `Matcher.fill_drafts`. Returns 0 after a failure."""
        try:
            return matcher.fill_drafts(drafts, rows)
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("the token masks behind drafts could not be filled")
            return 0

    def trim(self) -> None:
        """Drops the older half of the compiled grammars while the memory is half full. Grammars of
        running sequences are freed when these sequences end.
        """
        while self._cache and self.memory.is_half_full:
            for _ in range(-(-len(self._cache) // 2)):
                self._cache.popitem(last=False)
            self.memory.release()

    def close(self) -> None:
        """Ends the threads when they are idle."""
        for thread in self.threads:
            thread.close()

    def _account(self, grammar: GrammarMatcher, used_s: float, token_s: float) -> None:
        """Adds the time of a mask to its matcher.

        Args:
            grammar: matcher of the sequence.
            used_s: CPU seconds that all new tokens and the mask took.
            token_s: CPU seconds that a new token and the mask took.

        Raises:
            MatcherFailed: the mask or the matcher has taken too much time or memory.
        """
        grammar.used_s += used_s
        if token_s > _SLOW_MASK_S:
            grammar.lexer.is_slow = True
            if token_s > _MAX_MASK_S:
                raise MatcherFailed(f"a token mask takes more than {_MAX_MASK_S:g} s")
        if self.memory.measures(grammar.used_s, grammar.measured_at_s):
            grammar.measure(self.memory)

    def _lexer(self, source: GrammarSource, thread: WorkThread) -> Lexer:
        """Returns the lexer of a grammar. If the grammar has not been compiled yet, it is compiled
        once a sequence waits for it.
        """
        found = self._lexers.get(source)
        if found is None or found.is_broken:
            done = asyncio.get_running_loop().create_future()
            done.add_done_callback(partial(self._compiled, source))
            compilation = Compilation(source, thread, done)
            found = self._lexers[source] = Lexer(compilation, is_slow=source.by_client)
        self._cache[source] = found
        self._cache.move_to_end(source)
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return found

    def _compiled(self, source: GrammarSource, done: "asyncio.Future[Compiled]") -> None:
        if done.cancelled() or done.exception():
            self._cache.pop(source, None)
            self._lexers.pop(source, None)
        self.trim()
