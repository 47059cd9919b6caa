"""Reader of the tool calls that a request allows or requires its answer to contain."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.gateway.answers.tool_parsers import CallParser
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.tools import (
    AllowedTools,
    FunctionChoice,
    FunctionDefinition,
    chosen_names,
)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls that an answer may contain.

    Attributes:
        parser: parser of the model's format of calls.
        places: index of each function in the request's list of tools, by name.
        functions: functions that may be called, by name.
        required: true if the answer has to contain a call.
        max_calls: largest number of calls. None if there may be any number.
        has_grammar: true if a grammar constrains the calls.
    """

    parser: type[CallParser]
    places: Mapping[str, int]
    functions: Mapping[str, FunctionDefinition]
    required: bool = False
    max_calls: int | None = None
    has_grammar: bool = False

    @property
    def is_constrained(self) -> bool:
        """True if a grammar has to constrain the calls."""
        restricted = len(self.functions) < len(self.places)
        strict = any(function.strict for function in self.functions.values())
        return self.required or restricted or strict

    def new_parser(self) -> CallParser:
        """Returns a parser for the calls of one choice."""
        schemas = {name: f.parameters or {} for name, f in self.functions.items()}
        return self.parser(schemas, self.max_calls, has_grammar=self.has_grammar)


def read_tools(request: ChatRequest, parser: type[CallParser] | None) -> ToolCalls | None:
    """Returns the calls that a request allows, or None if the request allows none.

    Args:
        request: request whose tools were checked by `check_tools`.
        parser: parser of the model's format of calls. None if the model has no such format.

    Raises:
        InvalidRequest: the request has tools, and the model supports none.
    """
    tools, choice = request.tools, request.tool_choice
    if not tools or choice == "none":
        return None
    if parser is None:
        raise InvalidRequest("the model's chat template takes no tools", param="tools")
    functions = {tool.function.name: tool.function for tool in tools}
    places = {name: index for index, name in enumerate(functions)}
    required = choice == "required"
    max_calls = 1 if request.parallel_tool_calls is False else None
    if names := chosen_names(choice):
        functions = {name: functions[name] for name in names}
    if isinstance(choice, FunctionChoice):
        required, max_calls = True, 1
    elif isinstance(choice, AllowedTools):
        required = choice.allowed_tools.mode == "required"
    return ToolCalls(parser, places, functions, required, max_calls)
