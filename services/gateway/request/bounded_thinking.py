"""An answer whose reasoning is bounded: choices pause at the thinking budget of the request.

Each choice first runs up to the budget. If the choice still thinks there, the tokens that close its
reasoning are appended as if the model had generated them. The choice then continues up to its full
length. `ChatService.answer` iterates `BoundedThinking` in place of `Attempts` for
requests with a `ThinkingBudget`, so that `Attempts` needs to know no reasoning.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import structs

from services.gateway.answers.thinking_budget import ThinkingBudget
from services.gateway.clients.token_event import TokenEvent
from services.gateway.request.attempts import Attempts
from services.gateway.request.completion import Completion


class BoundedThinking:
    """The attempts of a request whose choices pause at a thinking budget.

    Args:
        attempts: attempts of the request, not yet started.
        budget: thinking budget of the request.
    """

    def __init__(self, request: Completion, attempts: Attempts, budget: ThinkingBudget) -> None:
        self._attempts = attempts
        self._budget = budget
        self._choices = request.choices
        self._max_tokens = request.sampling.max_tokens
        # Choices that run up to a pause: their end there is no end of the answer.
        self._pausing: set[int] = set()
        if budget.num_tokens < self._max_tokens:
            self._pausing.update(range(request.chat.num_choices))

    async def events(self) -> AsyncGenerator[list[TokenEvent]]:
        """Yields the batches of `Attempts.events`, and the tokens that close a choice's reasoning.

        The caller has to feed each batch to the choices before it takes the next one.

        Raises:
            TriptychError: the request failed.
        """
        if self._budget.num_tokens:
            for choice in self._pausing:
                self._attempts.extend(choice, (), self._budget.num_tokens)
        elif closing := self._continue(list(self._pausing)):
            yield closing
        async with aclosing(self._attempts.events()) as batches:
            async for events in batches:
                paused = [event.choice for event in events if self._is_pause(event)]
                if not paused:
                    yield events
                    continue
                yield [
                    structs.replace(event, finish_reason=None) if self._is_pause(event) else event
                    for event in events
                ]
                if closing := self._continue(paused):
                    yield closing

    def _is_pause(self, event: TokenEvent) -> bool:
        return event.finish_reason == "length" and event.choice in self._pausing

    def _continue(self, paused: Sequence[int]) -> list[TokenEvent]:
        """Continues choices that have come to the budget.

        Returns:
            The tokens that close the choices' reasoning, for the client.
        """
        events: list[TokenEvent] = []
        for choice in paused:
            if self._choices[choice].finish_reason is not None:  # The caller has stopped it.
                continue
            num_tokens = self._attempts.num_tokens(choice)
            left = self._max_tokens - num_tokens
            if more := self._budget.more_tokens(choice, num_tokens):
                if more >= left:
                    self._pausing.discard(choice)
                self._attempts.extend(choice, (), num_tokens + min(more, left))
                continue
            self._pausing.discard(choice)
            ids = self._budget.closing_ids(choice)[:left]
            is_full = len(ids) == left
            if is_full:
                self._attempts.stop(choice)
            else:
                self._attempts.extend(choice, ids, self._max_tokens)
            if ids:
                events.append(TokenEvent(choice, ids, finish_reason="length" if is_full else None))
        return events
