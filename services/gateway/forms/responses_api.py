"""The types of POST /v1/responses: OpenAI's Responses.

`responses_endpoint` converts the request to a chat request.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.common.errors import InvalidRequest
from services.gateway.forms.generation import (
    MAX_TOP_LOGPROBS,
    JsonObjectFormat,
    JsonSchema,
    SamplingFields,
    TextFormat,
)
from services.gateway.forms.json_body import Parser, text_of
from services.gateway.forms.openai import (
    MAX_MESSAGES,
    MAX_PARTS,
    InputImagePart,
    InputTextPart,
    MultimodalOptions,
    ReasoningEffort,
    TextPart,
    ThinkingTokens,
)
from services.gateway.forms.responses import CompletionTokensDetails, LogprobEntry, VideoUsage
from services.gateway.forms.tools import MAX_TOOLS, FunctionDefinition, ToolName
from services.gateway.forms.video import InputVideoPart, MediaOptions

_Status = Literal["in_progress", "completed", "incomplete"]


# Input.


class ResponseOutputText(TextPart, tag="output_text"):
    """Text of an earlier answer."""


class ResponseImage(InputImagePart, tag="input_image"):
    """An image. A `file_id` has to be null, because the server stores no files."""

    file_id: str | None = None


class ResponseReasoningText(
    Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    """Reasoning of an earlier answer."""

    text: str


# Videos are an extension: OpenAI's Responses API has no videos.
InputPart = (
    InputTextPart | ResponseOutputText | ResponseImage | InputVideoPart | ResponseReasoningText
)
_Content = str | Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of the conversation: a message if `type` is absent. Each type has its own fields."""

    type: (
        Literal[
            "message", "function_call", "function_call_output", "custom_tool_call",
            "custom_tool_call_output", "reasoning", "item_reference",
        ]
        | None
    ) = None  # fmt: skip
    id: str | None = None  # Names an item of an earlier answer; an `item_reference` has this id.
    # Fields of a message. Reasoning has `content`, too.
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Content | None = None
    # Fields of a call and of its output.
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: _Content | None = None


class ResponseFunction(FunctionDefinition, tag_field="type", tag="function"):
    """A function that the model may call."""


class ResponseNamespace(Struct, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """Functions of one server. A call names the function and the namespace."""

    name: ToolName
    tools: Annotated[list[ResponseFunction], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


def flat(name: str, namespace: str | UnsetType | None) -> str:
    """Returns the function's name in the prompt: `namespace__name`, or only `name` if the function
    has no namespace or has the namespace `functions`.
    """
    return f"{namespace}__{name}" if namespace and namespace != "functions" else name


class NamedFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function by its name."""

    name: str
    namespace: str | UnsetType | None = UNSET


class AllowedResponseTools(
    Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """A restriction to some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class NamedJsonSchema(JsonSchema, tag_field="type", tag="json_schema"):
    """A value of a schema."""


class TextConfig(Struct, forbid_unknown_fields=True):
    """The form of the text."""

    format: TextFormat | JsonObjectFormat | NamedJsonSchema | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """The reasoning effort. Reasoning is always returned whole, so summaries have no effect."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream. All known options are hints (`hints`), so none is a field here."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None
    mm_processor_kwargs: MultimodalOptions | None = None
    media_io_kwargs: MediaOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: (
        Annotated[list[ResponseFunction | ResponseNamespace], Meta(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | AllowedResponseTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    # These fields are repeated in the answer.
    metadata: Raw | UnsetType = UNSET
    user: str | None = None


# Type of an item -> its required and its optional fields, besides `type` and `id`.
_FIELDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "message": (("role", "content"), ()),
    "function_call": (("call_id", "name", "arguments"), ("namespace",)),
    "function_call_output": (("call_id", "output"), ("name", "namespace")),
    "custom_tool_call": (("call_id", "name", "input"), ("namespace",)),
    "custom_tool_call_output": (("call_id", "output"), ("name",)),
    "reasoning": ((), ("content",)),
    "item_reference": ((), ()),
}


def _check_item(item: InputItem, path: str) -> None:
    kind = item.type or "message"
    needed, optional = _FIELDS[kind]
    for name in InputItem.__struct_fields__[2:]:
        value = getattr(item, name)
        if value is None and name in needed:
            raise InvalidRequest(f"a {kind} needs {name}", param=f"{path}.{name}")
        if value is not None and name not in (*needed, *optional):
            raise InvalidRequest(f"a {kind} has no {name}", param=f"{path}.{name}")


def _check(request: ResponsesRequest) -> None:
    if isinstance(request.input, list):
        for index, item in enumerate(request.input):
            _check_item(item, f"input[{index}]")
    if request.metadata is not UNSET:
        text_of(request.metadata, "metadata")


parse_responses_request = Parser(ResponsesRequest, _check)


# Output.


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[LogprobEntry] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning, in full."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """The answer's text."""

    id: str
    content: list[OutputText]
    status: _Status
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """The reasoning of the model."""

    id: str
    content: list[ReasoningText]
    status: _Status
    summary: list[Any] = []
    encrypted_content: None = None


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: _Status
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(Struct):
    """Parts of the input's tokens. `image_tokens`, `video_tokens` and `videos` are extensions of
    OpenAI's API.
    """

    cached_tokens: int
    image_tokens: int
    cache_write_tokens: int = 0
    video_tokens: int | UnsetType = UNSET
    videos: list[VideoUsage] | UnsetType = UNSET


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """The reason why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct):
    """The error because of which there is no answer."""

    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """An answer. `store` says whether the complete answer is stored."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    object: Literal["response"] = "response"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Raw | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float
    text: TextConfig
    tool_choice: str | NamedFunction | AllowedResponseTools = "auto"
    tools: list[ResponseFunction | ResponseNamespace] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct):
    """The confirmation that a response is deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream. The other fields that are present depend on `type`."""

    type: str
    sequence_number: int | UnsetType = UNSET
    response: ResponseObject | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
