"""Token ids to text and parts: whole characters, and nothing of a stop string before it is decided.

The cost per token does not grow with the text: bytes go through an incremental UTF-8 decoder, and
only text that may still become a stop string is held back. `ChatService.answer` feeds one `Choice`
per requested choice, which parses reasoning and tool calls where there may be any. Nothing here
fails: bytes that are not UTF-8 become U+FFFD.
"""

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat, AnswerParser
from services.gateway.clients.decoders import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.parts import Call, Part, Text
from services.gateway.forms.responses import MIN_LOGPROB, LogprobEntry, TopLogprob, Update
from services.gateway.tokenizer.tokenizer import ModelTokenizer, token_name

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class StopMatcher:
    """Finds the first stop string to be completed, however the text is split into pieces.

    Attributes:
        stops: non-empty strings.
        include_stop: return the stop string, too.
        matched: the stop string that ended the text.
    """

    stops: Sequence[str]
    include_stop: bool = False
    matched: str | None = None
    _held: str = field(default="", init=False)
    _prefixes: frozenset[str] = field(init=False)
    _max_prefix: int = field(init=False)

    def __post_init__(self) -> None:
        self._prefixes = frozenset(stop[:n] for stop in self.stops for n in range(1, len(stop)))
        self._max_prefix = max(map(len, self._prefixes), default=0)

    def feed(self, text: str) -> str:
        """Takes more text and returns what is certain; sets `matched` when a stop completes."""
        text = self._held + text
        if found := self._first_completed(text):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[: end if self.include_stop else start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the match with the smallest end; of several, the longest."""
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop)
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


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: of the model.
        stops: stop strings; the text ends where the first one completes.
        include_stop: keep the stop string in the text.
        skip_special_tokens: leave out tokens that tokenizer.json marks as special.
        min_tokens: stop strings match only in text after this many tokens.
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
        """The stop string that ended the text; later tokens are ignored."""
        return self._matcher.matched if self._matcher else None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes tokens in order and returns the text that is now certain.

        `num_tokens` grows by the tokens used: all of them, or up to the one that completed a stop
        string.
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


class Choice:
    """One of a response's choices: token events in, text updates out.

    Attributes:
        num_tokens: completion tokens so far.
        num_reasoning_tokens: those of the reasoning, with its tags.
        finish_reason: `stop`, `length` or `tool_calls` once the choice has ended.

    Args:
        index: of the choice.
        tokenizer: of the model.
        detokenizer: of this choice.
        include_stop: keep the token that ended the choice in its text.
        stop_ids: stop tokens that the request names.
        parser: of reasoning and calls; None: everything is text.
        stops: matches stop strings in what the parser says is text; without a parser the
            detokenizer does.
        min_tokens: stop strings match only in text after this many tokens.
        with_ids: updates have token ids.
        as_ids: tokens of logprobs are named by their ids.
        with_sampled: a token is among its alternatives, whatever these are.
    """

    def __init__(
        self,
        index: int,
        tokenizer: ModelTokenizer,
        detokenizer: Detokenizer,
        include_stop: bool,
        stop_ids: Collection[int] = (),
        parser: AnswerParser | None = None,
        stops: StopMatcher | None = None,
        min_tokens: int = 0,
        with_ids: bool = False,
        as_ids: bool = False,
        with_sampled: bool = False,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._stop_ids = stop_ids
        self._parser = parser
        self._stops = stops
        self._min_tokens = min_tokens
        self._with_ids = with_ids
        self._as_ids = as_ids
        self._with_sampled = with_sampled
        self._has_calls = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def thinking(self) -> bool:
        """Whether the choice is in its reasoning."""
        return self._parser is not None and self._parser.thinking

    def feed(self, event: TokenEvent) -> Update:
        """Takes an event; no event may follow an update with a finish reason."""
        ids = event.token_ids
        # The text excludes the token that stopped the sequence, unless the request includes it.
        hidden = int(event.finish_reason == "stop" and not self._include_stop)
        visible = ids[: len(ids) - hidden] if hidden else ids
        before, num_before = self._detokenizer.num_tokens, self.num_tokens
        parts = self._read(visible)
        num_used = self._detokenizer.num_tokens - before
        stop_reason: str | int | None = None
        if matched := self._matched_stop():
            self.finish_reason = "stop"
            stop_reason = matched
            self.num_tokens += num_used
        elif self._parser is not None and self._parser.done:
            self.finish_reason = "stop"
            self.num_tokens += num_used
        else:
            self.num_tokens += len(ids)
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                parts += self._finish()
                if event.finish_reason == "stop" and ids and ids[-1] in self._stop_ids:
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
        if self._with_ids:
            used = ids[: self.num_tokens - num_before]
        return Update(self._index, parts, logprobs, self.finish_reason, stop_reason, used)

    def _read(self, token_ids: Sequence[int]) -> list[Part]:
        """Parts of the tokens, up to the one that ends the choice."""
        detokenizer, parser = self._detokenizer, self._parser
        if parser is None:
            text = detokenizer.feed(token_ids)
            return [Text(text)] if text else []
        parts: list[Part] = []
        for token_id in token_ids:
            was_thinking = parser.thinking
            found = parser.feed(detokenizer.feed((token_id,)))
            self.num_reasoning_tokens += was_thinking or parser.thinking
            parts += self._cut(found, matching=detokenizer.num_tokens > self._min_tokens)
            if parser.done or self._matched_stop() is not None:
                break
        return parts

    def _finish(self) -> list[Part]:
        if self._parser is None:
            text = self._detokenizer.finish()
            return [Text(text)] if text else []
        parts = self._cut(self._parser.finish(), matching=True)
        if self._stops is not None and (held := self._stops.flush()):
            parts.append(Text(held))
        return parts

    def _cut(self, parts: list[Part], *, matching: bool) -> list[Part]:
        """The parts, up to a stop string in the text."""
        stops = self._stops
        if stops is None:
            return parts
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                text = stops.feed(part.text) if matching else part.text
            else:
                text = stops.flush()
            if text:
                kept.append(Text(text))
            if stops.matched is not None:
                break
            if not isinstance(part, Text):
                kept.append(part)
        return kept

    def _matched_stop(self) -> str | None:
        if self._stops is not None:
            return self._stops.matched
        return self._detokenizer.matched_stop

    def _entry(self, token_id: int, found: pb.TokenLogprobs) -> LogprobEntry:
        top = [
            TopLogprob(*self._token(top_id), max(logprob, MIN_LOGPROB))
            for top_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
        ]
        own = self._token(token_id)
        logprob = max(found.logprob, MIN_LOGPROB)
        if self._with_sampled and token_id not in found.top_token_ids:
            top.insert(0, TopLogprob(*own, logprob))
        return LogprobEntry(*own, logprob, top)

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        return token_name(self._tokenizer, token_id, self._as_ids)


def create_choices(
    request: ChatRequest, tokenizer: ModelTokenizer, answer_format: AnswerFormat
) -> list[Choice]:
    """A request's choices, before their first token."""
    include_stop = bool(request.include_stop_str_in_output)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    min_tokens = request.min_tokens or 0

    def choice(index: int) -> Choice:
        parser = answer_format.parser()
        detokenizer = Detokenizer(
            tokenizer,
            stops=stops if parser is None else (),
            include_stop=include_stop,
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=min_tokens,
        )
        return Choice(
            index,
            tokenizer,
            detokenizer,
            include_stop,
            request.stop_token_ids or (),
            parser,
            StopMatcher(stops, include_stop) if stops and parser is not None else None,
            min_tokens,
            bool(request.return_token_ids),
            bool(request.return_tokens_as_token_ids),
            bool(request.logprob_token_ids),
        )

    return [choice(index) for index in range(request.n or 1)]
