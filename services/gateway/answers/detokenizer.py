"""Token ids to text and parts: whole characters, and nothing of a stop string before it is decided.

The cost per token does not grow with the text: bytes go through an incremental UTF-8 decoder, and
only text that may still become a stop string is held back. `ChatService.answer` feeds one `Choice`
per requested choice, which parses reasoning and tool calls where there may be any. Nothing here
fails: bytes that are not UTF-8 become U+FFFD.
"""

import codecs
from collections.abc import Sequence

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerParser
from services.gateway.clients.decoders import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.parts import Call, Part, Text
from services.gateway.forms.responses import MIN_LOGPROB, LogprobEntry, TopLogprob, Update
from services.gateway.tokenizer.tokenizer import ModelTokenizer, token_name

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split into pieces.

    Attributes:
        stops: non-empty strings.
        matched: the stop string that ended the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._include_stop = include_stop
        self._held: str = ""
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._max_prefix = max(map(len, self._prefixes), default=0)

    def feed(self, text: str, *, matching: bool = True) -> str:
        """Takes more text and returns what is certain; sets `matched` when a stop completes, unless
        that is not `matching` yet.
        """
        num_known = len(self._held)
        text = self._held + text
        if matching and (found := self._first_completed(text, num_known)):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str, num_known: int) -> tuple[int, int] | None:
        """(start, end) of the match with the smallest end, of those that end behind the text that
        is known already; of several, the longest.
        """
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, num_known + 1 - len(stop)))
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best is None else min(best, match)
        return (best[1], best[0]) if best else None

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for size in range(min(len(text), self._max_prefix), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0


class Choice:
    """One of a response's choices: token events in, text updates out.

    Attributes:
        num_tokens: completion tokens so far.
        num_reasoning_tokens: those of the reasoning, with its tags.
        finish_reason: `stop`, `length` or `tool_calls` once the choice has ended.

    Args:
        request: what it says of stops and of the answer's fields.
        parser: of reasoning and calls; None: everything is text.
    """

    def __init__(
        self,
        index: int,
        request: ChatRequest,
        tokenizer: ModelTokenizer,
        parser: AnswerParser | None,
    ) -> None:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        # The text keeps the stop string, or the token, that ended it.
        self._include_stop = bool(request.include_stop_str_in_output)
        self._stops = StopMatcher(stops or (), self._include_stop)
        self._index = index
        self._request = request
        self._tokenizer = tokenizer
        self._parser = parser
        is_skipping = request.skip_special_tokens is not False
        self._skipped = tokenizer.special_ids if is_skipping else frozenset[int]()
        self._utf8 = _Utf8Decoder(errors="replace")
        self._has_calls = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def thinking(self) -> bool:
        return self._parser is not None and self._parser.thinking

    @property
    def in_head(self) -> bool:
        return self._parser is not None and self._parser.in_head

    def feed(self, event: TokenEvent) -> Update:
        """Takes an event; no event may follow an update with a finish reason."""
        ids = event.token_ids
        # The text excludes the token that stopped the sequence, unless the request includes it.
        hidden = int(event.finish_reason == "stop" and not self._include_stop)
        visible = ids[: len(ids) - hidden] if hidden else ids
        num_before = self.num_tokens
        parts, num_used = self._read(visible)
        stop_reason: str | int | None = None
        if self._is_cut:
            self.finish_reason = "stop"
            stop_reason = self._stops.matched
            self.num_tokens += num_used
        else:
            self.num_tokens += len(ids)
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                parts += self._finish()
                stop_ids = self._request.stop_token_ids or ()
                if self._stops.matched is not None:
                    # In what the parser had held back.
                    self.finish_reason, stop_reason = "stop", self._stops.matched
                elif event.finish_reason == "stop" and ids and ids[-1] in stop_ids:
                    stop_reason = ids[-1]
        if self._parser is not None:
            self._has_calls = self._has_calls or any(isinstance(part, Call) for part in parts)
            if self.finish_reason == "stop" and self._has_calls:
                self.finish_reason = "tool_calls"
        logprobs = None
        if event.logprobs:
            pairs = zip(visible[:num_used], event.logprobs, strict=False)
            logprobs = [self._entry(token_id, found) for token_id, found in pairs]
        used: Sequence[int] = ()
        if self._request.return_token_ids:
            used = ids[: self.num_tokens - num_before]
        return Update(self._index, parts, logprobs, self.finish_reason, stop_reason, used)

    @property
    def _is_cut(self) -> bool:
        """Whether what follows is not of the choice: a stop string, or all calls, are complete."""
        is_done = self._parser is not None and self._parser.done
        return is_done or self._stops.matched is not None

    def _text(self, token_ids: Sequence[int]) -> str:
        """What is now whole; a character whose last bytes never come is left out."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._utf8.decode(b"".join([token_bytes(t) for t in token_ids if t not in skipped]))

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], int]:
        """Parts of the tokens, and how many there are up to the one that ends the choice."""
        parser, min_tokens = self._parser, self._request.min_tokens or 0
        if parser is None and not self._stops.stops:
            text = self._text(token_ids)
            return [Text(text)] if text else [], len(token_ids)
        parts: list[Part] = []
        for num_used, token_id in enumerate(token_ids, 1):
            text = self._text((token_id,))
            if parser is None:
                found: list[Part] = [Text(text)]
            else:
                was_thinking = parser.thinking
                found = parser.feed(text)
                self.num_reasoning_tokens += was_thinking or parser.thinking
            parts += self._cut(found, matching=self.num_tokens + num_used > min_tokens)
            if self._is_cut:
                return parts, num_used
        return parts, len(token_ids)

    def _finish(self) -> list[Part]:
        parts = self._cut(self._parser.finish(), matching=True) if self._parser else []
        if held := self._stops.flush():
            parts.append(Text(held))
        return parts

    def _cut(self, parts: list[Part], *, matching: bool) -> list[Part]:
        """The parts, up to a stop string in the text."""
        stops = self._stops
        if not stops.stops:
            return parts
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                text = stops.feed(part.text, matching=matching)
            else:
                text = stops.flush()
            if text:
                kept.append(Text(text))
            if stops.matched is not None:
                break
            if not isinstance(part, Text):
                kept.append(part)
        return kept

    def _entry(self, token_id: int, found: pb.TokenLogprobs) -> LogprobEntry:
        top = [
            TopLogprob(*self._token(top_id), max(logprob, MIN_LOGPROB))
            for top_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
        ]
        own = self._token(token_id)
        logprob = max(found.logprob, MIN_LOGPROB)
        if self._request.logprob_token_ids and token_id not in found.top_token_ids:
            top.insert(0, TopLogprob(*own, logprob))
        return LogprobEntry(*own, logprob, top)

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        return token_name(self._tokenizer, token_id, bool(self._request.return_tokens_as_token_ids))
