"""The short way of tokens in the middle of a streamed answer: from the decoder's client straight to
the connection.

Waking a request's task for each token takes longer than everything else that the gateway does for
the token. If the answer is plain text and the client reads fast enough, there is nothing for the
task to do, so `Attempts` gives the tokens to `DirectTokens` in place of the task.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.http.exchange import Exchange
from services.gateway.request.completion import Completion


@dataclass(frozen=True, slots=True)
class DirectTokens:
    """Sends the text of tokens without waiting.

    Attributes:
        completion: completion that is streamed.
        exchange: the HTTP request and its response.
        encode: function that returns the encoded event of a choice's text. Its arguments are the
            choice's index and the text, which does not end the choice.
    """

    completion: Completion
    exchange: Exchange
    encode: Callable[[int, str], bytes]

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
        if text and (data := self.encode(choice, text)):
            exchange.write_now(data)
        return True
