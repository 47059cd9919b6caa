"""A compiled grammar: the lexers that its sequences' matchers share.

Copies of an llguidance matcher have one lexer, behind a lock. What one sequence's masks have taught
it, the others need not learn; but their masks are filled one after the other, on however many
threads, and a lexer that has reached a limit fails all of them. So there are several where many
sequences run, and a broken one is left.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from llguidance import LLMatcher

from services.common.errors import Overloaded
from services.decoder.bounded_strings import BoundedStrings

# So many sequences share a lexer before another one is made: masks of a step that one thread fills
# in a fraction of the step.
_MATCHERS_PER_LEXER = 4


class Compiled(NamedTuple):
    """A grammar at its start, with a lexer of its own; sequences get copies."""

    state: LLMatcher
    strings: BoundedStrings | None


@dataclass(slots=True, eq=False)
class Lexer:
    """One lexer of a grammar.

    Attributes:
        grammar: whose it is.
        compiled: with it, or to be.
        number: of the lexer; masks of one lexer are filled one after the other.
        num_matchers: of running sequences.
        is_broken: it has reached a limit: no further sequence gets it.
    """

    grammar: "CompiledGrammar"
    compiled: "asyncio.Future[Compiled]"
    number: int
    num_matchers: int = 1
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """Owner of a grammar's lexers. Used in the event loop.

    Attributes:
        compile: starts to make a lexer; raises Overloaded.
        max_lexers: as many as threads that fill masks.
    """

    compile: "Callable[[], asyncio.Future[Compiled]]"
    max_lexers: int
    _lexers: list[Lexer] = field(default_factory=list[Lexer])
    _num_made: int = 0

    def take(self) -> Lexer:
        """A lexer for one more sequence, which has to give it back.

        Raises:
            Overloaded: there is none, and too many grammars are being compiled.
        """
        self._lexers = [lexer for lexer in self._lexers if not lexer.is_broken]
        least = min(self._lexers, key=lambda lexer: lexer.num_matchers, default=None)
        if least is None or self._is_short(least):
            try:
                compiling = self.compile()
            except Overloaded:
                if least is None:
                    raise
            else:
                self._num_made += 1
                lexer = Lexer(self, compiling, self._num_made)
                self._lexers.append(lexer)
                return lexer
        least.num_matchers += 1
        return least

    def give_back(self, lexer: Lexer) -> None:
        """A sequence is done with it. One stays, for the sequences to come."""
        lexer.num_matchers -= 1
        if not lexer.num_matchers and len(self._lexers) > 1 and lexer in self._lexers:
            self._lexers.remove(lexer)

    def _is_short(self, least: Lexer) -> bool:
        return least.num_matchers >= _MATCHERS_PER_LEXER and len(self._lexers) < self.max_lexers
