"""Token masks of the front's sequences: from the tokens of a step to the masks of the next one.

`DecoderFront` reports sequences whose tokens are masked here, and their tokens. llguidance fills
the masks, in threads of its own, in memory that the engine reads; the engine samples the step under
way when they are there.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from services.common.errors import (
    InternalError,
    InvalidGrammar,
    InvalidRequest,
    Overloaded,
    TriptychError,
)
from services.decoder.embeddings import EngineSender
from services.decoder.engine.messages import TokenMask, TokenMasks
from services.decoder.grammar import Demands, Found, Grammars
from services.decoder.mask_rows import MaskRows
from services.decoder.matcher import Matcher, MatcherFailed, NothingAllowed, UnexpectedToken

log = logging.getLogger(__name__)

# The masks of a step are filled at once, before anything else is done with the step's events, if
# that is expected to take no longer; else in a thread. Most take 0.02 to 0.2 ms.
_INLINE_S = 3e-3
# So many are filled together and sent, so that a slow one makes few others late.
_AT_ONCE = 16
_NEWEST = 0.2  # of the mean
# A sequence that breaks one lexer after the other has a grammar that takes too much work.
_TOKENS_PER_LEXER = 500


@dataclass(slots=True, eq=False)
class _Masked:
    """A sequence.

    Attributes:
        number: the engine's id of it.
        row: of its masks.
        demands: of the completion.
        matcher: None: being compiled.
        num_renewed: matchers that were made anew.
        num_writers: tasks that may write to the row.
        is_removed: the front has forgotten it.
    """

    number: int
    row: int
    demands: Demands
    matcher: Matcher | None = None
    num_renewed: int = 0
    num_writers: int = 0
    is_removed: bool = False


# A sequence, its completion tokens, its matcher, the tokens that are new.
_Work = tuple[_Masked, int, Matcher, list[int]]


class SequenceMasks:
    """Owner of the matchers, one for each running sequence whose tokens are masked.

    Args:
        grammars: compiles them.
        rows: what masks are filled in; closed with this.
        engine: gets the masks.
        observe: called with the seconds that the masks of a step took.
        failed: called with a sequence's number and an error when it cannot go on.
        first: gets the first masks of sequences, instead of `engine`.
    """

    def __init__(
        self,
        grammars: Grammars,
        rows: MaskRows,
        engine: EngineSender,
        observe: Callable[[float], None],
        failed: Callable[[int, TriptychError], None],
        first: EngineSender | None = None,
    ) -> None:
        self._grammars = grammars
        self._rows = rows
        self._engine = engine
        self._first = first or engine
        self._observe = observe
        self._failed = failed
        self._sequences: dict[int, _Masked] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds_per_mask = 0.0  # lately
        self._engine_reads_rows = False
        engine.send(rows.message)

    def rows_opened(self) -> None:
        """The engine reads the rows: masks need not be sent."""
        self._engine_reads_rows = True

    def add(self, number: int, demands: Demands, generated: list[int]) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows.

        Args:
            number: of the sequence.
            demands: of its completion.
            generated: completion tokens that another decoder has sampled.
        """
        row = self._rows.take()
        if row is None:
            self._failed(number, Overloaded("too many sequences have token masks"))
            return
        sequence = self._sequences[number] = _Masked(number, row, demands)
        self._start(self._begin(sequence, generated), [sequence])

    def tokens_arrived(self, tokens: Iterable[tuple[int, list[int]]]) -> None:
        """Starts on the next masks of sequences that had tokens in a step and go on."""
        if not self._sequences:
            return
        work: list[_Work] = []
        for number, token_ids in tokens:
            sequence = self._sequences.get(number)
            if sequence is not None and (matcher := sequence.matcher) is not None:
                generated = matcher.num_generated + len(token_ids)
                work.append((sequence, generated, matcher, token_ids))
        if not work:
            return
        if len(work) * self._seconds_per_mask > _INLINE_S:
            self._start(self._send_masks(work), [sequence for sequence, *_ in work])
            return
        # A thread would get the interpreter's lock only when the step's other events are through.
        started = time.monotonic()
        for part in _parts(work):
            self._send_filled(part, self._fill(part))
        self._took(len(work), time.monotonic() - started)

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        if (sequence := self._sequences.pop(number, None)) is not None:
            sequence.is_removed = True
            if sequence.matcher is not None:
                self._grammars.release(sequence.matcher)
            if not sequence.num_writers:
                self._rows.give_back(sequence.row)

    async def close(self) -> None:
        """Ends all work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._grammars.close()
        self._rows.close()

    async def _begin(self, sequence: _Masked, generated: list[int]) -> None:
        number, rows = sequence.number, self._rows.array
        try:
            matcher = await self._grammars.matcher(sequence.demands)
            if sequence.is_removed:
                self._grammars.release(matcher)
                return
            sequence.matcher = matcher
            mask = await self._grammars.first_mask(matcher, generated, rows, sequence.row)
        except TriptychError as error:
            self._fail(number, error)
            return
        except Exception:
            log.exception("a grammar was not compiled")
            self._fail(number, InternalError("the grammar was not compiled"))
            return
        self._send([(sequence, len(generated))], [mask], self._first)

    async def _send_masks(self, work: list[_Work]) -> None:
        started = time.monotonic()
        masks = await asyncio.get_running_loop().run_in_executor(
            self._grammars.maskers, self._fill, work
        )
        self._send_filled(work, masks)
        self._took(len(work), time.monotonic() - started)

    def _fill(self, work: list[_Work]) -> list[Found]:
        try:
            return self._grammars.fill(
                [(matcher, ids, sequence.row) for sequence, _, matcher, ids in work],
                self._rows.array,
            )
        except Exception:
            log.exception("token masks failed")
            return [UnexpectedToken("token masks failed")] * len(work)

    def _send_filled(self, work: list[_Work], masks: list[Found]) -> None:
        places = [(sequence, generated) for sequence, generated, _, _ in work]
        self._send(places, masks, self._engine)

    def _took(self, count: int, seconds: float) -> None:
        """Notes how long the masks of a step took."""
        self._seconds_per_mask += _NEWEST * (seconds / count - self._seconds_per_mask)
        self._observe(seconds)

    def _send(
        self, places: list[tuple[_Masked, int]], masks: list[Found], engine: EngineSender
    ) -> None:
        numbers: list[int] = []
        counts: list[int] = []
        rows: list[int] = []
        for (sequence, generated), mask in zip(places, masks, strict=True):
            if sequence.is_removed:
                continue
            if isinstance(mask, MatcherFailed):
                if not self._renews(sequence):
                    self._fail(sequence.number, _error_of(mask))
            else:
                numbers.append(sequence.number)
                counts.append(generated)
                rows.append(sequence.row if mask else -1)
        if not numbers:
            return
        if self._engine_reads_rows:
            engine.send(TokenMasks(numbers, counts, rows, self._rows.message.link))
            return
        array = self._rows.array[:, : self._grammars.num_words]
        for number, count, row in zip(numbers, counts, rows, strict=True):
            engine.send(TokenMask(number, count, array[row].tobytes() if row >= 0 else b""))

    def _renews(self, sequence: _Masked) -> bool:
        """Whether a sequence whose matcher has failed gets another one, because others' texts may
        have led to its lexer's limit.
        """
        matcher = sequence.matcher
        if matcher is None or matcher.grammar is None or not matcher.grammar.lexer.is_broken:
            return False
        if sequence.num_renewed > matcher.num_generated // _TOKENS_PER_LEXER:
            return False
        sequence.num_renewed += 1
        sequence.matcher = None
        self._grammars.release(matcher)
        self._start(self._begin(sequence, matcher.generated), [sequence])
        return True

    def _fail(self, number: int, error: TriptychError) -> None:
        if number in self._sequences:
            self._failed(number, error)

    def _start(self, work: Coroutine[None, None, None], writes: list[_Masked]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        for sequence in writes:
            sequence.num_writers += 1

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            for sequence in writes:
                sequence.num_writers -= 1
                if sequence.is_removed and not sequence.num_writers:
                    self._rows.give_back(sequence.row)

        task.add_done_callback(done)


def _parts(work: list[_Work]) -> list[list[_Work]]:
    """What is filled together. Each part has sequences of all lexers, those of one lexer beside
    each other, so that each thread has lexers of its own.
    """
    count = -(-len(work) // _AT_ONCE)
    if count > 1:
        work = sorted(work, key=_lexer_of)
    return [work[first::count] for first in range(count)]


def _lexer_of(item: _Work) -> int:
    return item[2].lexer_number


def _error_of(failure: MatcherFailed) -> TriptychError:
    if isinstance(failure, NothingAllowed):
        return InvalidRequest(str(failure))
    if isinstance(failure, UnexpectedToken):
        return InternalError(f"the grammar cannot be followed: {failure}")
    return InvalidGrammar(f"it takes too much work to follow: {failure}")
