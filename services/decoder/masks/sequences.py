"""Token masks of a process's sequences: from the tokens of a step to the masks of the next one."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.common.errors import (
    InternalError,
    InvalidGrammar,
    InvalidRequest,
    Overloaded,
    TriptychError,
)
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks.grammar import Demands
from services.decoder.masks.grammars import Found, Grammars, is_failure
from services.decoder.masks.matcher import Matcher, MatcherFailed, NothingAllowed, UnexpectedToken
from services.decoder.masks.messages import ToProcess
from services.decoder.masks.rows import COMPILING, FILLING, MaskRows

log = logging.getLogger(__name__)

# As many masks are filled and sent together, so that a slow one makes few others late.
_AT_ONCE = 16
# A sequence that breaks one lexer after the other has a grammar that takes too much work.
_TOKENS_PER_LEXER = 500


@dataclass(slots=True, eq=False)
class _Masked:
    """A sequence.

    Attributes:
        number: the engine's id of it.
        matcher: None: being compiled, or its first mask is filled in the thread.
        num_renewed: matchers that were made anew.
        is_begun: the thread may write to the row.
        is_removed: the front has forgotten it.
    """

    number: int
    row: int
    demands: Demands
    generated: list[int]
    matcher: Matcher | None = None
    num_renewed: int = 0
    is_begun: bool = False
    is_removed: bool = False


@dataclass(slots=True, eq=False)
class SequenceMasks:
    """Owner of the matchers, one for each running sequence whose tokens are masked.

    Attributes:
        rows: what masks are filled in.
        link: the number of this process, see `MaskLink`.
        engine: gets the masks.
        first: gets the first masks of sequences.
        observe: called with the seconds that the masks of a step took.
        failed: called with a sequence's number and an error when it cannot go on.
    """

    grammars: Grammars
    rows: MaskRows
    link: int
    engine: FrontChannel[NewTokens]
    first: FrontChannel[ToProcess]
    observe: Callable[[float], None]
    failed: Callable[[int, TriptychError], None]
    _sequences: dict[int, _Masked] = field(default_factory=dict[int, _Masked])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def add(self, number: int, demands: Demands, generated: list[int]) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows.

        Args:
            demands: of its completion.
        """
        row = self.rows.take()
        if row is None:
            self.failed(number, Overloaded("too many sequences have token masks"))
            return
        sequence = self._sequences[number] = _Masked(number, row, demands, generated)
        self._start(sequence)

    def tokens_arrived(self, tokens: NewTokens) -> None:
        """Fills the next masks of sequences that had tokens in a step and go on. Of another
        process's sequences nothing is known; tokens that are known already are ignored, and so are
        those before which some are missing: the front sends them in order.
        """
        work: list[_Masked] = []
        for number, token_ids, count in zip(
            tokens.sequence_ids, tokens.token_ids, tokens.num_generated, strict=True
        ):
            sequence = self._sequences.get(number)
            if sequence is not None and len(sequence.generated) == count - len(token_ids):
                sequence.generated += token_ids
                if sequence.matcher is not None:
                    work.append(sequence)
        if not work:
            return
        started = time.monotonic()
        for first in range(0, len(work), _AT_ONCE):
            part = work[first : first + _AT_ONCE]
            self._send(part, [self._fill(sequence) for sequence in part], self.engine)
        self.observe(time.monotonic() - started)

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        if (sequence := self._sequences.pop(number, None)) is not None:
            sequence.is_removed = True
            if not sequence.is_begun:
                self.rows.give_back(sequence.row)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.grammars.close()

    async def _begin(self, sequence: _Masked) -> None:
        during = partial(self.rows.marks.during, COMPILING, sequence.number)
        try:
            matcher = await self.grammars.matcher(sequence.demands, during)
            row, known = self.rows.array[sequence.row], sequence.generated.copy()

            def fill() -> Found:
                with during():
                    return self.grammars.fill(matcher, known, row)

            # In the thread, because the first mask takes longest: up to a second.
            loop = asyncio.get_running_loop()
            mask = await loop.run_in_executor(self.grammars.compiler, fill)
        except TriptychError as error:
            self._fail(sequence.number, error)
            return
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("a grammar was not compiled")
            self._fail(sequence.number, InternalError("the grammar was not compiled"))
            return
        finally:
            sequence.is_begun = False
            if sequence.is_removed:
                self.rows.give_back(sequence.row)
        sequence.matcher = matcher
        # The tokens of a step may have come meanwhile, of a sequence that another process had.
        while not isinstance(mask, MatcherFailed) and (
            len(sequence.generated) > matcher.num_generated
        ):
            mask = self._fill(sequence)
        self._send([sequence], [mask], self.first)

    def _fill(self, sequence: _Masked) -> Found:
        matcher = sequence.matcher
        assert matcher is not None
        self.rows.marks.set(FILLING, sequence.number)
        unread = sequence.generated[matcher.num_generated :]
        found = self.grammars.fill(matcher, unread, self.rows.array[sequence.row])
        self.rows.marks.set(FILLING, 0)
        return found

    def _send(self, sequences: list[_Masked], masks: list[Found], to: FrontChannel[Any]) -> None:
        found = TokenMasks([], [], [], self.link)
        for sequence, mask in zip(sequences, masks, strict=True):
            if sequence.is_removed:
                continue
            if isinstance(mask, MatcherFailed):
                if not self._renews(sequence):
                    self._fail(sequence.number, _error_of(mask))
            else:
                found.sequence_ids.append(sequence.number)
                found.num_generated.append(len(sequence.generated))
                found.rows.append(sequence.row if mask else -1)
        if found.sequence_ids:
            to.send(found)

    def _renews(self, sequence: _Masked) -> bool:
        """Whether a sequence whose matcher has failed gets another one, because others' texts may
        have led to its lexer's limit.
        """
        matcher = sequence.matcher
        if matcher is None or matcher.grammar is None or not matcher.grammar.lexer.is_broken:
            return False
        if sequence.num_renewed > len(sequence.generated) // _TOKENS_PER_LEXER:
            return False
        sequence.num_renewed += 1
        sequence.matcher = None
        self._start(sequence)
        return True

    def _fail(self, number: int, error: TriptychError) -> None:
        if number in self._sequences:
            self.failed(number, error)

    def _start(self, sequence: _Masked) -> None:
        sequence.is_begun = True
        task = asyncio.create_task(self._begin(sequence))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error_of(failure: MatcherFailed) -> TriptychError:
    if isinstance(failure, NothingAllowed):
        return InvalidRequest(str(failure))
    if isinstance(failure, UnexpectedToken):
        return InternalError(f"the grammar cannot be followed: {failure}")
    return InvalidGrammar(f"it takes too much work to follow: {failure}")
