"""A compiled grammar's lexer, which its sequences' matchers share.

Copies of an llguidance matcher have one lexer, behind a lock. What one sequence's masks have taught
it, the others need not learn; but a lexer that has reached a limit fails all of them, so that a
broken one is left for a new one.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.decoder.masks.compiler import Compiled

During = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True, eq=False)
class Lexer:
    """One lexer of a grammar.

    Attributes:
        compiled: with it, or to be.
        is_broken: it has reached a limit: no further sequence gets it.
    """

    compiled: "asyncio.Future[Compiled]"
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """Owner of a grammar's lexer. Used in the event loop.

    Attributes:
        compile: starts to make a lexer, in the context that it is given.
    """

    compile: "Callable[[During], asyncio.Future[Compiled]]"
    _lexer: Lexer | None = None

    def lexer(self, during: During) -> Lexer:
        """The lexer for one more sequence."""
        if self._lexer is None or self._lexer.is_broken:
            self._lexer = Lexer(self.compile(during))
        return self._lexer
