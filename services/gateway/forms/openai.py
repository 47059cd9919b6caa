"""The chat completions request: the fields of OpenAI's and vLLM's APIs that are served.

A field that would change the answer and is not served gets a 400 that names the field, as an
unknown field does. The fields listed in `hints` change no answer and are removed.

`image_url.detail`: `low` resizes to at most 512 x 512 pixels; `high` and `auto` mean the model's
own limits. `min_pixels` and `max_pixels` (in the image, beside it, or for the whole request; also
as `mm_processor_kwargs`) take precedence and are clamped to the model's limits. Videos: `video`.
`include_stage_times: true` adds `stage_times_ms` and `images` to the response or the last chunk.

The checks in this module do not depend on the model; `conversation`, `answer_reader` and `sampling`
make the checks that do. All errors are `InvalidRequest`, and `param` names the field.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from services.common.errors import InvalidRequest
from services.gateway.forms.embeddings import ImageEmbedsPart
from services.gateway.forms.generation import (
    MAX_TOP_LOGPROBS,
    GenerationFields,
    check_generation,
)
from services.gateway.forms.json_body import Parser
from services.gateway.forms.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    check_tools,
    json_characters,
    tool_characters,
)
from services.gateway.forms.video import (
    InputVideoPart,
    MediaOptions,
    MultimodalOptions,
    NamedVideoPart,
    Pixels,
    VideoPart,
    VideoUrlPart,
)

MAX_MESSAGES = 2048
MAX_PARTS = 1024

Detail = Literal["auto", "low", "high", "original"]
ImageUuid = Annotated[str, Meta(min_length=1, max_length=256)]
ThinkingTokens = Annotated[int, Meta(ge=-1, le=1 << 31)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 31)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Literal text: special tokens in it are not recognised."""

    text: str


class InputTextPart(TextPart, tag="input_text"):
    """Text as the Responses API spells it."""


class ImageUrl(Struct, forbid_unknown_fields=True):
    """The URL of an image, and the size to resize the image to. The detail `original` means `high`.
    If there is no URL, the part's `uuid` names an image of an earlier request.
    """

    url: str | None = None
    detail: Detail | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class ImagePart(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of the content parts for images. Each subclass has its own spelling of the URL and
    a property `image` with the same meaning.
    """

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    uuid: ImageUuid | None = None

    @property
    def stored_name(self) -> str | None:
        """Name under which the image is stored for later requests, in the namespace of clients'
        uuids. None if the image has no uuid.
        """
        return None if self.uuid is None else f"uuid:{self.uuid}"


class ImageUrlPart(ImagePart, tag_field="type", tag="image_url"):
    """OpenAI's content part for an image."""

    image_url: ImageUrl | str | None = None

    @property
    def image(self) -> ImageUrl:
        if isinstance(self.image_url, ImageUrl):
            return self.image_url
        return ImageUrl(self.image_url)


class InputImagePart(ImageUrlPart, tag="input_image"):
    """An image as the Responses API spells it."""

    detail: Detail | None = None

    @property
    def image(self) -> ImageUrl:
        image = super().image
        return structs.replace(image, detail=image.detail or self.detail)


class NamedImagePart(ImagePart, tag_field="type", tag="image"):
    """An image as model cards spell it: the URL in `image`."""

    url: str | None = msgspec.field(name="image", default=None)

    @property
    def image(self) -> ImageUrl:
        return ImageUrl(self.url)


AnyImage = ImageUrlPart | NamedImagePart
Part = (
    TextPart
    | InputTextPart
    | ImageUrlPart
    | InputImagePart
    | NamedImagePart
    | ImageEmbedsPart
    | VideoUrlPart
    | InputVideoPart
    | NamedVideoPart
)
_Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class Message(Struct, forbid_unknown_fields=True):
    """A message. The fields after `content` come from earlier responses and are echoed."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _Parts | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Prediction(Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """Text that most of the answer is expected to repeat. It can make the answer faster, and never
    changes it.
    """

    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


_CHARACTERS_OF_A_TURN = 16  # rendering an empty message or part takes as long as this many


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    mm_processor_kwargs: MultimodalOptions | None = None
    media_io_kwargs: MediaOptions | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    prediction: Prediction | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None
    enable_thinking: bool | None = None
    think: bool | ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    include_stage_times: bool | None = None

    @property
    def echoed(self) -> str:
        """Text that each answer repeats before the generated text: the text of the last message if
        `echo` is true and the message is an assistant's. Otherwise the text is empty.
        """
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        if isinstance(last.content, str):
            return last.content
        return "".join(part.text for part in last.content if isinstance(part, TextPart))

    @property
    def num_characters(self) -> int:
        """Approximate number of characters that the chat template renders. Each message and each
        part counts some characters more, because an empty part takes time, too.
        """
        size = tool_characters(self.tools) if self.tools else 0
        size += json_characters(self.chat_template_kwargs) if self.chat_template_kwargs else 0
        size += _CHARACTERS_OF_A_TURN * len(self.messages)
        for message in self.messages:
            content = message.content or ""
            if isinstance(content, str):
                size += len(content)
            else:
                size += _CHARACTERS_OF_A_TURN * len(content)
                size += sum(len(part.text) for part in content if isinstance(part, TextPart))
            size += len(message.reasoning_content or message.reasoning or "")
            for call in message.tool_calls or ():
                size += len(call.id) + len(call.function.name) + len(call.function.arguments or "")
        return size


def check_chat_request(request: ChatRequest) -> None:
    """Raises InvalidRequest if a field contradicts another, or is not served."""
    check_generation(request)
    check_tools(request.tools, request.tool_choice)
    if isinstance(request.think, str):
        request.reasoning_effort = request.reasoning_effort or request.think
    elif request.enable_thinking is None:
        request.enable_thinking = request.think
    for index, message in enumerate(request.messages):
        check_message(message, index)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.thinking_token_budget == 0 and request.prompt_logprobs is not None:
        raise InvalidRequest(
            "0 and prompt_logprobs exclude each other", param="thinking_token_budget"
        )
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise InvalidRequest(
                "give add_generation_prompt or continue_final_message, not both",
                param="continue_final_message",
            )
        if not _has_text_to_continue(request.messages[-1]):
            raise InvalidRequest(
                "the last message is not an assistant's text", param="continue_final_message"
            )


parse_chat_request = Parser(ChatRequest, check_chat_request)


def _has_text_to_continue(message: Message) -> bool:
    """Returns whether an answer can continue the text of the message. The text may be empty."""
    is_empty_text = message.content == "" and not message.tool_calls
    return message.role == "assistant" and (bool(message.content) or is_empty_text)


def check_message(message: Message, index: int) -> None:
    """Raises InvalidRequest if a message has fields that its role does not have."""
    path = f"messages[{index}]"
    role = message.role
    if message.content is None and role not in ("assistant", "tool"):
        raise InvalidRequest("content is missing", param=f"{path}.content")
    for name in ("tool_calls", "reasoning", "reasoning_content"):
        if getattr(message, name) and role != "assistant":
            raise InvalidRequest(f"a {role} message has no {name}", param=f"{path}.{name}")
    if (message.tool_call_id is None) == (role == "tool"):
        missing = "is missing" if role == "tool" else "belongs to a tool message"
        raise InvalidRequest(f"tool_call_id {missing}", param=f"{path}.tool_call_id")
    if role not in ("user", "tool") and isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if not isinstance(part, TextPart):
                noun = "videos" if isinstance(part, VideoPart) else "images"
                raise InvalidRequest(
                    f"{noun} are not allowed in a {role} message",
                    param=f"{path}.content[{position}]",
                )
