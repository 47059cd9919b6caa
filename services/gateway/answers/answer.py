"""How one request's answers are read: reasoning, then content, in which tool calls may stand.

`PromptBuilder` knows the format from the model, the prompt's end and the request's tools; each
choice has a parser of it. Stop strings act on the content alone, so that they cut neither the
reasoning nor a call.
"""

from dataclasses import dataclass

from services.gateway.answers.reasoning import ReasoningSplitter, Start
from services.gateway.answers.tool_parsers import CallParser
from services.gateway.forms.parts import Part, Reasoning, Text
from services.gateway.forms.tools import ToolUse


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls that an answer may hold.

    Attributes:
        parser: of the model's form.
        use: what the request says of its tools.
    """

    parser: type[CallParser]
    use: ToolUse


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request's answers are read.

    Attributes:
        reasoning: where an answer begins; None: the model does not think.
        tool_calls: None: everything is text.
        include_reasoning: false: it is left out.
    """

    reasoning: Start | None = None
    tool_calls: ToolCalls | None = None
    include_reasoning: bool = True

    @property
    def thinks(self) -> bool:
        """Whether reasoning may come before the content."""
        return self.reasoning in ("open", "optional")

    def parser(self) -> "AnswerParser | None":
        """A parser for one choice; None: everything is text."""
        calls = self.tool_calls
        if calls is None and not self.thinks:
            return None
        tag, head = (calls.parser.tag, calls.parser.head) if calls else (None, "")
        return AnswerParser(
            ReasoningSplitter(self.reasoning or "closed", tag, head),
            calls.parser(calls.use.schemas, calls.use.max_calls) if calls else None,
            self.include_reasoning,
            has_text=calls is None or not calls.use.required,
        )


class AnswerParser:
    """One choice's text to parts.

    Args:
        splitter: of the reasoning.
        calls: parser of the content; None: it is text.
        include_reasoning: false: it is left out.
        has_text: false: what was to become a call and is cut off is no text.
    """

    def __init__(
        self,
        splitter: ReasoningSplitter,
        calls: CallParser | None,
        include_reasoning: bool,
        *,
        has_text: bool = True,
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._include_reasoning = include_reasoning
        self._has_text = has_text
        self._in_call = False  # within the reasoning

    @property
    def thinking(self) -> bool:
        """Whether the text up to now ends in the reasoning."""
        return self._splitter.thinking and not self._in_call

    @property
    def done(self) -> bool:
        """Whether the text that follows is of no use: all calls that are allowed are complete."""
        return self._calls is not None and self._calls.done

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
        parts: list[Part] = []
        while text and not self.done:
            if self._in_call and self._calls is not None:
                found, text = self._calls.feed_call(text)
                self._in_call = self._calls.in_call
                parts += self._thoughts(found)
            else:
                parts += self._parse_calls(self._splitter.feed(text))
                text = self._splitter.take_call()
                self._in_call = bool(text)
        return parts

    def finish(self) -> list[Part]:
        """What was held back, once no more text follows."""
        if self._calls is None:
            return self._parse_calls(self._splitter.finish())
        if self._in_call:
            return self._thoughts(self._calls.finish())
        parts = self._parse_calls(self._splitter.finish())
        held = self._calls.finish()
        return parts + [part for part in held if self._has_text or not isinstance(part, Text)]

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        """Within the reasoning, what began like a call is reasoning."""
        thoughts: list[Part] = [
            Reasoning(part.text) if isinstance(part, Text) else part for part in parts
        ]
        return self._without_reasoning(thoughts)

    def _without_reasoning(self, parts: list[Part]) -> list[Part]:
        if self._include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _parse_calls(self, parts: list[Part]) -> list[Part]:
        parts = self._without_reasoning(parts)
        if self._calls is None:
            return parts
        parsed: list[Part] = []
        for part in parts:
            parsed += self._calls.feed(part.text) if isinstance(part, Text) else (part,)
        return parsed
