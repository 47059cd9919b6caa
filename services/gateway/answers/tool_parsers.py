"""Streaming parsers of the tool calls in a model's text, one class for each format of calls.

`answer` feeds each choice's content through the parser that the model's spec names, and gets parts
of the answer back. The parts do not depend on how the text is cut into pieces. Text that only looks
like a call stays text. A parser raises no error, and evaluates no text of the model.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from services.gateway.answers.argument_values import Parameters, Schema, StringScan, to_json
from services.gateway.answers.call_object import SPACE, CallObject
from services.gateway.answers.reasoning import certain
from services.gateway.forms.parts import Call, Part, Text


class CallParser:
    """Parser of one format of tool calls.

    The arguments of every call are the text of a JSON object, even if the model's text is malformed
    or ends within the call.

    Attributes:
        marker: text by which a chat template that teaches this format is recognized.
        tag: text that opens a call. None if calls have no opening tag.
        head: text that follows the tag after optional whitespace.
        in_call: true if the text so far ends within a call.
        done: true if `max_calls` calls are complete, so that all further text is ignored.

    Args:
        tools: JSON schema of the parameters of each function, by the function's name.
        max_calls: largest number of calls. None if there may be any number.
        has_grammar: true if a grammar constrains the text to the format, so that no mistakes of the
            model have to be repaired.
    """

    marker: ClassVar[str]
    tag: ClassVar[str | None] = None
    head: ClassVar[str] = ""

    def __init__(
        self,
        tools: Mapping[str, Schema],
        max_calls: int | None = None,
        *,
        has_grammar: bool = False,
    ) -> None:
        self.tools = tools
        self.done = self.in_call = False
        self._max_calls = max_calls
        self._has_grammar = has_grammar
        self._num_calls = 0
        self._buffer: str = ""
        # White space that is part of the answer if text follows, and is dropped if a call follows.
        # It is joined only once, because a model may write a very long run of it.
        self._pending: list[str] = []

    @property
    def num_buffered(self) -> int:
        """Number of characters that wait for more text."""
        return len(self._buffer)

    def feed(self, text: str) -> list[Part]:
        """Takes more text, and returns the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and not self.done and self._step(parts):
            pass
        return parts

    def feed_call(self, text: str) -> tuple[list[Part], str]:
        """Takes more text of one call that begins with the tag.

        Returns:
            The parts that are certain, and the text after the call once the call has ended.
        """
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and self._step(parts):
            if not self.in_call:
                rest, self._buffer = self._buffer, ""
                return parts, rest
        return parts, ""

    def finish(self) -> list[Part]:
        """Returns the parts of all buffered text, once no more text follows.

        A call that is still open is closed.
        """
        return []

    def _step(self, parts: list[Part]) -> bool:
        """Takes some text from the buffer.

        Returns:
            False if nothing can be decided before more text arrives.
        """
        raise NotImplementedError

    def _begin_call(self, name: str, parts: list[Part]) -> None:
        parts.append(Call(self._num_calls, f"call_{secrets.token_hex(12)}", name, ""))

    def _add_arguments(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Call(self._num_calls, "", "", text))

    def _end_call(self) -> None:
        self._num_calls += 1
        self.done = self._num_calls == self._max_calls


class _TaggedParser(CallParser):
    """Parser of calls between tags in free text.

    Whitespace between text and calls is dropped.
    """

    tag, _closer = "<tool_call>", "</tool_call>"
    openers: ClassVar[Sequence[str]] = (tag,)
    _after_call = False

    def finish(self) -> list[Part]:
        if self.done or self.in_call:
            return []
        text, self._buffer = "".join(self._pending) + self._buffer, ""
        if self._after_call:
            text = text.lstrip()
        return [Text(text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        return self._step_call(parts) if self.in_call else self._step_text(parts)

    def _step_call(self, parts: list[Part]) -> bool:
        raise NotImplementedError

    def _open(self, opener: str) -> None:
        """Begins a call whose opener was removed from the buffer."""
        raise NotImplementedError

    def _begin_call(self, name: str, parts: list[Part]) -> None:
        self._pending.clear()
        super()._begin_call(name, parts)

    def _end_call(self) -> None:
        super()._end_call()
        self.in_call, self._after_call = False, True

    def _give_up(self, text: str, parts: list[Part]) -> None:
        """Returns text that only began like a call to the answer's text.

        Whitespace before it is text as well, unless it follows a call.
        """
        blanks = "" if self._after_call else "".join(self._pending)
        self._pending.clear()
        parts.append(Text(blanks + text))
        self.in_call = self._after_call = False

    def _step_text(self, parts: list[Part]) -> bool:
        found = [(at, o) for o in self.openers if (at := self._buffer.find(o)) >= 0]
        if found:
            at, opener = min(found)
            self._text(self._buffer[:at], parts)
            self._buffer = self._buffer[at + len(opener) :]
            self.in_call = True
            self._open(opener)
            return True
        size = certain(self._buffer, self.openers)
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._text(text, parts)
        return False

    def _text(self, text: str, parts: list[Part]) -> None:
        """Adds text to the parts, and keeps whitespace at its end pending."""
        words = text.rstrip(SPACE)
        if words:
            found = "".join(self._pending) + words
            parts.append(Text(found.lstrip(SPACE) if self._after_call else found))
            self._pending.clear()
            self._after_call = False
        self._pending.append(text[len(words) :])


class HermesParser(_TaggedParser):
    """Parser of `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    marker = "<tool_call>"
    head = "{"

    def _open(self, opener: str) -> None:
        self._object = CallObject()

    def _step_call(self, parts: list[Part]) -> bool:
        call = self._object
        if not call.ended:
            self._buffer = call.feed(self._buffer)
            if call.ended and not call.begun:
                self._give_up(self.openers[0] + call.raw, parts)
                return True
            if call.name_is_new():
                self._begin_call(call.name, parts)
            self._add_arguments(call.take_arguments(), parts)
            return call.ended
        # Skips the text before the closing tag: whitespace, a superfluous brace, or the rest of a
        # malformed object.
        at = len(self._buffer) - len(self._buffer.lstrip(SPACE + "}"))
        if not call.complete:
            at = self._buffer.find(self._closer)
            at = certain(self._buffer, (self._closer,)) if at < 0 else at
        self._buffer = self._buffer[at:]
        if self._closer.startswith(self._buffer) and self._buffer != self._closer:
            return False
        self._buffer = self._buffer.removeprefix(self._closer)
        self._end_call()
        return True

    def finish(self) -> list[Part]:
        if not self.in_call:
            return super().finish()
        parts: list[Part] = []
        if not self._object.begun:
            self._give_up(self.openers[0] + self._object.raw, parts)
            return parts
        self._object.close()
        self._add_arguments(self._object.take_arguments(), parts)
        return parts


class Llama3JsonParser(CallParser):
    """Parser of `llama3_json`: `{"name": …, "parameters": {…}}` as the whole answer.

    Several calls are joined by `;`. An object that is not a call of a known function is text, and
    so is everything after it.
    """

    marker = '"parameters"'
    _prefix = "<|python_tag|>"
    _separators = SPACE + ";,"  # between calls
    _object: CallObject | None = None
    _is_tagged = _is_text = False

    def _step(self, parts: list[Part]) -> bool:
        if self._is_text:
            parts.append(Text(self._buffer))
            self._buffer = ""
            return False
        if self._object is None:
            return self._step_between(parts)
        call = self._object
        self._buffer = call.feed(self._buffer)
        if call.name_is_new() and call.name in self.tools:
            self._begin_call(call.name, parts)
        elif (call.begun and call.name not in self.tools) or (call.ended and not call.begun):
            self._give_up(call.raw, parts)
            return True
        self._add_arguments(call.take_arguments(), parts)
        if call.ended:
            self._object, self._is_tagged = None, False
            self._pending.clear()
            self._end_call()
        return call.ended

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._object is None:
            rest = "".join(self._pending) + self._buffer
            if not self.done and (self._num_calls == 0 or rest.strip(self._separators)):
                self._give_up("", parts)
        elif not self._object.begun:
            self._give_up(self._object.raw, parts)
        else:
            self._object.close()
            self._add_arguments(self._object.take_arguments(), parts)
        return parts

    def _step_between(self, parts: list[Part]) -> bool:
        """Takes text before the first call or after a call."""
        if not self._is_tagged:
            self._skip(self._buffer.lstrip(self._separators if self._num_calls else SPACE))
            if self._buffer.startswith(self._prefix):
                self._skip(self._buffer[len(self._prefix) :])
                self._is_tagged = True
            elif self._prefix.startswith(self._buffer):
                return False
        if self._is_tagged:
            self._skip(self._buffer.lstrip(SPACE))
        if not self._buffer:
            return False
        if self._buffer[0] != "{":
            self._give_up("", parts)
            return False
        self._object = CallObject()
        return True

    def _skip(self, rest: str) -> None:
        """Makes the buffer up to `rest` pending: it is text only if no call follows."""
        self._pending.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest

    def _give_up(self, raw: str, parts: list[Part]) -> None:
        text = "".join(self._pending) + raw + self._buffer
        self._buffer, self._object, self._is_text = "", None, True
        self._pending.clear()
        if text:
            parts.append(Text(text))


class Qwen3CoderParser(_TaggedParser):
    """Parser of `qwen3_coder`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…`.

    The function's schema decides how a value becomes JSON. A value of type string is streamed as a
    string. A value of another type is JSON text, or a string if the text is not JSON. If the schema
    allows strings and other types, text that is JSON of another allowed type has that type.
    """

    marker = "<function="
    openers = ("<tool_call>", "<function=")
    head = "<function="
    _parameter, _end_parameter, _end_function = "<parameter=", "</parameter>", "</function>"
    _inner = (_parameter, _end_function, _TaggedParser._closer)
    _stray = re.compile(rf"(?!{_TaggedParser._closer})</\w{{1,64}}>|(?:</?\w{{0,64}})?\Z")
    _named = re.compile(r"([^<>\n]*)([<>\n])\s{0,64}")
    # One line break after the tag belongs to the tag. Models forget the bracket before the break.
    _opened = re.compile(rf"{_parameter}([^>\n]*)(?:>\n?|\n)")
    _opened_by_grammar = re.compile(rf"{_parameter}([^>]*)>\n?")
    # The last two end a value as well, since models forget the closing tag of a value.
    _enders = (
        f"\n{_end_parameter}",
        _end_parameter,
        f"\n{_parameter}",
        f"\n{_end_function}\n{_TaggedParser._closer}",
    )
    _end = re.compile("|".join(_enders))

    def _open(self, opener: str) -> None:
        self._raw = [opener]  # text that is returned if this is no call
        self._state: Literal["tag", "name", "between", "value", "after"]
        self._state = "tag" if opener == self.openers[0] else "name"
        self._num_parameters = 0
        self._parameters = Parameters({})

    def finish(self) -> list[Part]:
        if not self.in_call:
            return super().finish()
        parts: list[Part] = []
        if self._state in ("tag", "name"):
            self._give_up("".join(self._raw) + self._buffer, parts)
            return parts
        if self._state == "value":
            self._end_value(self._buffer[: certain(self._buffer, self._enders)], parts)
        if self._state != "after":
            self._add_arguments("}" if self._num_parameters else "{}", parts)
        return parts

    def _step_call(self, parts: list[Part]) -> bool:
        steps = {
            "tag": self._step_tag,
            "name": self._step_name,
            "between": self._step_between,
            "value": self._step_value,
            "after": self._step_after,
        }
        return steps[self._state](parts)

    def _step_tag(self, parts: list[Part]) -> bool:
        head = self._buffer.lstrip(SPACE)
        self._raw.append(self._buffer[: len(self._buffer) - len(head)])
        self._buffer = head
        if head.startswith(self.openers[1]):
            self._raw.append(self.openers[1])
            self._buffer, self._state = head[len(self.openers[1]) :], "name"
            return True
        if self.openers[1].startswith(head):
            return False
        self._give_up("".join(self._raw), parts)
        return True

    def _step_name(self, parts: list[Part]) -> bool:
        written = self._named.match(self._buffer)
        if written is None:
            return False
        name, rest = written[1].strip(), self._buffer[written.end() :]
        # Models forget the bracket after the name; the name then has to be a known function's.
        is_name = (name and written[2] == ">") or (name in self.tools and written[2] == "\n")
        if is_name and rest.startswith(self._inner):
            self._buffer, self._state = rest, "between"
            self._begin_call(name, parts)
            self._parameters = Parameters(self.tools.get(name, {}))
        elif is_name and any(tag.startswith(rest) for tag in self._inner):
            return False
        else:  # the text only mentions the tag
            self._give_up("".join(self._raw), parts)
        return True

    def _step_between(self, parts: list[Part]) -> bool:
        """Takes text before a parameter or before the function's end."""
        self._buffer = self._buffer.lstrip(SPACE)
        if self._buffer.startswith(self._parameter):
            opened = (self._opened_by_grammar if self._has_grammar else self._opened).match(
                self._buffer
            )
            if opened is None or opened.end() == len(self._buffer):
                return False
            name, self._buffer = opened[1].strip(), self._buffer[opened.end() :]
            separator = ", " if self._num_parameters else "{"
            self._num_parameters += 1
            self._state, self._scan, self._num_searched = "value", StringScan(), 0
            self._type = self._parameters.type_of(name)
            self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ", parts)
            if self._type.is_text:
                self._add_arguments('"', parts)
            return True
        if self._buffer.startswith(self._inner[1:]):
            self._add_arguments("}" if self._num_parameters else "{}", parts)
            self._buffer = self._buffer.removeprefix(self._end_function)
            self._state = "after"
            return True
        if any(tag.startswith(self._buffer) for tag in self._inner):
            return False
        # Drops text that cannot be part of a call, up to the next tag.
        self._buffer = self._buffer[1:]
        return True

    def _step_value(self, parts: list[Part]) -> bool:
        while found := self._end.search(self._buffer, self._num_searched):
            tag = found[0].lstrip("\n")
            at = found.end() - len(tag)
            self._num_searched = found.end()
            if tag != self._end_parameter and self._has_grammar:
                continue
            if self._type.may_be_nested and self._scan.ends_in_string(self._buffer, at):
                continue
            value = self._buffer[:at].removesuffix("\n")
            self._buffer = self._buffer[at:].removeprefix(self._end_parameter)
            self._end_value(value, parts)
            self._state = "between"
            return True
        size = certain(self._buffer, self._enders)
        if self._type.is_text:
            self._add_arguments(_escaped(self._buffer[:size]), parts)
            self._buffer, size = self._buffer[size:], 0
        self._num_searched = size
        return False

    def _end_value(self, text: str, parts: list[Part]) -> None:
        is_text = self._type.is_text
        self._add_arguments(_escaped(text) + '"' if is_text else to_json(text, self._type), parts)

    def _step_after(self, parts: list[Part]) -> bool:
        """Takes the outer closing tag after the function, and stray closing tags before it."""
        head = self._buffer = self._buffer.lstrip(SPACE)
        if self._stray.match(head):
            tag, end, self._buffer = head.partition(">")
            self._buffer = self._buffer if end else tag
            return bool(end)
        self._buffer = head.removeprefix(self._closer)
        self._end_call()
        return True


PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": Qwen3CoderParser,
}


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
