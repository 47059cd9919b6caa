"""The types of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages.

`messages_endpoint` makes a chat request of a request.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.common.errors import InvalidRequest, ThreadUnsupported
from services.gateway.forms.generation import MAX_STOPS, StopString
from services.gateway.forms.json_body import Parser, text_of
from services.gateway.forms.openai import MAX_MESSAGES, MAX_PARTS
from services.gateway.forms.tools import MAX_TOOLS, ToolName

# Input.


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class Base64Source(Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """An image's bytes, or a PDF's."""

    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf"]


class UrlSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    """An image's URL."""

    url: str


class ImageBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource


class TextSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A document's text."""

    data: str
    media_type: Literal["text/plain"] | None = None


class ContentSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A document's text in blocks."""

    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


class DocumentBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A document of text; the model reads no PDF."""

    source: TextSource | ContentSource | Base64Source
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """Title, context and text, in lines."""
        source = self.source
        found = source.content if isinstance(source, ContentSource) else source.data
        text = found if isinstance(found, str) else "\n".join(block.text for block in found)
        return "\n".join(line for line in (self.title, self.context, text) if line)


class SearchResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="search_result"):
    """A passage that the client's search found."""

    source: str
    title: str
    content: Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """Title, source and text, in lines."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


# Blocks that a turn of the user and the result of a tool may have.
ContentBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A call in an earlier answer."""

    id: str
    name: str
    input: Raw


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a call. The content says whether the call failed."""

    tool_use_id: str
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)] | None = None


Block = ContentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Turn(Struct, forbid_unknown_fields=True):
    """A turn of the conversation. If the last turn is the assistant's, the answer continues it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class ToolDefinition(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. Tools that Anthropic's servers run are not served."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class AutoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(AutoChoice, tag="any"):
    """The model has to call a tool."""


class ToolNameChoice(AutoChoice, kw_only=True, tag="tool"):
    """The model has to call this tool."""

    name: str


class NoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """The model must not call tools."""


class AdaptiveThinking(Struct, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    """The model thinks if its template makes it think by default, for at most `budget_tokens`."""

    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None


class EnabledThinking(AdaptiveThinking, tag="enabled"):
    """The model thinks before it answers, for at most `budget_tokens` tokens."""


class DisabledThinking(Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    """The model does not think."""


class SchemaFormat(Struct, forbid_unknown_fields=True):
    """The answer is a value of a schema."""

    schema: Raw
    type: Literal["json_schema"]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The answer's form, and how much the model reasons."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolNameChoice | NoChoice | None = None
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # name of `output_config.format` in Anthropic's beta
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    thread: Any = None  # is refused: the server has no threads


_ROLES: dict[str, tuple[type[Struct], ...]] = {
    "user": (TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def _check(request: CountTokensRequest) -> None:
    if isinstance(request, MessagesRequest) and request.thread is not None:
        raise ThreadUnsupported(
            "no conversation is stored: send all of its messages", param="thread"
        )
    if request.output_format and request.output_config and request.output_config.format:
        raise InvalidRequest("give it or output_config.format, not both", param="output_format")
    for index, turn in enumerate(request.messages):
        blocks = turn.content if isinstance(turn.content, list) else ()
        for position, block in enumerate(blocks):
            path = f"messages[{index}].content[{position}]"
            if not isinstance(block, _ROLES[turn.role]):
                kind = block.__struct_config__.tag
                raise InvalidRequest(f"a turn of the {turn.role} has no {kind}", param=path)
            if isinstance(block, ToolUseBlock):
                text_of(block.input, f"{path}.input")


parse_messages_request = Parser(MessagesRequest, _check)
parse_count_request = Parser(CountTokensRequest, _check)


# Output.


class TextAnswer(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingAnswer(Struct, tag_field="type", tag="thinking"):
    """The reasoning of the model. The signature is empty, because nothing has to be proved."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. The input is the JSON text of an object."""

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class OutputTokensDetails(Struct):
    """Tokens of the reasoning, with its tags."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Numbers of tokens. `input_tokens` does not count tokens that were found in the prefix cache.
    `output_tokens_details` is present at the end of an answer if the model thinks.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Struct):
    """An answer. In `message_start`, the answer has no content yet."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct):
    """Number of tokens of a prompt. Tokens of images are included."""

    input_tokens: int


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The end of the reasoning."""

    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageAnswer


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """A piece of the open block."""

    index: int
    delta: Delta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The open block ends."""

    index: int


class StopDelta(Struct):
    """The end of an answer."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The answer has ended."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
