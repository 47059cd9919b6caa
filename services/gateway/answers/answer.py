"""The parser of an answer: reasoning first, then content that may contain tool calls.

`AnswerReader` derives an `AnswerFormat` from the model, the end of the prompt and the request. Each
choice has a parser of this format. Stop strings are matched in the content alone, so that they
interrupt neither the reasoning nor a call.
"""

from dataclasses import dataclass

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.reasoning import ReasoningSplitter, Start
from services.gateway.answers.tool_parsers import CallParser
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.parts import Call, Part, Reasoning, Text


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of the answers to one request.

    Attributes:
        reasoning: the place where an answer begins, see `reasoning.Start`. None if the model does
            not think.
        calls: calls that the answer may contain. None if calls are not allowed.
        has_to_call: true if the answer has to contain a call.
        include_reasoning: true if the response contains the reasoning.
        grammar: the grammar that the decoder enforces. None if the answer is free.
        grammar_param: the request's field that errors about the grammar name.
    """

    reasoning: Start | None = None
    calls: ToolCalls | None = None
    has_to_call: bool = False
    include_reasoning: bool = True
    grammar: pb.Grammar | None = None
    grammar_param: str | None = None

    @property
    def thinks(self) -> bool:
        """True if reasoning may come before the content."""
        return self.reasoning in ("open", "optional")

    def parser(self) -> "AnswerParser | None":
        """Returns a parser for one choice. None if the whole answer is text."""
        if self.calls is None and not self.thinks:
            return None
        calls = self.calls.new_parser() if self.calls else None
        tag, head = (calls.tag, calls.head) if calls else (None, "")
        splitter = ReasoningSplitter(self.reasoning or "closed", tag, head)
        return AnswerParser(self, splitter, calls)


@dataclass(slots=True)
class AnswerParser:
    """The parser of one choice's text.

    Attributes:
        format: the format of the answer.
        splitter: the splitter of reasoning and content.
        calls: the parser of tool calls. None if the content is text.
    """

    format: AnswerFormat
    splitter: ReasoningSplitter
    calls: CallParser | None
    _in_call: bool = False  # a call within the reasoning is being read
    _has_begun: bool = False  # the name of that call is known

    @property
    def thinking(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self.splitter.thinking and not self._in_call

    @property
    def in_head(self) -> bool:
        """True if the reasoning ends in text that may begin a tool call or the closing tag."""
        return not self._has_begun if self._in_call else self.splitter.in_head

    @property
    def done(self) -> bool:
        """True if all allowed calls are complete, so that no more text is needed."""
        return self.calls is not None and self.calls.done

    def feed(self, text: str) -> list[Part]:
        """Takes more text, and returns the parts that are certain."""
        parts: list[Part] = []
        while text and not self.done:
            if self._in_call and self.calls is not None:
                found, text = self.calls.feed_call(text)
                self._has_begun = self._has_begun or any(isinstance(part, Call) for part in found)
                self._in_call = self.calls.in_call
                parts += self._thoughts(found)
            else:
                parts += self._parse_calls(self.splitter.feed(text))
                text = self.splitter.take_call()
                self._in_call, self._has_begun = bool(text), False
        return parts

    def finish(self) -> list[Part]:
        """Returns the parts of all buffered text, once no more text follows."""
        if self.calls is None:
            return self._parse_calls(self.splitter.finish())
        if self._in_call:
            return self._thoughts(self.calls.finish())
        parts = self._parse_calls(self.splitter.finish())
        rest = self.calls.finish()
        if self.format.has_to_call:  # The rest is a call that was cut off, and not text.
            rest = [part for part in rest if not isinstance(part, Text)]
        return parts + rest

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        """Returns the parts of what looked like a call within the reasoning. If it was no call, its
        text is reasoning.
        """
        thoughts: list[Part] = [
            Reasoning(part.text) if isinstance(part, Text) else part for part in parts
        ]
        return self._without_reasoning(thoughts)

    def _without_reasoning(self, parts: list[Part]) -> list[Part]:
        if self.format.include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _parse_calls(self, parts: list[Part]) -> list[Part]:
        parts = self._without_reasoning(parts)
        if self.calls is None:
            return parts
        parsed: list[Part] = []
        for part in parts:
            parsed += self.calls.feed(part.text) if isinstance(part, Text) else (part,)
        return parsed
