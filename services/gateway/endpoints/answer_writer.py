"""The writer of a stream of named events, as OpenAI's Responses and Anthropic's Messages have them.

Each part of the answer is opened, filled and closed by events of its own, before the next part is
opened. `ResponseWriter` and `MessageWriter` construct the events of their API. A writer writes a
single choice.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from msgspec import Struct

from services.common.errors import TriptychError
from services.gateway.forms.parts import Part, Text, continues
from services.gateway.forms.responses import LogprobEntry, Update, encode_json
from services.gateway.http.exchange import Exchange
from services.gateway.request.completion import Completion

Event = TypeVar("Event", bound=Struct)


class AnswerWriter(ABC, Generic[Event]):
    """Converts the updates of one choice into events. A subclass constructs the events.

    Args:
        completion: completion whose first choice is written.
    """

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._open: Part | None = None  # the first piece of the open part
        self._last: Update | None = None
        self._logprobs: list[LogprobEntry] = []  # logprobs of tokens whose text is not written yet

    def update(self, update: Update) -> list[Event]:
        """Returns the events of an update."""
        events = self._start()
        self._last = update
        self._logprobs += update.logprobs or ()
        for part in update.parts:
            events += self._add(part)
        if update.parts or not (self._open is None or isinstance(self._open, Text)):
            self._logprobs = []
        return events

    def text(self, choice: int, text: str) -> bytes:
        """Returns the encoded events of a piece of text in the middle of the choice."""
        return self.encode(self.update(Update(choice, [Text(text)], None, None)))

    async def stream(self, answer: AsyncGenerator[list[Update]], exchange: Exchange) -> None:
        """Sends the events of all updates. The events of `finish` remain to be sent."""
        async with aclosing(answer) as batches:
            async for updates in batches:
                if events := [event for update in updates for event in self.update(update)]:
                    await exchange.write(self.encode(events))

    def finish(self) -> list[Event]:
        """Returns the last events of a complete answer."""
        events = self._start()
        if self._logprobs:  # These tokens have no text: they are part of the stop string.
            events += self._add(Text(""))
        return [*events, *self._leave(is_last=True), *self.end()]

    def encode(self, events: Sequence[Event]) -> bytes:
        """Returns the events as server-sent events."""
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (self.kind(event).encode(), encode_json(event))
            for event in events
        )

    def _start(self) -> list[Event]:
        return self.begin() if self._last is None else []

    def _add(self, part: Part) -> list[Event]:
        events: list[Event] = []
        if self._open is None or not continues(self._open, part):
            events = [*self._leave(), *self.open(part)]
            self._open = part
        return [*events, self.delta(part)]

    def _leave(self, *, is_last: bool = False) -> list[Event]:
        part, self._open = self._open, None
        return [] if part is None else self.close(part, is_last=is_last)

    @abstractmethod
    def begin(self) -> list[Event]:
        """Returns the events before the first part."""

    @abstractmethod
    def open(self, part: Part) -> list[Event]:
        """Returns the events that open a part, given its first piece. They have no text yet."""

    @abstractmethod
    def delta(self, part: Part) -> Event:
        """Returns the event with a piece of the open part."""

    @abstractmethod
    def close(self, part: Part, *, is_last: bool) -> list[Event]:
        """Returns the events that close the open part.

        Args:
            part: first piece of the open part.
            is_last: True if the answer ends with the part.
        """

    @abstractmethod
    def end(self) -> list[Event]:
        """Returns the events after the last part: the reason of the end, and the usage."""

    @abstractmethod
    def error_events(self, error: TriptychError) -> bytes:
        """Returns the encoded last events of a stream that ends with an error."""

    @abstractmethod
    def kind(self, event: Event) -> str:
        """Returns the name of an event."""
