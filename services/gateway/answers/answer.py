"""How one request's answers are read: reasoning, then content, in which tool calls may stand.

`AnswerReader` makes the format of the model, the prompt's end and the request; each choice has a
parser of it. Stop strings act on the content alone, so that they cut neither the reasoning nor a
call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.reasoning import ReasoningSplitter, Start
from services.gateway.forms.parts import Call, Part, Reasoning, Text


class Calls(Protocol):
    """Tool calls of one choice: text in, parts out; see `tool_parsers.CallParser`."""

    tag: ClassVar[str | None]
    head: ClassVar[str]
    in_call: bool
    done: bool

    def feed(self, text: str) -> list[Part]: ...
    def feed_call(self, text: str) -> tuple[list[Part], str]: ...
    def finish(self) -> list[Part]: ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request's answers are read.

    Attributes:
        reasoning: where an answer begins; None: the model does not think.
        calls: makes a choice's parser of tool calls; None: everything is text.
        has_to_call: the answer has to hold a call.
        include_reasoning: false: it is left out.
        grammar: what the decoder holds the answer to; None: it is free.
        grammar_param: the field that an error of the grammar names.
    """

    reasoning: Start | None = None
    calls: Callable[[], Calls] | None = None
    has_to_call: bool = False
    include_reasoning: bool = True
    grammar: pb.Grammar | None = None
    grammar_param: str | None = None

    @property
    def thinks(self) -> bool:
        """Whether reasoning may come before the content."""
        return self.reasoning in ("open", "optional")

    def parser(self) -> "AnswerParser | None":
        """A parser for one choice; None: everything is text."""
        if self.calls is None and not self.thinks:
            return None
        calls = self.calls() if self.calls else None
        tag, head = (calls.tag, calls.head) if calls else (None, "")
        splitter = ReasoningSplitter(self.reasoning or "closed", tag, head)
        return AnswerParser(self, splitter, calls)


@dataclass(slots=True)
class AnswerParser:
    """One choice's text to parts.

    Attributes:
        calls: parser of the content; None: it is text.
    """

    format: AnswerFormat
    splitter: ReasoningSplitter
    calls: Calls | None
    _in_call: bool = False  # within the reasoning
    _has_begun: bool = False  # the call within the reasoning: its name is known

    @property
    def thinking(self) -> bool:
        """Whether the text up to now ends in the reasoning."""
        return self.splitter.thinking and not self._in_call

    @property
    def in_head(self) -> bool:
        """Whether the text up to now ends, within the reasoning, in what may be the head of a call
        or of the closing tag.
        """
        return not self._has_begun if self._in_call else self.splitter.in_head

    @property
    def done(self) -> bool:
        """Whether the text that follows is of no use: all calls that are allowed are complete."""
        return self.calls is not None and self.calls.done

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
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
        """What was held back, once no more text follows."""
        if self.calls is None:
            return self._parse_calls(self.splitter.finish())
        if self._in_call:
            return self._thoughts(self.calls.finish())
        parts = self._parse_calls(self.splitter.finish())
        held = self.calls.finish()
        if self.format.has_to_call:  # what was to become a call and is cut off is no text
            held = [part for part in held if not isinstance(part, Text)]
        return parts + held

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        """Within the reasoning, what began like a call is reasoning."""
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
