"""A streamed answer as events: a part is opened, filled and closed before the next one is opened.

`ResponseWriter` and `MessageWriter` say what the events of their surface are. A writer has one
choice.
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
    """What has been told of one answer."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._open: Part | None = None  # its first piece
        self._last: Update | None = None
        self._logprobs: list[LogprobEntry] = []  # of tokens whose text has not been told

    def update(self, update: Update) -> list[Event]:
        """Takes an update of the choice."""
        events = self._start()
        self._last = update
        self._logprobs += update.logprobs or ()
        for part in update.parts:
            events += self._add(part)
        if update.parts or not (self._open is None or isinstance(self._open, Text)):
            self._logprobs = []
        return events

    async def stream(self, answer: AsyncGenerator[list[Update]], exchange: Exchange) -> None:
        """Sends all events but the last ones, which are those of `finish`."""
        async with aclosing(answer) as batches:
            async for updates in batches:
                if events := [event for update in updates for event in self.update(update)]:
                    await exchange.write(self.encode(events))

    def finish(self) -> list[Event]:
        events = self._start()
        if self._logprobs:  # of tokens whose text was cut off
            events += self._add(Text(""))
        return [*events, *self._leave(is_last=True), *self.end()]

    def encode(self, events: Sequence[Event]) -> bytes:
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
        """The events before the first part."""

    @abstractmethod
    def open(self, part: Part) -> list[Event]:
        """A part begins, of which this is the first piece; its text is told by `delta`."""

    @abstractmethod
    def delta(self, part: Part) -> Event:
        """A piece of the open part."""

    @abstractmethod
    def close(self, part: Part, *, is_last: bool) -> list[Event]:
        """The open part ends, whose first piece is `part`; with `is_last`, so does the answer."""

    @abstractmethod
    def end(self) -> list[Event]:
        """The events after the last part: why it ended, and what was used."""

    @abstractmethod
    def error_events(self, error: TriptychError) -> bytes:
        """Returns the encoded last events of a stream that ends with an error."""

    @abstractmethod
    def kind(self, event: Event) -> str:
        """The event's name."""
