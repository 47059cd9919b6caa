"""Token masks of a process's sequences: from the tokens of a step to the masks of the next one.

Most masks are filled in the event loop, as they take microseconds. A sequence's first mask, for
which its grammar is compiled, and the masks of a grammar that has had a slow one are filled in a
thread, so that the other sequences' masks do not wait.
"""

import asyncio
import logging
import time
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
from services.decoder.masks.grammar import Demands, GrammarSource
from services.decoder.masks.grammars import Found, Grammars, is_failure
from services.decoder.masks.matcher import (
    GrammarMatcher,
    Matcher,
    MatcherFailed,
    NothingAllowed,
    UnexpectedToken,
)
from services.decoder.masks.messages import CannotFollow, MaskTimes, ThreadTaken, ToProcess
from services.decoder.masks.rows import FILLING, MaskRows
from services.decoder.masks.work_thread import WorkThread

log = logging.getLogger(__name__)

# As many masks are filled and sent together, so that a slow one makes few others late.
_AT_ONCE = 16
# A sequence that breaks one lexer after the other has a grammar that takes too much work.
_TOKENS_PER_LEXER = 500
_GIVE_WAY_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class _Masked:
    """A sequence.

    Attributes:
        number: the engine's number of the sequence.
        is_slow: whether its grammar takes long to compile.
        matcher: its matcher; None until its grammar has been compiled.
        thread: thread that has the matcher and the row; None if the event loop has them.
        task: task that waits for the thread.
        num_renewed: number of matchers that were made anew.
        is_removed: whether the front has forgotten the sequence.
    """

    number: int
    row: int
    demands: Demands
    generated: list[int]
    is_slow: bool = False
    matcher: Matcher | None = None
    thread: WorkThread | None = None
    task: asyncio.Task[None] | None = None
    num_renewed: int = 0
    is_removed: bool = False

    @property
    def source(self) -> GrammarSource | None:
        """The sequence's grammar."""
        return self.demands.grammar.source if self.demands.grammar is not None else None

    @property
    def grammar(self) -> GrammarMatcher | None:
        """The compiled grammar after the sequence's tokens; None if there is none so far."""
        return self.matcher.grammar if self.matcher is not None else None

    @property
    def state_bytes(self) -> int:
        """Memory of the grammar's state, as it was measured last."""
        return self.grammar.state_bytes if self.grammar is not None else 0


@dataclass(slots=True, eq=False)
class SequenceMasks:
    """Owner of the matchers, one for each running sequence whose tokens are masked.

    Attributes:
        rows: memory that masks are filled in.
        link: number of this process, see `MaskLink`.
        engine: channel for masks.
        front: channel for the first masks of sequences, and for what the front has to know.
        times: gets the seconds that the masks of a step took.
        max_work_s: CPU seconds after which a piece of work in a thread is given up.
    """

    grammars: Grammars
    rows: MaskRows
    link: int
    engine: FrontChannel[NewTokens]
    front: FrontChannel[ToProcess]
    times: MaskTimes
    max_work_s: float
    _sequences: dict[int, _Masked] = field(default_factory=dict[int, _Masked])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def add(self, number: int, demands: Demands, generated: list[int], is_slow: bool) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows.

        Args:
            demands: demands of its completion.
            is_slow: whether its grammar takes long to compile.
        """
        row = self.rows.take()
        if row is None:
            self._fail(number, Overloaded("too many sequences have token masks"))
            return
        sequence = self._sequences[number] = _Masked(number, row, demands, generated, is_slow)
        self._start(sequence, self.front)

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
            if sequence is None or len(sequence.generated) != count - len(token_ids):
                continue
            sequence.generated += token_ids
            if sequence.thread is not None or sequence.matcher is None:
                continue  # its task looks for further tokens, or it has failed
            if sequence.matcher.is_slow:
                self._start(sequence, self.engine)
            else:
                work.append(sequence)
        if not work:
            return
        started = time.monotonic()
        for first in range(0, len(work), _AT_ONCE):
            part = work[first : first + _AT_ONCE]
            self._send(part, [self._fill(sequence) for sequence in part], self.engine)
        self.times.seconds.append(time.monotonic() - started)

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        if (sequence := self._sequences.pop(number, None)) is not None:
            sequence.is_removed = True
            if sequence.thread is None:
                self.rows.give_back(sequence.row)

    def check_threads(self) -> None:
        """Gives up work that has taken a thread too long, and sequences that wait behind it."""
        for thread in (self.grammars.quick, self.grammars.slow):
            if thread.is_taken or thread.used_s() <= self.max_work_s:
                continue
            thread.is_taken = True
            log.error("work on a grammar takes too long", extra={"fields": _work_of(thread)})
            waiting = [s for s in self._sequences.values() if s.thread is thread]
            self._give_up(waiting, thread)

    def check_memory(self) -> None:
        """Keeps what grammars and matchers take within the bound. Where it does not do to forget
        compiled grammars, sequences give way: those of large states first, then the youngest.
        """
        self.grammars.trim()
        memory = self.grammars.memory
        if not memory.has_room:
            memory.release()
        for _ in range(_GIVE_WAY_AT_ONCE):
            holders = [s for s in self._sequences.values() if s.grammar is not None]
            if not holders or not memory.is_over:
                break
            large = memory.max_state_bytes // 2
            sequence = max(holders, key=lambda s: (max(s.state_bytes, large), s.number))
            log.warning("a sequence gives way", extra={"fields": {"sequence": sequence.number}})
            message = "the grammars of running sequences take too much memory"
            self._fail(sequence.number, Overloaded(message))
            self.remove(sequence.number)
            if sequence.thread is not None:
                break  # which has the matcher for now
            sequence.matcher = None
            memory.release()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.grammars.close()

    def _start(self, sequence: _Masked, to: FrontChannel[Any]) -> None:
        """Has a thread fill the next mask of a sequence, and compile its grammar before."""
        is_slow = sequence.is_slow or sequence.matcher is not None
        thread = self.grammars.slow if is_slow else self.grammars.quick
        if thread.is_taken:
            self._give_up([sequence], thread)
            return
        sequence.thread = thread
        sequence.task = task = asyncio.create_task(self._work(sequence, to))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, sequence: _Masked, to: FrontChannel[Any]) -> None:
        try:
            mask = await self._fill_in_thread(sequence)
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
            sequence.thread = None
            if sequence.is_removed:
                self.rows.give_back(sequence.row)
        self._send([sequence], [mask], to)

    async def _fill_in_thread(self, sequence: _Masked) -> Found:
        thread, number = sequence.thread, sequence.number
        assert thread is not None
        if (matcher := sequence.matcher) is None:
            matcher = await self.grammars.matcher(sequence.demands, number, thread)
            sequence.matcher = matcher
        row = self.rows.array[sequence.row]
        while True:
            unread = sequence.generated[matcher.num_generated :]
            work = partial(self.grammars.fill, matcher, unread, row)
            mask = await thread.run(number, sequence.source, work)
            # The tokens of a step may have come meanwhile, of a sequence that another process had.
            if isinstance(mask, MatcherFailed) or (
                matcher.num_generated == len(sequence.generated)
            ):
                return mask

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
        """Returns whether a sequence whose matcher has failed gets another one, because others'
        texts may have led to its lexer's limit.
        """
        matcher = sequence.matcher
        if matcher is None or matcher.grammar is None or not matcher.grammar.lexer.is_broken:
            return False
        if sequence.num_renewed > len(sequence.generated) // _TOKENS_PER_LEXER:
            return False
        sequence.num_renewed += 1
        sequence.matcher = None
        self._start(sequence, self.front)
        return True

    def _give_up(self, sequences: list[_Masked], thread: WorkThread) -> None:
        """Leaves sequences that wait for a thread which is taken to another process."""
        numbers = [sequence.number for sequence in sequences]
        self.front.send(ThreadTaken(thread.source, numbers))
        for sequence in sequences:
            # The row of the sequence in work is the thread's until the work is done.
            if sequence.task is not None and sequence.number != thread.number:
                sequence.task.cancel()
            self.remove(sequence.number)

    def _fail(self, number: int, error: TriptychError) -> None:
        self.front.send(CannotFollow(number, error.code, error.message))


def _work_of(thread: WorkThread) -> dict[str, object]:
    return {"sequence": thread.number, "cpu_s": round(thread.used_s(), 1)}


def _error_of(failure: MatcherFailed) -> TriptychError:
    if isinstance(failure, NothingAllowed):
        return InvalidRequest(str(failure))
    if isinstance(failure, UnexpectedToken):
        return InternalError(f"the grammar cannot be followed: {failure}")
    return InvalidGrammar(f"it takes too much work to follow: {failure}")
