"""How one request's answers are read: reasoning, then content, in which tool calls may stand.

`PromptBuilder` knows the format from the model, the prompt's end and the request's tools; each
choice has a parser of it. Stop strings act on the content alone, so that they cut neither the
reasoning nor a call.
"""

from dataclasses import dataclass

from services.gateway.answers.reasoning import ReasoningSplitter, Start
from services.gateway.answers.tool_parsers import CallParser
from services.gateway.forms.parts import Part, Text
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
        return AnswerParser(
            ReasoningSplitter(self.reasoning or "closed", calls.parser.tag if calls else None),
            calls.parser(calls.use.schemas, calls.use.max_calls) if calls else None,
            self.include_reasoning,
        )


class AnswerParser:
    """One choice's text to parts."""

    def __init__(
        self, splitter: ReasoningSplitter, calls: CallParser | None, include_reasoning: bool
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._include_reasoning = include_reasoning

    @property
    def thinking(self) -> bool:
        """Whether the text up to now ends in the reasoning."""
        return self._splitter.thinking

    @property
    def done(self) -> bool:
        """Whether the text that follows is of no use: all calls that are allowed are complete."""
        return self._calls is not None and self._calls.done

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
        return self._parse_calls(self._splitter.feed(text))

    def finish(self) -> list[Part]:
        """What was held back, once no more text follows."""
        parts = self._parse_calls(self._splitter.finish())
        return parts + self._calls.finish() if self._calls is not None else parts

    def _parse_calls(self, parts: list[Part]) -> list[Part]:
        if not self._include_reasoning:
            parts = [part for part in parts if isinstance(part, Text)]
        if self._calls is None:
            return parts
        parsed: list[Part] = []
        for part in parts:
            parsed += self._calls.feed(part.text) if isinstance(part, Text) else (part,)
        return parsed
