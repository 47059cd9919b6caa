"""The detokenizer turns the token ids of a choice into the parts of its answer, as they arrive.

A part is a piece of text, of reasoning, or of a tool call. `ChatService.answer` feeds the events of
each choice to a `Choice`, which returns an `Update` per event. A token may end in the middle of a
character, so bytes wait until the character is complete. Text that may be the beginning of a stop
string waits, too: with the stop string `END`, the text `the E` yields `the `, and `E` waits for the
next token. The cost per token does not grow with the length of the answer. Bytes that are not UTF-8
become U+FFFD, and an incomplete character at the end is left out.
"""

import codecs
from collections.abc import Sequence

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerParser
from services.gateway.answers.stop_matcher import StopMatcher
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.parts import Call, Part, Text
from services.gateway.forms.responses import MIN_LOGPROB, LogprobEntry, TopLogprob, Update
from services.gateway.tokenizer.tokenizer import ModelTokenizer, token_name

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Choice:
    """A choice of an answer. `feed` takes a token event, and returns an update of the answer.

    Args:
        index: index of the choice in the response.
        request: the request, with its stop strings and the wanted fields of the answer.
        tokenizer: the model's tokenizer.
        parser: the parser of reasoning and tool calls. None if the whole answer is text.

    Attributes:
        stops: the matcher of stop strings.
        is_plain: True if the whole answer is text, which cannot end the choice.
        num_tokens: number of completion tokens so far.
        num_reasoning_tokens: number of tokens of the reasoning so far, with its tags.
        finish_reason: `stop`, `length` or `tool_calls`. None until the choice has ended.
    """

    def __init__(
        self,
        index: int,
        request: ChatRequest,
        tokenizer: ModelTokenizer,
        parser: AnswerParser | None,
    ) -> None:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        # True if the stop string or the stop token that ends the answer is part of its text.
        self._include_stop = bool(request.include_stop_str_in_output)
        self.stops = StopMatcher(stops or (), self._include_stop)
        self._index = index
        self._request = request
        self._tokenizer = tokenizer
        self._parser = parser
        is_skipping = request.skip_special_tokens is not False
        self._skipped = tokenizer.special_ids if is_skipping else frozenset[int]()
        self._utf8 = _Utf8Decoder(errors="replace")
        # Some tokenizers write a space before every text. The space is removed from the beginning
        # of an answer, unless the answer continues text of the prompt.
        continues = request.continue_final_message or not request.messages
        self._trims_start = tokenizer.trims_start and not continues
        self._has_calls = False
        self.is_plain = parser is None and not stops and not request.return_token_ids
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def thinking(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._parser is not None and self._parser.thinking

    @property
    def in_head(self) -> bool:
        """True if the reasoning so far ends in text that may be the beginning of a tool call or of
        the tag `</think>`.
        """
        return self._parser is not None and self._parser.in_head

    def feed(self, event: TokenEvent) -> Update:
        """Takes an event, and returns the update. No event may follow a finish reason."""
        ids = event.token_ids
        if self.is_plain and event.finish_reason is None and not event.logprobs:
            text = self.feed_plain(ids)
            return Update(self._index, [Text(text)] if text else [], None, None)
        # The stop token that ended the sequence is not part of the text, unless the request sets
        # `include_stop_str_in_output`.
        hides_last = event.finish_reason == "stop" and not self._include_stop
        visible = ids[: len(ids) - 1] if hides_last else ids
        num_before = self.num_tokens
        parts, num_used = self._read(visible)
        stop_reason: str | int | None = None
        if self._has_ended_early:
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
                    # `_finish` has found a stop string in text that the parser had held back.
                    self.finish_reason, stop_reason = "stop", self.stops.matched
                elif event.finish_reason == "stop" and ids and ids[-1] in stop_ids:
                    stop_reason = ids[-1]
        if self._parser is not None:
            self._has_calls = self._has_calls or any(isinstance(part, Call) for part in parts)
            if self.finish_reason == "stop" and self._has_calls:
                self.finish_reason = "tool_calls"
        pairs = zip(visible[:num_used], event.logprobs, strict=False)
        logprobs = [self._entry(token_id, found) for token_id, found in pairs] or None
        used = ids[: self.num_tokens - num_before] if self._request.return_token_ids else ()
        return Update(self._index, parts, logprobs, self.finish_reason, stop_reason, used)

    def feed_plain(self, token_ids: Sequence[int]) -> str:
        """Takes tokens that do not end the choice, which must be plain. Returns their text."""
        self.num_tokens += len(token_ids)
        return self._text(token_ids)

    @property
    def _has_ended_early(self) -> bool:
        """True if the choice has ended although the decoder would go on: a stop string is complete,
        or the answer already has all tool calls that the request allows.
        """
        is_done = self._parser is not None and self._parser.done
        return is_done or self.stops.matched is not None

    def _text(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that the tokens complete."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(t) for t in token_ids if t not in skipped])
        if self._trims_start and data:
            data, self._trims_start = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], int]:
        """Returns the parts that the tokens complete, and how many tokens belong to the choice.
        Tokens after a stop string that ends the choice are not counted.
        """
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
                # A token counts as reasoning if the reasoning was open before it or is open after
                # it. The tokens of `<think>` and `</think>` therefore count, too.
                self.num_reasoning_tokens += was_thinking or parser.thinking
            parts += self._until_stop(found, matching=self.num_tokens + num_used > min_tokens)
            if self._has_ended_early:
                return parts, num_used
        return parts, len(token_ids)

    def _finish(self) -> list[Part]:
        """Returns the parts of all text that waits. Called when no more tokens follow."""
        parts = self._until_stop(self._parser.finish(), matching=True) if self._parser else []
        if rest := self.stops.flush():
            parts.append(Text(rest))
        return parts

    def _until_stop(self, parts: list[Part], *, matching: bool) -> list[Part]:
        """Returns the parts before the first stop string. If there is none, returns all parts, but
        holds back the end of the text if it may begin a stop string.
        """
        stops = self.stops
        if not stops.stops:
            return parts
        certain: list[Part] = []
        for part in parts:
            # Stop strings are searched in text alone. If another part follows, such as a tool call,
            # the text before it cannot become a stop string any more.
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
        # With `logprob_token_ids`, `top_logprobs` has the generated token and the tokens that the
        # request names, but not the most likely tokens.
        if self._request.logprob_token_ids and token_id not in found.top_token_ids:
            top.insert(0, TopLogprob(*own, logprob))
        return LogprobEntry(*own, logprob, top)

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        """Returns a token's text and its bytes. With `return_tokens_as_token_ids`, the text is
        `token_id:` and the token's id.
        """
        return token_name(self._tokenizer, token_id, bool(self._request.return_tokens_as_token_ids))
