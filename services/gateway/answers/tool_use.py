"""What a request's tools mean for its answer: the calls that it may, or has to, hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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
    """The calls that an answer may hold.

    Attributes:
        parser: of the model's form.
        places: of each function in the request's list, by name.
        functions: those that may be called, by name.
        max_calls: None: any number.
    """

    parser: type[CallParser]
    places: Mapping[str, int]
    functions: Mapping[str, FunctionDefinition]
    required: bool = False
    max_calls: int | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether calls have to be held to the request."""
        restricted = len(self.functions) < len(self.places)
        strict = any(function.strict for function in self.functions.values())
        return self.required or restricted or strict

    def maker(self, *, is_held: bool) -> Callable[[], CallParser]:
        """Makes a choice's parser; `is_held`: by a grammar."""
        schemas = {name: f.parameters or {} for name, f in self.functions.items()}
        return partial(self.parser, schemas, self.max_calls, is_held=is_held)


def read_tools(request: ChatRequest, parser: type[CallParser] | None) -> ToolCalls | None:
    """A request's tools, which `check_tools` has seen; None: no call is possible.

    Args:
        parser: of the model's form of calls; None: it has none.

    Raises:
        InvalidRequest: the model takes no tools.
    """
    tools, choice = request.tools, request.tool_choice
    if not tools or choice == "none":
        return None
    if parser is None:
        raise InvalidRequest("the model's chat template has no tools", param="tools")
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
