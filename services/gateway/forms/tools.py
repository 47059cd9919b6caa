"""A request's tools: what OpenAI's fields say, checked, and what follows for prompt and answer.

The chat request has these types. What depends on the model (template, form of calls) is not known
here. All errors are `InvalidRequest`; `param` names the field.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from services.common.errors import InvalidRequest

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_NESTING = 100
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class FunctionDefinition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. `strict`: its arguments fit `parameters`, by grammar."""

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
    """The functions that the model may, or has to, call; all stay in the prompt."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A restriction to some of the tools."""

    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


class FunctionCall(Struct, forbid_unknown_fields=True):
    """What was called. `arguments` is the JSON text of an object; empty text means `{}`."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call in an assistant message, as an earlier answer had it."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


def tool_characters(tools: Sequence[Tool]) -> int:
    """Length of the strings of all definitions."""
    return sum(
        len(tool.function.description or "") + _characters(tool.function.parameters)
        for tool in tools
    )


def check_nesting(value: object, param: str) -> None:
    """Refuses JSON values that are nested more than `MAX_NESTING` deep."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise InvalidRequest(f"nested more than {MAX_NESTING} deep", param=param)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _characters(value: object) -> int:
    """Length of all strings and keys."""
    size, level = 0, [value]
    while level:
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                size += sum(map(len, cast("dict[str, object]", item)))
        level = [child for item in level for child in _children(item)]
    return size


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Attributes:
        definitions: for the chat template: name, description and parameters of every function.
        functions: those that may be called, by name.
        required: the answer has to call one.
        max_calls: None: any number.
        restricted: not all functions of the prompt may be called.
    """

    definitions: list[dict[str, Any]]
    functions: Mapping[str, FunctionDefinition]
    required: bool = False
    max_calls: int | None = None
    restricted: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether calls have to be held to the request."""
        strict = any(function.strict for function in self.functions.values())
        return self.required or self.restricted or strict

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schema of the parameters of each function that may be called."""
        return {name: f.parameters or {} for name, f in self.functions.items()}


def read_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool
) -> ToolUse | None:
    """Checks the fields against each other.

    Args:
        tools: of the request.
        choice: `tool_choice`; None: auto.
        parallel: `parallel_tool_calls`.

    Returns:
        None if no call is possible: no tools, or the choice is `none`; the prompt has none then.

    Raises:
        InvalidRequest: a name is there twice, or not at all; a schema is nested too deeply.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    functions: dict[str, FunctionDefinition] = {}
    for index, tool in enumerate(tools):
        if tool.function.name in functions:
            raise InvalidRequest(
                f"a second function is named {tool.function.name}",
                param=f"tools[{index}].function.name",
            )
        check_nesting(tool.function.parameters, f"tools[{index}].function.parameters")
        functions[tool.function.name] = tool.function
    if choice == "none":
        return None
    required, max_calls = choice == "required", None if parallel else 1
    if isinstance(choice, FunctionChoice):
        functions = _named(functions, [choice.function], "tool_choice.function")
        required, max_calls = True, 1
    elif isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        names = [tool.function for tool in allowed.tools]
        functions = _named(functions, names, "tool_choice.allowed_tools.tools")
        required = allowed.mode == "required"
    return ToolUse(
        [_definition(tool) for tool in tools],
        functions,
        required,
        max_calls,
        restricted=len(functions) < len(tools),
    )


def _named(
    functions: Mapping[str, FunctionDefinition], names: Sequence[FunctionName], param: str
) -> dict[str, FunctionDefinition]:
    for name in names:
        if name.name not in functions:
            raise InvalidRequest(f"tools has no function {name.name}", param=param)
    return {name.name: functions[name.name] for name in names}


def _definition(tool: Tool) -> dict[str, Any]:
    """For the template; `strict` is for us, not for the model."""
    function = msgspec.to_builtins(tool.function)
    function.pop("strict", None)
    return {"type": tool.type, "function": function}


def read_arguments(call: ToolCall, param: str) -> dict[str, Any]:
    """A call's arguments, as templates take them.

    Raises:
        InvalidRequest: they are not the JSON text of an object, or nested too deeply.
    """
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        raise InvalidRequest("not the JSON text of an object", param=param) from None
    check_nesting(arguments, param)
    return arguments
