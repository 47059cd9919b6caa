"""What one sequence may have next: a grammar's matcher, allowed ids, forbidden words.

`grammar.Grammars` makes matchers and runs them in threads; plain state and no waiting here.
"""

import asyncio
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher

from services.decoder.masks.bounded_strings import BoundedStrings
from services.decoder.masks.compiler import Compiled, short
from services.decoder.masks.grammar import Grammar
from services.decoder.masks.grammar_memory import GrammarMemory
from services.decoder.masks.rows import PROBE_WORDS, Int32Array

_FEW_IDS = 16
_KEPT_MASKS = 256  # of ids that requests have as their ends
# llguidance's messages: the lexer has reached a limit; a token was not allowed. Others name a limit
# of the parser.
_LEXER_ERROR = "lexer error"
_MISMATCHES = ("doesn't satisfy the grammar", "out of range")


class MatcherFailed(Exception):
    """A matcher cannot go on; the message says why."""


class UnexpectedToken(MatcherFailed):
    """A token is not of the grammar, although the sequence was sampled under its masks."""


class NothingAllowed(MatcherFailed):
    """The request's demands exclude each other: no token satisfies them all."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lexer:
    """A compiled grammar's lexer. Copies of an llguidance matcher share it, behind a lock: what one
    sequence's masks have taught it, the others need not learn; but one that has reached a limit
    fails all of them, so that a broken one is left for a new one.

    Attributes:
        compiled: with it, or to be.
        is_broken: it has reached a limit: no further sequence gets it.
        is_slow: whether masks of it take long, so that all are filled in a thread.
    """

    compiled: "asyncio.Future[Compiled]"
    is_broken: bool = False
    is_slow: bool = False


@dataclass(slots=True)
class GrammarMatcher:
    """A grammar after the sequence's tokens.

    Attributes:
        lexer: which it shares with other sequences.
        end_ids: the model's.
        begins_after: ids after which the grammar begins; empty once it has begun.
        strings: the same grammar, for masks within bounded strings; None: it has none.
        used_s: CPU seconds that its masks have taken.
        state_bytes: memory of its state when it was measured last; 0 before.
        measured_at_s: CPU seconds that its masks had taken when it was measured last.
    """

    state: LLMatcher
    lexer: Lexer
    grammar: Grammar
    end_ids: tuple[int, ...]
    begins_after: tuple[int, ...]
    strings: BoundedStrings | None = None
    used_s: float = 0.0
    state_bytes: int = 0
    measured_at_s: float = 0.0
    _recent: tuple[int, ...] = ()
    _in_string: bool = False
    _unread: list[int] = field(default_factory=list[int])  # by the one of both that is behind

    def consume(self, token_ids: list[int]) -> None:
        """Takes the sequence's next tokens; raises MatcherFailed."""
        while token_ids and self.begins_after:
            token_id, *token_ids = token_ids
            self._recent = (*self._recent, token_id)[-len(self.begins_after) :]
            if self._recent == self.begins_after:
                self.begins_after = ()
        if self.strings is not None:
            self._unread += token_ids
        if self.strings is None or not self._in_string:
            self._read(token_ids)
        elif not self.strings.stay(token_ids):
            self._leave_string()

    def fill(self, row: Int32Array, num_generated: int) -> None:
        """Fills the next mask, `[words + PROBE_WORDS]`, without ids that may not end the sequence
        yet; raises MatcherFailed.
        """
        mask, ends, stops = row[:-PROBE_WORDS], self.end_ids, self.grammar.stop_ids
        if self.begins_after:
            mask[:] = _mask_without(ends, len(mask))
        else:
            if not self._fill_in_string(row):
                self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self.state.is_error():
                raise MatcherFailed(self._failure())
            if not set(ends) <= set(stops):
                _forbid(mask, ends)
        if num_generated < self.grammar.min_tokens:
            _forbid(mask, (*ends, *stops))

    def measure(self, memory: GrammarMemory) -> None:
        """Measures the memory of the state; raises MatcherFailed if it is too large."""
        self.measured_at_s = self.used_s
        second = [self.strings.state] if self.strings is not None else []
        self.state_bytes = memory.size_of(self.state, *second)
        if self.state_bytes > memory.max_state_bytes:
            raise MatcherFailed("its text takes more memory than it may")

    def _fill_in_string(self, row: Int32Array) -> bool:
        """Whether the second matcher has filled the mask."""
        if (strings := self.strings) is None:
            return False
        self._in_string = self._in_string or strings.enter(self.state, self._unread)
        if self._in_string and not strings.fill(row):
            self._leave_string()
        return self._in_string

    def _leave_string(self) -> None:
        unread, self._unread, self._in_string = self._unread, [], False
        self._read(unread)
        if self.strings is not None and self.strings.state.is_error():
            self.strings = None
            self.lexer.is_broken = True

    def _read(self, token_ids: list[int]) -> None:
        if token_ids and not self.state.consume_tokens(token_ids):
            failure = self._failure()
            is_mismatch = any(words in failure for words in _MISMATCHES)
            raise (UnexpectedToken if is_mismatch else MatcherFailed)(failure)

    def _failure(self) -> str:
        """Why the matcher cannot go on."""
        message = short(self.state.get_error())
        self.lexer.is_broken |= message.startswith(_LEXER_ERROR)
        return message


@dataclass(slots=True, eq=False)
class Matcher:
    """All demands of one sequence. Used by one thread at a time.

    Attributes:
        grammar: None: any text.
        allowed: mask of the ids that the request allows, `[words]`; None: all.
        bad_words: token ids of each, of which the last one is forbidden after the others.
        generated: completion tokens seen.
    """

    grammar: GrammarMatcher | None = None
    allowed: Int32Array | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    generated: list[int] = field(default_factory=list[int])

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def is_slow(self) -> bool:
        """Whether masks of the grammar take long."""
        return self.grammar is not None and self.grammar.lexer.is_slow

    def consume(self, token_ids: list[int]) -> None:
        """Takes the sequence's next tokens.

        Raises:
            MatcherFailed: they are not of the grammar.
        """
        self.generated += token_ids
        if self.grammar is not None:
            self.grammar.consume(token_ids)

    def fill(self, row: Int32Array) -> bool:
        """Fills the mask for the next token; whether it forbids any id.

        Args:
            row: `[words + PROBE_WORDS]`; its first words become the mask.

        Raises:
            MatcherFailed: the grammar cannot go on, or nothing is allowed.
        """
        mask = row[:-PROBE_WORDS]
        forbidden = [word[-1] for word in self.bad_words if self._ends_with(word[:-1])]
        if self.grammar is not None:
            self.grammar.fill(row, len(self.generated))
        elif self.allowed is None and not forbidden:
            return False
        else:
            mask[:] = -1
        if self.allowed is not None:
            mask &= self.allowed
        bits = mask.view(np.uint8)
        for token_id in forbidden:
            bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        if (forbidden or self.allowed is not None) and not mask.any():
            raise NothingAllowed("the request's demands leave no token that may come next")
        return True

    def _ends_with(self, prefix: tuple[int, ...]) -> bool:
        return not prefix or tuple(self.generated[-len(prefix) :]) == prefix


def mask_of(ids: list[int], num_words: int) -> Int32Array:
    """The mask that allows these ids; `[num_words]`."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


@lru_cache(_KEPT_MASKS)
def _mask_without(ids: tuple[int, ...], num_words: int) -> Int32Array:
    return ~mask_of(list(ids), num_words)


def _forbid(mask: Int32Array, ids: tuple[int, ...]) -> None:
    """Takes ids out of the mask, unless nothing would be left."""
    if len(ids) <= _FEW_IDS:  # hardly ever one of them is allowed
        bits = mask.data.cast("B")
        if not any([bits[number >> 3] >> (number & 7) & 1 for number in ids]):
            return
    kept = mask & _mask_without(ids, len(mask))
    if kept.any():
        mask[:] = kept
