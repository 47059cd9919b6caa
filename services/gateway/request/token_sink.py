"""What `Attempts` needs of an object that takes tokens past the request's task."""

from collections.abc import Sequence
from typing import Protocol


class TokenSink(Protocol):
    """Takes tokens in the middle of a choice, which `Attempts.events` then does not yield."""

    def take(self, choice: int, token_ids: Sequence[int]) -> bool:
        """Takes tokens of a choice, without waiting.

        Returns:
            Whether the tokens were taken. If not, nothing was done, and `events` yields them.
        """
        ...
