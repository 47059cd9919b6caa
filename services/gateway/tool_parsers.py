"""Tool calls in a model's text, form by form: text in, parts out, whole or piece by piece.

`answer` feeds each choice's content through the parser that the model's spec names. What a parser
returns does not depend on how the text is cut. Text that only looks like a call stays text;
nothing here fails, and no text of the model is evaluated.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, cast

from services.gateway.parts import Call, Part, Text

Schema = Mapping[str, Any]
_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallParser:
    """A form of tool calls.

    Attributes:
        marker: what a chat template that teaches this form contains.
        done: `max_calls` calls are complete; the text that follows is of no use.

    Args:
        tools: JSON schema of each function's parameters, by name.
        max_calls: None: any number.
    """

    marker: ClassVar[str]

    def __init__(self, tools: Mapping[str, Schema], max_calls: int | None = None) -> None:
        self.tools = tools
        self.done = False
        self._max_calls = max_calls
        self._num_calls = 0
        self._buffer: str = ""

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and not self.done and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, once no more text follows."""
        return []

    def _step(self, parts: list[Part]) -> bool:
        """Takes something from the buffer; False: nothing is certain before more text comes."""
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
    """Calls between tags in free text. Blanks between text and calls belong to neither."""

    openers: ClassVar[Sequence[str]]

    def __init__(self, tools: Mapping[str, Schema], max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls)
        self._in_call = False
        self._after_call = False

    def finish(self) -> list[Part]:
        if self.done or self._in_call:
            return []
        text, self._buffer = self._buffer, ""
        if self._after_call:
            text = text.lstrip()
        return [Text(text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        return self._step_call(parts) if self._in_call else self._step_text(parts)

    def _step_call(self, parts: list[Part]) -> bool:
        raise NotImplementedError

    def _open(self, opener: str) -> None:
        """A call begins; the opener is no longer in the buffer."""
        raise NotImplementedError

    def _end_call(self) -> None:
        super()._end_call()
        self._in_call, self._after_call = False, True

    def _give_up(self, text: str, parts: list[Part]) -> None:
        """What began like a call is text."""
        parts.append(Text(text))
        self._in_call = self._after_call = False

    def _step_text(self, parts: list[Part]) -> bool:
        found = [(at, o) for o in self.openers if (at := self._buffer.find(o)) >= 0]
        if found:
            at, opener = min(found)
            self._text(self._buffer[:at].rstrip(_SPACE), parts)
            self._buffer = self._buffer[at + len(opener) :]
            self._in_call = True
            self._open(opener)
            return True
        size = len(self._buffer) - _num_held(self._buffer, self.openers)
        size = len(self._buffer[:size].rstrip(_SPACE))
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._text(text, parts)
        return False

    def _text(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip(_SPACE)
        if text:
            parts.append(Text(text))
            self._after_call = False


class HermesParser(_TaggedParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Qwen3-VL."""

    marker = "<tool_call>"
    openers = ("<tool_call>",)
    _closer = "</tool_call>"

    def _open(self, opener: str) -> None:
        self._object = _CallObject()

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
        # Before the closing tag there are only blanks, a brace too many, or a broken object's rest.
        at = len(self._buffer) - len(self._buffer.lstrip(_SPACE + "}"))
        if not call.complete:
            at = self._buffer.find(self._closer)
            at = len(self._buffer) - _num_held(self._buffer, (self._closer,)) if at < 0 else at
        self._buffer = self._buffer[at:]
        if self._closer.startswith(self._buffer) and self._buffer != self._closer:
            return False
        self._buffer = self._buffer.removeprefix(self._closer)
        self._end_call()
        return True

    def finish(self) -> list[Part]:
        if self._in_call and not self._object.begun:
            return [Text(self.openers[0] + self._object.raw)]
        return super().finish()


class Llama3JsonParser(CallParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, several joined by `;`: Llama 3.x.

    An object that is not a call of a known function is text, with all that follows.
    """

    marker = '"parameters"'
    _prefix = "<|python_tag|>"

    def __init__(self, tools: Mapping[str, Schema], max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls)
        self._raw = ""  # since the last call
        self._object: _CallObject | None = None
        self._is_text = False

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
            self._object, self._raw = None, ""
            self._end_call()
        return call.ended

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._object is None:
            if not self.done and (self._num_calls == 0 or self._buffer.strip()):
                self._give_up("", parts)
        elif not self._object.begun:
            self._give_up(self._object.raw, parts)
        return parts

    def _step_between(self, parts: list[Part]) -> bool:
        """Before the first call, or after one."""
        separators = _SPACE + (";," if self._num_calls else "")
        head = self._buffer.lstrip(separators)
        if head.startswith(self._prefix):
            head = head[len(self._prefix) :].lstrip(_SPACE)
        elif self._prefix.startswith(head):
            return False
        if not head:
            return False
        if head[0] != "{":
            self._give_up("", parts)
            return False
        self._raw = self._buffer[: len(self._buffer) - len(head)]
        self._buffer, self._object = head, _CallObject()
        return True

    def _give_up(self, raw: str, parts: list[Part]) -> None:
        text = self._raw + raw + self._buffer
        self._buffer, self._raw, self._object, self._is_text = "", "", None, True
        if text:
            parts.append(Text(text))


class Qwen3CoderParser(_TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…`: Qwen3-Coder, Qwen3.5.

    Values become JSON by the function's schema: of type string, they are streamed; of other types,
    they are JSON text, else a string.
    """

    marker = "<function="
    openers = ("<tool_call>", "<function=")
    _parameter, _end_parameter, _end_function = "<parameter=", "</parameter>", "</function>"
    _end_tag = "</tool_call>"

    def _open(self, opener: str) -> None:
        self._raw = opener  # until the call is certain
        self._state: Literal["tag", "name", "between", "value", "after"]
        self._state = "tag" if opener == self.openers[0] else "name"
        self._num_parameters = 0
        self._schema: Schema = {}

    def finish(self) -> list[Part]:
        if not self._in_call:
            return super().finish()
        if self._state in ("tag", "name"):
            return [Text(self._raw + self._buffer)]
        return []  # the arguments stay open, as in any answer that was cut

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
        head = self._buffer.lstrip(_SPACE)
        if head.startswith(self.openers[1]):
            self._raw += self._buffer[: len(self._buffer) - len(head)] + self.openers[1]
            self._buffer, self._state = head[len(self.openers[1]) :], "name"
            return True
        if self.openers[1].startswith(head):
            return False
        self._give_up(self._raw, parts)
        return True

    def _step_name(self, parts: list[Part]) -> bool:
        end = self._buffer.find(">")
        name = self._buffer[:end] if end >= 0 else self._buffer
        if "\n" in name or "<" in name or end == 0:
            self._give_up(self._raw, parts)
            return True
        if end < 0:
            return False
        self._buffer, self._state = self._buffer[end + 1 :], "between"
        self._begin_call(name.strip(), parts)
        self._schema = self.tools.get(name.strip(), {})
        return True

    def _step_between(self, parts: list[Part]) -> bool:
        """Before a parameter or the function's end."""
        self._buffer = self._buffer.lstrip(_SPACE)
        if self._buffer.startswith(self._parameter):
            end = self._buffer.find(">")
            # One line break after the tag belongs to it.
            if end < 0 or end + 1 == len(self._buffer):
                return False
            name = self._buffer[len(self._parameter) : end].strip()
            self._buffer = self._buffer[end + 1 :].removeprefix("\n")
            separator = ", " if self._num_parameters else "{"
            self._num_parameters += 1
            self._state = "value"
            self._types = _types_of(self._schema, name)
            self._kind = "string" if self._types == frozenset(("string",)) else "json"
            self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ", parts)
            if self._kind == "string":
                self._add_arguments('"', parts)
            return True
        ends = (self._end_function, self._end_tag)
        if self._buffer.startswith(ends):
            self._add_arguments("}" if self._num_parameters else "{}", parts)
            self._buffer = self._buffer.removeprefix(self._end_function)
            self._state = "after"
            return True
        if any(tag.startswith(self._buffer) for tag in (self._parameter, *ends)):
            return False
        # Neither: drop what no call can hold, up to the next tag.
        self._buffer = self._buffer[1:]
        return True

    def _step_value(self, parts: list[Part]) -> bool:
        end = self._buffer.find(self._end_parameter)
        if end >= 0:
            value = self._buffer[:end].removesuffix("\n")
            self._buffer = self._buffer[end + len(self._end_parameter) :]
            if self._kind == "string":
                self._add_arguments(_escaped(value) + '"', parts)
            else:
                self._add_arguments(_to_json(value, self._types), parts)
            self._state = "between"
            return True
        if self._kind == "string":
            size = len(self._buffer) - _num_held(self._buffer, ("\n" + self._end_parameter,))
            if size == len(self._buffer):
                size -= _num_held(self._buffer, (self._end_parameter,))
            self._add_arguments(_escaped(self._buffer[:size]), parts)
            self._buffer = self._buffer[size:]
        return False

    def _step_after(self, parts: list[Part]) -> bool:
        """After the function: the outer tag may follow."""
        head = self._buffer.lstrip(_SPACE)
        if len(head) < len(self._end_tag) and self._end_tag.startswith(head):
            return False
        self._buffer = head.removeprefix(self._end_tag)
        self._end_call()
        return True


PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": Qwen3CoderParser,
}


class _CallObject:
    """The JSON object of one call, read character by character.

    Attributes:
        name: of the function, once it is known.
        begun: the name is known and the arguments have begun, or the object is complete.
        ended: complete, or no object that can be a call.
        complete: its last brace has been read.
    """

    def __init__(self) -> None:
        self.name = ""
        self.begun = self.ended = self.complete = False
        self._state: Literal["start", "key", "colon", "value", "next"] = "start"
        self._key = ""
        self._token = ""  # of a key, or of the name
        self._in_string = self._escaped = self._value_begun = False
        self._depth = 0
        self._arguments: list[str] = []  # not yet taken
        self._has_arguments = self._arguments_ended = False
        self._read_so_far: list[str] = []  # until the call has begun
        self._reported = False

    @property
    def raw(self) -> str:
        """All text read, if the call has not begun."""
        return "".join(self._read_so_far)

    def feed(self, text: str) -> str:
        """Reads up to the object's end; returns what follows it."""
        for index, character in enumerate(text):
            if self.ended or not self._read(character):
                self.ended = True
                return text[index:]
            if not self._reported:
                self._read_so_far.append(character)
        return ""

    def name_is_new(self) -> bool:
        """Whether the call has begun since the last question."""
        is_new = self.begun and not self._reported
        self._reported = self._reported or is_new
        return is_new

    def take_arguments(self) -> str:
        """New text of the arguments."""
        if not self.begun:
            return ""
        if self.complete and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read(self, character: str) -> bool:
        """Takes one character; False: it cannot follow, and is not part of the object."""
        if self._state == "value":
            return self._read_value(character)
        if self._in_string:
            self._token += character
            self._follow_string(character)
            if not self._in_string:
                self._key, self._state = _string(self._token), "colon"
            return True
        if character in _SPACE:
            return True
        if self._state == "start":
            self._state = "key"
            return character == "{"
        if self._state == "key" and character == '"':
            self._in_string, self._token = True, '"'
            return True
        if self._state == "colon" and character == ":":
            self._state, self._token, self._value_begun = "value", "", False
            return True
        if self._state == "next" and character == ",":
            self._state = "key"
            return True
        if self._state == "next" and character == "}":
            self.begun = bool(self.name)
            self.ended = self.complete = True
            return True
        return False

    def _read_value(self, character: str) -> bool:
        if self._in_string:
            self._follow_string(character)
            return self._extend(character)
        if not self._depth:
            if character in _SPACE:
                return not self._value_begun or self._end_value()
            if character in ",}":
                return self._end_value() and self._read(character)
            if self._value_begun and character in '"{[':
                return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth >= 0 and self._extend(character)
        elif character not in "0123456789+-.eE,: \t\r\ntrufalsn":  # of scalars, or between them
            return False
        return self._extend(character)

    def _extend(self, character: str) -> bool:
        """One more character of the value; False: it makes the name none."""
        self._value_begun = True
        if self._key in _ARGUMENT_KEYS and not self._arguments_ended:
            self._arguments.append(character)
            self._has_arguments = True
            self.begun = bool(self.name)
        elif self._key == "name" and not self.name:
            self._token += character
            if not self._in_string:
                self.name = _string(self._token)
                self.begun = bool(self.name) and self._has_arguments
                return bool(self.name)
        return True

    def _end_value(self) -> bool:
        if not self._value_begun:
            return False
        self._arguments_ended = self._has_arguments
        self._state = "next"
        return True

    def _follow_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _num_held(text: str, tags: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins one of the tags."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags if len(tag) > size):
            return size
    return 0


def _string(token: str) -> str:
    """The value of a JSON string; empty if it is none."""
    try:
        value = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them back


def _to_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as a JSON value of one of the types; else as a JSON string."""
    token = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(token, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or ("string" in types and not types & _types_of_value(value)):
        return json.dumps(text, ensure_ascii=False)
    return token


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _types_of_value(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    return {"object" if isinstance(value, dict) else "array"}


_MAX_DEPTH = 8  # of references and alternatives


def _types_of(parameters: Schema, name: str) -> frozenset[str]:
    """The JSON types that a function's parameter may have; empty: the schema does not say."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(_types(cast(Schema, properties).get(name), parameters, _MAX_DEPTH))


def _types(schema: object, root: Schema, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    schema = cast(Schema, schema)
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in cast("list[object]", given) if isinstance(kind, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = cast("list[object]", schema.get("enum") or [schema.get("const")])
        kinds = (_types_of_value(v) if not isinstance(v, str) else {"string"} for v in values)
        return set[str]().union(*kinds)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        _, *path = reference.split("/")
        target: Any = root
        for step in path:
            target = cast(Schema, target).get(step) if isinstance(target, Mapping) else None
        return _types(target, root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            found = [_types(branch, root, depth - 1) for branch in cast("list[object]", branches)]
            # A branch that does not say may be anything.
            return set[str]().union(*found) if key == "allOf" or all(found) else set()
    return set()
