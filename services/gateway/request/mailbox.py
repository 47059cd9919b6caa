"""Messages of a request's sequences and encode calls on their way to `Attempts.events`."""

import asyncio

from services.common.errors import InternalError, InvalidRequest, Overloaded
from services.gateway.clients.token_event import TokenEvent
from services.gateway.request.losses import RetryableFailure

# A decoder's event, or a failed encode call: RetryableFailure if another encoder may succeed,
# InvalidRequest if the image is at fault. Overloaded: too much of the answer waits for the client.
# InternalError: tokens could not be sent.
Message = TokenEvent | RetryableFailure | InvalidRequest | Overloaded | InternalError

# So many bytes are read at once, however few messages they are.
_PORTION_BYTES = 1 << 16


class Mailbox:
    """Queue of messages from several producers of one event loop for one consumer, which takes all
    waiting messages at once.

    Args:
        portion: number of messages that are waited for if each of them only has tokens.

    Attributes:
        num_bytes: bytes of the messages that wait.
    """

    def __init__(self, portion: int = 1) -> None:
        self._portion = portion
        self._messages: list[Message] = []
        self.num_bytes = 0
        self._arrival: asyncio.Future[None] | None = None  # future that `take` waits for

    @property
    def is_awaited(self) -> bool:
        """True if no message waits, and the consumer waits for one."""
        arrival = self._arrival
        return arrival is not None and not arrival.done() and not self._messages

    def put(self, message: Message, num_bytes: int = 0) -> None:
        """Adds a message. Never waits."""
        self._messages.append(message)
        self.num_bytes += num_bytes
        has_news = not (isinstance(message, TokenEvent) and message.only_tokens)
        few = len(self._messages) < self._portion and self.num_bytes < _PORTION_BYTES
        if few and not has_news:
            return
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def clear(self) -> None:
        """Drops all messages that wait."""
        self._messages = []
        self.num_bytes = 0

    async def take(self) -> list[Message]:
        """Returns all messages that wait, at least one. Only one caller may wait at a time."""
        while not self._messages:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        messages = self._messages
        self.clear()
        return messages
