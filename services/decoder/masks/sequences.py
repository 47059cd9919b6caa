"""Fills the token masks of a mask process: from the tokens of a step to the masks of the next step.

Most masks are filled in the event loop, because they take microseconds. Three kinds of masks are
filled in a thread, so that other sequences do not wait: the first mask of a sequence, for which the
grammar is compiled, the masks of a grammar that has had a slow mask, and the masks of a grammar
that a client has written.
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
    NoTokenAllowed,
    Overloaded,
    TriptychError,
)
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import NewTokens, TokenMasks
from services.decoder.masks.grammar import GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Found, Grammars
from services.decoder.masks.matcher import (
    GrammarMatcher,
    Matcher,
    MatcherFailed,
    NothingAllowed,
    UnexpectedToken,
)
from services.decoder.masks.messages import CannotFollow, Follow, MaskTimes, ThreadStuck, ToProcess
from services.decoder.masks.rows import FILLING, MaskRows
from services.decoder.masks.work_thread import WorkThread, is_failure

log = logging.getLogger(__name__)

# Masks are filled and sent in groups of this size, so that a slow mask delays few other masks.
_AT_ONCE = 16
# A sequence fails if it brings lexers to their limits more often than once per this many tokens.
_TOKENS_PER_LEXER = 500
_GIVE_WAY_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class _MaskedSequence:
    """A sequence with token masks.

    Attributes:
        number: the engine's number of the sequence.
        row: first row for the masks of the sequence.
        constraints: constraints on the tokens of the sequence.
        generated: completion tokens so far.
        drafts: drafts behind these tokens that the engine wants masks for.
        is_slow: True if the grammar takes long to compile.
        tenant: tenant that is charged for the compilation of the grammar.
        background: True if the compilation of the grammar comes behind those for requests.
        matcher: matcher of the sequence. None until the grammar has been compiled.
        thread: thread that uses the matcher and the row. None if the event loop uses them.
        task: task that waits for the thread. None before the first one.
        num_renewed: number of times that the matcher was replaced.
        is_removed: True if the front has removed the sequence.
    """

    number: int
    row: int
    constraints: TokenConstraints
    generated: list[int]
    is_slow: bool
    tenant: str
    background: bool
    matcher: Matcher | None = None
    thread: WorkThread | None = None
    task: asyncio.Task[None] | None = None
    num_renewed: int = 0
    is_removed: bool = False
    drafts: list[int] = field(default_factory=list[int])

    @property
    def source(self) -> GrammarSource | None:
        """The sequence's grammar."""
        return self.constraints.grammar.source if self.constraints.grammar is not None else None

    @property
    def grammar(self) -> GrammarMatcher | None:
        """The matcher of the grammar. None if there is no compiled grammar."""
        return self.matcher.grammar if self.matcher is not None else None

    @property
    def state_bytes(self) -> int:
        """Bytes of the matcher's state at the last measurement."""
        return self.grammar.state_bytes if self.grammar is not None else 0


@dataclass(slots=True, eq=False)
class SequenceMasks:
    """Owner of the matchers, one for each running sequence whose tokens are masked.

    Attributes:
        grammars: compiled grammars and threads of the process.
        rows: memory for the masks.
        link: number of this process; see `MaskLink`.
        engine: channel to the engine.
        front: channel to the front, for the first masks of sequences and for reports.
        times: report to which the seconds of each step's masks are added.
        max_work_s: CPU seconds after which a thread's piece of work is abandoned.
    """

    grammars: Grammars
    rows: MaskRows
    link: int
    engine: FrontChannel[NewTokens]
    front: FrontChannel[ToProcess]
    times: MaskTimes
    max_work_s: float
    _sequences: dict[int, _MaskedSequence] = field(default_factory=dict[int, _MaskedSequence])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def add(self, follow: Follow) -> None:
        """Adds a sequence, and fills its next mask."""
        number, row = follow.sequence_id, self.rows.take()
        if row is None:
            self._fail(number, Overloaded("too many sequences have token masks"))
            return
        sequence = self._sequences[number] = _MaskedSequence(
            number,
            row,
            follow.constraints,
            follow.generated,
            follow.is_slow,
            follow.tenant,
            follow.background,
        )
        self._start(sequence, self.front)

    def tokens_arrived(self, tokens: NewTokens) -> None:
        """Fills the next masks of running sequences that have new tokens. Sequences of other
        processes and known tokens are ignored. Tokens that follow a gap are ignored, too, because
        the front sends the missing tokens in order.
        """
        work: list[_MaskedSequence] = []
        all_drafts = tokens.drafts or [[]] * len(tokens.sequence_ids)
        for number, token_ids, count, drafts in zip(
            tokens.sequence_ids, tokens.token_ids, tokens.num_generated, all_drafts, strict=True
        ):
            sequence = self._sequences.get(number)
            if sequence is None or len(sequence.generated) != count - len(token_ids):
                continue
            sequence.generated += token_ids
            sequence.drafts = drafts
            if sequence.thread is not None or sequence.matcher is None:
                continue  # the sequence has failed, or its task will find the new tokens
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
        """Removes a sequence that has ended. Does nothing if the sequence is not known."""
        if (sequence := self._sequences.pop(number, None)) is not None:
            sequence.is_removed = True
            if sequence.thread is None:
                self.rows.release(sequence.row)
            elif sequence.matcher is None and sequence.task is not None:
                sequence.task.cancel()  # it waits for the grammar, so no thread uses the row

    def check_threads(self) -> None:
        """Abandons threads whose work takes too long, with the sequences that wait for them."""
        for thread in self.grammars.threads:
            if thread.is_stuck or thread.used_s() <= self.max_work_s:
                continue
            thread.is_stuck = True
            log.error(
                "the work on a grammar takes too long, so its thread gets no more work",
                extra={"fields": _work_of(thread)},
            )
            waiting = [s for s in self._sequences.values() if s.thread is thread]
            self._give_up(waiting, thread)

    def check_memory(self) -> None:
        """Keeps the memory of grammars and matchers within the bound. If dropping compiled grammars
        is not enough, sequences fail: sequences with large states first, then the youngest.
        """
        self.grammars.trim()
        memory = self.grammars.memory
        if not memory.has_room_beside(0):
            memory.release()
        for _ in range(_GIVE_WAY_AT_ONCE):
            holders = [s for s in self._sequences.values() if s.grammar is not None]
            if not holders or not memory.is_over:
                break
            large = memory.max_state_bytes // 2
            sequence = max(holders, key=lambda s: (max(s.state_bytes, large), s.number))
            log.warning(
                "a sequence is ended, because grammars take too much memory",
                extra={"fields": {"sequence": sequence.number}},
            )
            message = "the grammars of running sequences take too much memory"
            self._fail(sequence.number, Overloaded(message))
            self.remove(sequence.number)
            if sequence.thread is not None:
                break  # the thread still uses the matcher
            sequence.matcher = None
            memory.release()

    async def close(self) -> None:
        """Cancels all work, and ends the threads when they are idle."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.grammars.close()

    def _start(self, sequence: _MaskedSequence, to: FrontChannel[Any]) -> None:
        """Lets a thread compile the grammar of a sequence, if necessary, and fill its next mask."""
        thread = self._thread_of(sequence)
        if thread.is_stuck:
            self._give_up([sequence], thread)
            return
        sequence.thread = thread
        sequence.task = task = asyncio.create_task(self._work(sequence, to))
        self._tasks.add(task)
        task.add_done_callback(partial(self._has_ended, sequence))

    def _thread_of(self, sequence: _MaskedSequence) -> WorkThread:
        """Returns the thread for the next work on a sequence."""
        if sequence.source is not None and sequence.source.by_client:
            return self.grammars.clients
        is_slow = sequence.is_slow or sequence.matcher is not None
        return self.grammars.slow if is_slow else self.grammars.quick

    async def _work(self, sequence: _MaskedSequence, to: FrontChannel[Any]) -> None:
        try:
            mask = await self._fill_in_thread(sequence)
        except TriptychError as error:
            self._fail(sequence.number, error)
            return
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("a grammar could not be compiled")
            self._fail(sequence.number, InternalError("the grammar could not be compiled"))
            return
        finally:
            self._leave_thread(sequence)
        self._send([sequence], [mask], to)

    def _has_ended(self, sequence: _MaskedSequence, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._leave_thread(sequence)  # a task that was cancelled at once has not begun

    def _leave_thread(self, sequence: _MaskedSequence) -> None:
        """Records that no thread uses a sequence's matcher and row any more."""
        if sequence.thread is not None and sequence.is_removed:
            self.rows.release(sequence.row)
        sequence.thread = None

    async def _fill_in_thread(self, sequence: _MaskedSequence) -> Found:
        thread, number = sequence.thread, sequence.number
        assert thread is not None
        if (matcher := sequence.matcher) is None:
            matcher = await self.grammars.matcher(
                sequence.constraints,
                number,
                thread,
                tenant=sequence.tenant,
                background=sequence.background,
            )
            sequence.matcher = matcher
        row = self.rows.array[sequence.row]
        while True:
            unread = sequence.generated[matcher.num_generated :]
            work = partial(self.grammars.fill, matcher, unread, row)
            mask = await thread.run(number, sequence.source, work)
            # More tokens may have arrived meanwhile, if another process had the sequence before.
            if isinstance(mask, MatcherFailed) or (
                matcher.num_generated == len(sequence.generated)
            ):
                return mask

    def _fill(self, sequence: _MaskedSequence) -> Found:
        matcher = sequence.matcher
        assert matcher is not None
        self.rows.marks.set(FILLING, sequence.number)
        unread = sequence.generated[matcher.num_generated :]
        found = self.grammars.fill(matcher, unread, self.rows.array[sequence.row])
        self.rows.marks.set(FILLING, 0)
        return found

    def _send(
        self, sequences: list[_MaskedSequence], masks: list[Found], to: FrontChannel[Any]
    ) -> None:
        found, has_drafts = TokenMasks([], [], [], self.link), False
        for sequence, mask in zip(sequences, masks, strict=True):
            if sequence.is_removed:
                continue
            if isinstance(mask, MatcherFailed):
                if not self._renews(sequence):
                    self._fail(sequence.number, _error_of(mask))
            else:
                found.sequence_ids.append(sequence.number)
                found.num_generated.append(len(sequence.generated))
                num_drafts = self._fill_drafts(sequence, has_mask=mask)
                found.rows.append(sequence.row if mask or num_drafts else -1)
                found.num_drafts.append(num_drafts)
                has_drafts |= num_drafts > 0
        if not has_drafts:
            found.num_drafts = []
        if found.sequence_ids:
            to.send(found)

    def _fill_drafts(self, sequence: _MaskedSequence, *, has_mask: bool) -> int:
        """Fills the masks behind a sequence's drafts, after the mask of its next token. Returns how
        many drafts have masks. Sequences whose masks take long have none.
        """
        matcher, drafts, sequence.drafts = sequence.matcher, sequence.drafts, []
        if not drafts or matcher is None or matcher.is_slow:
            return 0
        rows = self.rows.array[sequence.row : sequence.row + self.rows.count]
        if not has_mask:
            rows[0] = -1
        self.rows.marks.set(FILLING, sequence.number)
        count = self.grammars.fill_drafts(matcher, drafts[: len(rows) - 1], rows)
        self.rows.marks.set(FILLING, 0)
        return count

    def _renews(self, sequence: _MaskedSequence) -> bool:
        """Returns whether a sequence whose matcher has failed gets a new matcher, because the texts
        of other sequences may have brought the shared lexer to its limit.
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

    def _give_up(self, sequences: list[_MaskedSequence], thread: WorkThread) -> None:
        """Leaves sequences that wait for a stuck thread to another process."""
        numbers = [sequence.number for sequence in sequences]
        self.front.send(ThreadStuck(thread.source, numbers))
        for sequence in sequences:
            # The stuck thread uses the row of its sequence until the work is done.
            if sequence.task is not None and sequence.number != thread.number:
                sequence.task.cancel()
            self.remove(sequence.number)

    def _fail(self, number: int, error: TriptychError) -> None:
        self.front.send(CannotFollow(number, error.code, error.message))


def _work_of(thread: WorkThread) -> dict[str, object]:
    return {"sequence": thread.number, "cpu_s": round(thread.used_s(), 1)}


def _error_of(failure: MatcherFailed) -> TriptychError:
    if isinstance(failure, NothingAllowed):
        return NoTokenAllowed(str(failure))
    if isinstance(failure, UnexpectedToken):
        return InternalError(f"a token does not follow the grammar: {failure}")
    return InvalidGrammar(f"it takes too much work to follow: {failure}")
