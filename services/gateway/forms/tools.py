"""The types of a request's tools and tool calls, in OpenAI's shapes.

The checks in this module do not depend on the model; `answers.tool_use` decides how tools affect
the answer. All errors are `InvalidRequest`, and `param` names the field.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from services.common.errors import InvalidRequest
from services.gateway.forms.json_body import TEXT_END

MAX_TOOLS = 512
MAX_CALLS = 128
MAX_NESTING = 100
UNREADABLE: dict[str, Any] = {}
_CHARACTERS_OF_A_VALUE = 4
_CONTAINERS = (dict, list)
_MAX_COUNTED = 1 << 14  # characters of a value after which counting stops
_SHOWN = ("name", "description", "parameters")  # fields that the model sees
ToolName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_.:-]{{1,128}}{TEXT_END}")]


class FunctionDefinition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. If `strict` is true, a grammar makes the arguments of a
    call fit `parameters`.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool. Only functions are served."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: ToolName


class FunctionChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The model has to call this function."""

    function: FunctionName


class AllowedFunctions(Struct, forbid_unknown_fields=True):
    """The functions that the model may call, or has to call. The prompt still has all functions."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A restriction to some of the tools."""

    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


class FunctionCall(Struct, forbid_unknown_fields=True):
    """The function of a call. `arguments` is the JSON text of an object; empty text means `{}`."""

    name: str
    arguments: str | None = None


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call in an assistant message, repeated from an earlier answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] | None = None


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Checks the fields against each other.

    Raises:
        InvalidRequest: two functions have the same name, `choice` names a function that is not in
            `tools`, or a schema is nested too deeply.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            path = f"tools[{index}].function.name"
            raise InvalidRequest(f"two functions have the name {name}", param=path)
        check_nesting(tool.function.parameters, f"tools[{index}].function.parameters")
        names.add(name)
    param = "tool_choice.function"
    if isinstance(choice, AllowedTools):
        param = "tool_choice.allowed_tools.tools"
    for name in chosen_names(choice):
        if name not in names:
            raise InvalidRequest(f"tools has no function {name}", param=param)


def chosen_names(choice: ToolChoice | None) -> list[str]:
    """Returns the names of the functions that a choice names."""
    if isinstance(choice, FunctionChoice):
        return [choice.function.name]
    if isinstance(choice, AllowedTools):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the definitions of the functions as chat templates expect them."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        fields = {name: getattr(tool.function, name) for name in _SHOWN}
        function = {name: value for name, value in fields.items() if value is not None}
        found.append({"type": "function", "function": function})
    return found


def tool_characters(tools: Sequence[Tool]) -> int:
    """Returns the approximate length of all definitions, as `json_characters` does."""
    functions = [tool.function for tool in tools]
    return json_characters([[each.description, each.parameters] for each in functions])


def json_characters(value: object) -> int:
    """Returns the approximate length of a JSON value in characters. Each nested value counts some
    characters more, because empty values take time, too.

    Counting takes time, so it stops at a limit: for a long value, the result is the length of some
    part of the value.
    """
    size, left = 0, [value]
    while left and size < _MAX_COUNTED:
        item = left.pop()
        size += _CHARACTERS_OF_A_VALUE + sum(map(len, _own_strings(item)))
        left += islice(_children(item), _MAX_COUNTED)
    return size


def check_nesting(value: object, param: str) -> None:
    """Refuses JSON values that are nested more than `MAX_NESTING` deep."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [c for item in level for c in _children(item) if isinstance(c, _CONTAINERS)]
        if not level:
            return
    raise InvalidRequest(f"nested more than {MAX_NESTING} deep", param=param)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _own_strings(value: object) -> Iterable[str]:
    """Returns a string itself, or the keys of an object."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value)
    return (value,) if isinstance(value, str) else ()


def strings_of(value: object) -> Iterator[str]:
    """Yields all strings and keys of a JSON value, in any order."""
    left = [value]
    while left:
        item = left.pop()
        yield from _own_strings(item)
        left += _children(item)


def read_arguments(call: ToolCall, param: str) -> dict[str, Any]:
    """Returns the arguments of a call, as chat templates expect them. `UNREADABLE` if the arguments
    are not the JSON text of an object, as after a call that the client interrupted.

    Raises:
        InvalidRequest: the arguments are nested too deeply; the error names `param`.
    """
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return UNREADABLE
    check_nesting(arguments, param)
    return arguments
