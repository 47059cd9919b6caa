"""The detokenizer turns token ids into text and parts of an answer while they arrive.

It hands out whole characters only, and no text that may still become a stop string. The cost per
token does not grow with the text: bytes go through an incremental UTF-8 decoder, and only a text
that may become a stop string is buffered. `ChatService.answer` feeds one `Choice` for each choice
of a request. The choice also parses reasoning and tool calls where they may occur. Nothing here
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
    """Finds the stop string that is complete first, however the text is split into pieces.

    Args:
        stops: non-empty stop strings.
        include_stop: true if the text keeps the stop string that ended it.

    Attributes:
        stops: the stop strings.
        matched: the stop string that ended the text. None if no stop string is complete.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stops = stops
        self.matched: str | None = None
        self._include_stop = include_stop
        self._buffer: str = ""  # text that may become a stop string
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._max_prefix = max(map(len, self._prefixes), default=0)

    @property
    def num_buffered(self) -> int:
        """Number of characters that may become a stop string."""
        return len(self._buffer)

    def feed(self, text: str, *, matching: bool = True) -> str:
        """Takes more text, and returns the text that belongs to the answer for certain.

        Sets `matched` when a stop string is complete.

        Args:
            text: the next piece.
            matching: whether stop strings may end the text yet.
        """
        num_known = len(self._buffer)
        text = self._buffer + text
        if matching and (found := self._first_completed(text, num_known)):
            start, end = found
            self.matched = text[start:end]
            self._buffer = ""
            return text[: end if self._include_stop else start]
        size = self._num_uncertain(text)
        self._buffer = text[len(text) - size :] if size else ""
        return text[: len(text) - size]

    def flush(self) -> str:
        """Returns the buffered text, once no more text follows."""
        text, self._buffer = self._buffer, ""
        return text

    def _first_completed(self, text: str, num_known: int) -> tuple[int, int] | None:
        """Returns (start, end) of the stop string that is complete first. None if none is complete.

        The first `num_known` characters have been searched before, so only matches that end behind
        them count. If several stop strings end at the same place, the longest is returned.
        """
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, num_known + 1 - len(stop)))
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best is None else min(best, match)
        return (best[1], best[0]) if best else None

    def _num_uncertain(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that begins a stop string."""
        for size in range(min(len(text), self._max_prefix), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0


class Choice:
    """Converter of one choice: takes token events, and returns updates of the answer.

    Args:
        index: index of the choice in the response.
        request: the request, with its stop strings and the wanted fields of the answer.
        tokenizer: the model's tokenizer.
        parser: the parser of reasoning and tool calls. None if the whole answer is text.

    Attributes:
        stops: the matcher of stop strings.
        num_tokens: number of completion tokens so far.
        num_reasoning_tokens: number of tokens of the reasoning so far, tags included.
        finish_reason: `stop`, `length` or `tool_calls` once the choice has ended, else None.
    """

    def __init__(
        self,
        index: int,
        request: ChatRequest,
        tokenizer: ModelTokenizer,
        parser: AnswerParser | None,
    ) -> None:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        # Whether the text keeps the stop string or the stop token that ended it.
        self._include_stop = bool(request.include_stop_str_in_output)
        self.stops = StopMatcher(stops or (), self._include_stop)
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
        """True if the text so far ends within the reasoning."""
        return self._parser is not None and self._parser.thinking

    @property
    def in_head(self) -> bool:
        """True if the last text of the reasoning may be the beginning of a tool call or of the
        closing tag.
        """
        return self._parser is not None and self._parser.in_head

    def feed(self, event: TokenEvent) -> Update:
        """Takes an event, and returns the update. No event may follow a finish reason."""
        ids = event.token_ids
        # The token that stopped the sequence is not part of the text, unless the request sets
        # `include_stop_str_in_output`.
        hidden = int(event.finish_reason == "stop" and not self._include_stop)
        visible = ids[: len(ids) - hidden] if hidden else ids
        num_before = self.num_tokens
        parts, num_used = self._read(visible)
        stop_reason: str | int | None = None
        if self._is_cut:
            self.finish_reason = "stop"
            stop_reason = self.stops.matched
            self.num_tokens += num_used
        else:
            self.num_tokens += len(ids)
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                parts += self._finish()
                stop_ids = self._request.stop_token_ids or ()
                if self.stops.matched is not None:
                    # `_finish` found a stop string in text that the parser had buffered.
                    self.finish_reason, stop_reason = "stop", self.stops.matched
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
        """True if the choice has ended early: a stop string or all allowed calls are complete."""
        is_done = self._parser is not None and self._parser.done
        return is_done or self.stops.matched is not None

    def _text(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens, and returns the characters that are complete now."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._utf8.decode(b"".join([token_bytes(t) for t in token_ids if t not in skipped]))

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], int]:
        """Returns the parts of the tokens, and the number of tokens up to the end of the choice."""
        parser, min_tokens = self._parser, self._request.min_tokens or 0
        if parser is None and not self.stops.stops:
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
                # A token counts as reasoning if the reasoning was open before or after it. So the
                # tokens of both tags count.
                self.num_reasoning_tokens += was_thinking or parser.thinking
            parts += self._cut(found, matching=self.num_tokens + num_used > min_tokens)
            if self._is_cut:
                return parts, num_used
        return parts, len(token_ids)

    def _finish(self) -> list[Part]:
        """Returns the parts of all buffered text, once no more tokens follow."""
        parts = self._cut(self._parser.finish(), matching=True) if self._parser else []
        if rest := self.stops.flush():
            parts.append(Text(rest))
        return parts

    def _cut(self, parts: list[Part], *, matching: bool) -> list[Part]:
        """Returns the parts up to a stop string in their text."""
        stops = self.stops
        if not stops.stops:
            return parts
        certain: list[Part] = []
        for part in parts:
            # Stop strings are searched in text only. Other parts, such as a tool call, interrupt
            # it: buffered text in front of one can no longer become a stop string.
            if isinstance(part, Text):
                text = stops.feed(part.text, matching=matching)
            else:
                text = stops.flush()
            if text:
                certain.append(Text(text))
            if stops.matched is not None:
                break
            if not isinstance(part, Text):
                certain.append(part)
        return certain

    def _entry(self, token_id: int, found: pb.TokenLogprobs) -> LogprobEntry:
        """Returns the log-probabilities of one token in the API's form."""
        top = [
            TopLogprob(*self._token(top_id), max(logprob, MIN_LOGPROB))
            for top_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
        ]
        own = self._token(token_id)
        logprob = max(found.logprob, MIN_LOGPROB)
        # With `logprob_token_ids`, `top_logprobs` contains the chosen ids and the token itself.
        if self._request.logprob_token_ids and token_id not in found.top_token_ids:
            top.insert(0, TopLogprob(*own, logprob))
        return LogprobEntry(*own, logprob, top)

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        """Returns a token's text, or its name if the request wants names, and its bytes."""
        return token_name(self._tokenizer, token_id, bool(self._request.return_tokens_as_token_ids))
