"""The short way of tokens in the middle of a streamed answer: from the decoder's client straight to
the connection.

Waking a request's task for each token takes longer than everything else that the gateway does for
the token. If the answer is plain text and the client reads fast enough, there is nothing for the
task to do, so `Attempts` gives the tokens to `DirectTokens` in place of the task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.http.exchange import Exchange
from services.gateway.request.completion import Completion


class TextWriter(Protocol):
    """Encodes the text of a streamed answer."""

    def text(self, choice: int, text: str) -> bytes:
        """Returns the encoded events of a piece of text that does not end the choice. Empty if
        nothing is to be sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class DirectTokens:
    """Sends the text of tokens without waiting. It is a `TokenSink`.

    Attributes:
        completion: completion that is streamed.
        exchange: the HTTP request and its response.
        writer: encoder of the answer's text.
    """

    completion: Completion
    exchange: Exchange
    writer: TextWriter

    def take(self, choice: int, token_ids: Sequence[int]) -> bool:
        """Sends the text of tokens in the middle of a choice.

        Returns:
            Whether the tokens were taken. If not, nothing was done, and the request's task has to
            handle the tokens, because they may end the choice, or the client reads too slowly.
        """
        found, exchange = self.completion.choices[choice], self.exchange
        if not (found.is_plain and exchange.can_write_now()):
            return False
        text = found.feed_plain(token_ids)
        if text and (data := self.writer.text(choice, text)):
            exchange.write_now(data)
        return True
