"""Matchers, which compute the tokens that may follow in one sequence: from a grammar, from allowed
tokens and from bad words.

`grammars.Grammars` creates matchers and runs them in threads. A matcher itself is plain state.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher

from services.decoder.masks.bounded_strings import BoundedStrings
from services.decoder.masks.compilations import Compilation
from services.decoder.masks.compiler import short
from services.decoder.masks.grammar import Grammar
from services.decoder.masks.grammar_memory import GrammarMemory
from services.decoder.masks.rows import PROBE_WORDS, Int32Array

_FEW_IDS = 16
_CACHED_MASKS = 256  # masks of end tokens and stop tokens of requests
# Messages of llguidance: the lexer has reached a limit, or a token was not allowed. Other messages
# name a limit of the parser.
_LEXER_ERROR = "lexer error"
_MISMATCHES = ("doesn't satisfy the grammar", "out of range")


class MatcherFailed(Exception):
    """A matcher cannot continue, for the reason in the message."""


class UnexpectedToken(MatcherFailed):
    """A token does not follow the grammar, although it was sampled under the grammar's masks."""


class NothingAllowed(MatcherFailed):
    """No token satisfies all constraints of the request."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lexer:
    """The lexer of a compiled grammar. Copies of an llguidance matcher share the lexer and its
    cached states, behind a lock. A lexer that has reached a limit fails in all copies, so it is
    replaced.

    Attributes:
        compilation: compilation of the grammar.
        is_broken: True if the lexer has reached a limit. No further sequence uses it.
        is_slow: True if masks of the grammar take or may take long. They are then filled in a
            thread.
    """

    compilation: Compilation
    is_broken: bool = False
    is_slow: bool = False


@dataclass(slots=True)
class GrammarMatcher:
    """The state of a grammar after the tokens of one sequence.

    Attributes:
        state: matcher of llguidance.
        lexer: lexer, which the sequence shares with other sequences.
        grammar: grammar of the completion.
        end_ids: end tokens of the model.
        begins_after: token ids after which the grammar begins. Empty once the grammar has begun.
        strings: second matcher for masks within bounded strings. None if the grammar has none.
        used_s: CPU seconds that the matcher has taken.
        state_bytes: bytes of the state at the last measurement. 0 before the first one.
        measured_at_s: CPU seconds that the matcher had taken at the last measurement.
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
    # Tokens that one of the two matchers has not read.
    _unread: list[int] = field(default_factory=list[int])

    def consume(self, token_ids: list[int]) -> None:
        """Reads the next tokens of the sequence.

        Raises:
            MatcherFailed: a token does not follow the grammar, or a limit is reached.
        """
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

    def copy(self) -> "GrammarMatcher":
        """Returns a copy in the same state."""
        strings = None if self.strings is None else self.strings.copy()
        return replace(
            self, state=self.state.deep_copy(), strings=strings, _unread=list(self._unread)
        )

    def ends_with(self, token_id: int) -> bool:
        """Returns whether a token may end the completion."""
        return token_id in self.end_ids or token_id in self.grammar.stop_ids

    def fill(self, row: Int32Array, num_generated: int) -> None:
        """Fills the next mask.

        Args:
            row: `[num_words + PROBE_WORDS]`. The mask is in its first words.
            num_generated: number of completion tokens. End tokens and stop tokens are masked out
                before `min_tokens`.

        Raises:
            MatcherFailed: the grammar has reached a limit.
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
        """Measures the memory of the state.

        Raises:
            MatcherFailed: the state takes too much memory.
        """
        self.measured_at_s = self.used_s
        second = [self.strings.state] if self.strings is not None else []
        self.state_bytes = memory.size_of(self.state, *second)
        if self.state_bytes > memory.max_state_bytes:
            raise MatcherFailed("its text takes more memory than is allowed")

    def _fill_in_string(self, row: Int32Array) -> bool:
        """Returns whether the second matcher has filled the mask."""
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
        """Returns the reason why the matcher cannot continue."""
        message = short(self.state.get_error())
        self.lexer.is_broken |= message.startswith(_LEXER_ERROR)
        return message


@dataclass(slots=True, eq=False)
class Matcher:
    """All constraints of one sequence, in their state after its tokens. Only one thread at a time
    uses a matcher.

    Attributes:
        grammar: state of the grammar. None if any text is allowed.
        allowed: mask of the allowed tokens, `[num_words]`. None if all tokens are allowed.
        bad_words: token ids of each word. The last token of a word is forbidden after the others.
        generated: completion tokens so far.
    """

    grammar: GrammarMatcher | None = None
    allowed: Int32Array | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    generated: list[int] = field(default_factory=list[int])

    @property
    def num_generated(self) -> int:
        """Number of completion tokens that the matcher has read."""
        return len(self.generated)

    @property
    def is_slow(self) -> bool:
        """Returns whether masks of the grammar take long."""
        return self.grammar is not None and self.grammar.lexer.is_slow

    def consume(self, token_ids: list[int]) -> None:
        """Reads the next tokens of the sequence.

        Raises:
            MatcherFailed: a token does not follow the grammar, or a limit is reached.
        """
        self.generated += token_ids
        if self.grammar is not None:
            self.grammar.consume(token_ids)

    def fill(self, row: Int32Array) -> bool:
        """Fills the mask for the next token.

        Args:
            row: `[num_words + PROBE_WORDS]`. The mask is in its first words.

        Returns:
            Whether the mask forbids any token.

        Raises:
            MatcherFailed: the grammar has reached a limit, or no token is allowed.
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
            raise NothingAllowed("the request's constraints leave no token that may come next")
        return True

    def fill_drafts(self, drafts: list[int], rows: Int32Array) -> int:
        """Fills the masks of the tokens behind drafts, as if the drafts had been sampled.

        A copy of the matcher reads the drafts, so that this matcher never sees a rejected one.

        Args:
            drafts: token ids that may come next, in this order.
            rows: `[1 + len(drafts), num_words + PROBE_WORDS]`. The first has the mask of the next
                token.

        Returns:
            Number of drafts, from the first on, that the masks before them allow and behind which
            the completion goes on. Their masks are filled.
        """
        copy: Matcher | None = None
        for count, draft in enumerate(drafts):
            mask = rows[count]
            if not mask[draft >> 5] >> (draft & 31) & 1:
                return count
            if self.grammar is not None and self.grammar.ends_with(draft):
                return count
            if copy is None:
                grammar = None if self.grammar is None else self.grammar.copy()
                copy = replace(self, grammar=grammar, generated=list(self.generated))
            try:
                copy.consume([draft])
                if not copy.fill(rows[count + 1]):
                    rows[count + 1] = -1
            except MatcherFailed:
                return count  # if the draft is sampled, this matcher will fail in the same way
        return len(drafts)

    def _ends_with(self, prefix: tuple[int, ...]) -> bool:
        return not prefix or tuple(self.generated[-len(prefix) :]) == prefix


def mask_of(ids: list[int], num_words: int) -> Int32Array:
    """Returns the mask that allows these tokens, `[num_words]`."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


@lru_cache(_CACHED_MASKS)
def _mask_without(ids: tuple[int, ...], num_words: int) -> Int32Array:
    return ~mask_of(list(ids), num_words)


def _forbid(mask: Int32Array, ids: tuple[int, ...]) -> None:
    """Removes tokens from the mask, unless no token would be left."""
    if len(ids) <= _FEW_IDS:  # these tokens are rarely allowed
        bits = mask.data.cast("B")
        if not any([bits[number >> 3] >> (number & 7) & 1 for number in ids]):
            return
    remaining = mask & _mask_without(ids, len(mask))
    if remaining.any():
        mask[:] = remaining
