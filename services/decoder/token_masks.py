"""Token masks of the front's sequences: from the tokens of a step to the masks of the next one.

`DecoderFront` reports sequences whose tokens are masked here, and their tokens. llguidance fills
the masks in threads of its own, and the engine samples the step under way when they have arrived.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from services.common.errors import InternalError, InvalidGrammar, InvalidRequest, TriptychError
from services.decoder.embeddings import EngineSender
from services.decoder.engine.messages import SequenceEvent, TokenMask
from services.decoder.grammar import Demands, Grammars
from services.decoder.matcher import Matcher, MatcherFailed, NothingAllowed, UnexpectedToken

log = logging.getLogger(__name__)

# The masks of a step are filled at once, before anything else is done with the step's events, if
# that is expected to take no longer; else in a thread. Most take 0.02 to 0.2 ms.
_INLINE_S = 3e-3
_NEWEST = 0.2  # of the mean
# Sequence, its completion tokens, its matcher, the tokens that are new.
_Work = tuple[int, int, Matcher, list[int]]


class SequenceMasks:
    """Owner of the matchers, one for each running sequence whose tokens are masked.

    Args:
        grammars: compiles them.
        engine: gets the masks.
        observe: called with the seconds that the masks of a step took.
        failed: called with a sequence's number and an error when it cannot go on.
    """

    def __init__(
        self,
        grammars: Grammars,
        engine: EngineSender,
        observe: Callable[[float], None],
        failed: Callable[[int, TriptychError], None],
    ) -> None:
        self._grammars = grammars
        self._engine = engine
        self._observe = observe
        self._failed = failed
        self._matchers: dict[int, Matcher | None] = {}  # None: being compiled
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds_per_mask = 0.0  # lately

    def add(self, number: int, demands: Demands, generated: list[int]) -> None:
        """Starts on a sequence that the engine was sent: its next mask follows.

        Args:
            number: of the sequence.
            demands: of its completion.
            generated: completion tokens that another decoder has sampled.
        """
        self._matchers[number] = None
        self._start(self._begin(number, demands, generated))

    def tokens_arrived(self, events: list[SequenceEvent]) -> None:
        """Starts on the next masks of sequences that had tokens in a step."""
        if not self._matchers:
            return
        work: list[_Work] = []
        for event in events:
            matcher = self._matchers.get(event.sequence_id)
            if matcher is not None and event.end is None and event.token_ids:
                generated = matcher.num_generated + len(event.token_ids)
                work.append((event.sequence_id, generated, matcher, event.token_ids))
        if not work:
            return
        if len(work) * self._seconds_per_mask > _INLINE_S:
            self._start(self._send_masks(work))
            return
        # A thread would get the interpreter's lock only when the step's other events are through.
        self._send_filled(work, time.monotonic(), self._fill(work))

    def remove(self, number: int) -> None:
        """A sequence has ended; of one without masks nothing is known."""
        self._matchers.pop(number, None)

    async def close(self) -> None:
        """Ends all work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._grammars.close()

    async def _begin(self, number: int, demands: Demands, generated: list[int]) -> None:
        try:
            matcher = await self._grammars.matcher(demands)
            mask = await self._grammars.first_mask(matcher, generated)
        except TriptychError as error:
            self._fail(number, error)
            return
        except Exception:
            log.exception("a grammar was not compiled")
            self._fail(number, InternalError("the grammar was not compiled"))
            return
        if number in self._matchers:
            self._matchers[number] = matcher
            self._send([(number, len(generated))], [mask])

    async def _send_masks(self, work: list[_Work]) -> None:
        started = time.monotonic()
        masks = await asyncio.get_running_loop().run_in_executor(
            self._grammars.maskers, self._fill, work
        )
        self._send_filled(work, started, masks)

    def _fill(self, work: list[_Work]) -> list[bytes | MatcherFailed]:
        try:
            return self._grammars.fill([(matcher, ids) for _, _, matcher, ids in work])
        except Exception:
            log.exception("token masks failed")
            return [UnexpectedToken("token masks failed")] * len(work)

    def _send_filled(
        self, work: list[_Work], started: float, masks: list[bytes | MatcherFailed]
    ) -> None:
        self._send([(number, generated) for number, generated, _, _ in work], masks)
        seconds = time.monotonic() - started
        self._seconds_per_mask += _NEWEST * (seconds / len(work) - self._seconds_per_mask)
        self._observe(seconds)

    def _send(self, places: list[tuple[int, int]], masks: list[bytes | MatcherFailed]) -> None:
        messages: list[TokenMask] = []
        for (number, generated), mask in zip(places, masks, strict=True):
            if isinstance(mask, MatcherFailed):
                self._fail(number, _error_of(mask))
            elif number in self._matchers:
                messages.append(TokenMask(number, generated, mask))
        if messages:
            self._engine.send(*messages)

    def _fail(self, number: int, error: TriptychError) -> None:
        if number in self._matchers:
            self._failed(number, error)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error_of(failure: MatcherFailed) -> TriptychError:
    if isinstance(failure, NothingAllowed):
        return InvalidRequest(str(failure))
    if isinstance(failure, UnexpectedToken):
        return InternalError(f"the grammar cannot be followed: {failure}")
    return InvalidGrammar(f"it takes too much work to follow: {failure}")
