"""Token ids to text, piece by piece: no half characters, no half stop strings.

Each token costs the same however long the text already is: bytes go through an incremental UTF-8
decoder, and only the text that may still become a stop string is kept back.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.tokenizer import ModelTokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class StopMatcher:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Attributes:
        stops: non-empty strings.
        include_stop: hand out the stop string too.
        matched: the stop string that ended the text.
    """

    stops: Sequence[str]
    include_stop: bool = False
    matched: str | None = None
    _held: str = field(default="", init=False)
    _heads: frozenset[str] = field(init=False)
    _max_head: int = field(init=False)

    def __post_init__(self) -> None:
        self._heads = frozenset(stop[:n] for stop in self.stops for n in range(1, len(stop)))
        self._max_head = max(map(len, self._heads), default=0)

    def feed(self, text: str) -> str:
        """Takes more text and returns what can be handed out; sets `matched` at the end."""
        text = self._held + text
        if found := self._first_completed(text):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self.include_stop else start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was kept back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the match with the least end, the longest of these."""
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop)
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best is None else min(best, match)
        return (best[1], best[0]) if best else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for size in range(min(len(text), self._max_head), 0, -1):
            if text[-size:] in self._heads:
                return size
        return 0


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: of the model.
        stops: stop strings; they end the text where the first one is complete.
        include_stop: keep the stop string in the text.
        skip_special_tokens: leave out tokens that tokenizer.json marks as special.
        min_tokens: stop strings are looked for only in text after this many tokens.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8Decoder(errors="replace")
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; tokens after it are not taken."""
        return self._matcher.matched if self._matcher else None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes tokens in order and returns the text that is now certain.

        `num_tokens` grows by the tokens taken: all of them, or up to the one that completed a
        stop string.
        """
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            skipped = self._skipped
            return self._utf8.decode(
                b"".join([self._token_bytes(t) for t in token_ids if t not in skipped])
            )
        pieces: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id in self._skipped:
                continue
            text = self._utf8.decode(self._token_bytes(token_id))
            pieces.append(self._matcher.feed(text) if self.num_tokens > self._min_tokens else text)
            if self._matcher.matched is not None:
                break
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text. A character whose last bytes were never generated is left out."""
        return self._matcher.flush() if self._matcher and not self._matcher.matched else ""
