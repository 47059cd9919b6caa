"""The search for stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first complete stop string in a text that comes in pieces.

    Args:
        stops: stop strings, none of them empty.
        include_stop: true if the returned text includes the stop string.

    Attributes:
        stops: the stop strings.
        matched: the stop string that was found. None as long as none is complete.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._include_stop = include_stop
        self._buffer: str = ""  # text that waits, because a stop string may begin with it
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._max_prefix = max(map(len, self._prefixes), default=0)

    @property
    def num_buffered(self) -> int:
        """Number of characters that wait, because they may be the beginning of a stop string."""
        return len(self._buffer)

    def feed(self, text: str, *, matching: bool = True) -> str:
        """Takes the next piece of text, and returns the text that is certain not to be part of a
        stop string. If a stop string is complete, sets `matched` and returns the text before it.

        Args:
            text: the next piece.
            matching: False if stop strings are ignored in this piece, because the answer has fewer
                than `min_tokens` tokens.
        """
        num_searched = len(self._buffer)
        text = self._buffer + text
        if matching and (found := self._first_complete(text, num_searched)):
            start, end = found
            self.matched = text[start:end]
            self._buffer = ""
            return text[: end if self._include_stop else start]
        size = self._num_uncertain(text)
        self._buffer = text[len(text) - size :] if size else ""
        return text[: len(text) - size]

    def flush(self) -> str:
        """Returns the text that waits. Called when no more text follows."""
        text, self._buffer = self._buffer, ""
        return text

    def _first_complete(self, text: str, num_searched: int) -> tuple[int, int] | None:
        """Returns (start, end) of the stop string that ends first in the text. None if the text
        contains none. If several stop strings end at the same place, the longest is returned.

        Args:
            num_searched: number of characters at the start of the text that an earlier call of
                `feed` has searched. A stop string can only end after these characters.
        """
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best is None else min(best, match)
        return (best[1], best[0]) if best else None

    def _num_uncertain(self, text: str) -> int:
        """Returns how many characters at the end of `text` may be the start of a stop string."""
        for size in range(min(len(text), self._max_prefix), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0
