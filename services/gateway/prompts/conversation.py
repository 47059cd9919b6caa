"""The messages, tools and options of a request, in the form that the model's chat template takes.

`ConversationReader.read` makes a `Conversation` of a request, which `PromptBuilder` renders. A
field that the model or its template does not take is an `InvalidRequest` with the field as `param`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any

from services.common.errors import InvalidImage, InvalidRequest, InvalidVideo
from services.common.model_spec import ModelSpec
from services.gateway.answers.reasoning import CLOSE
from services.gateway.bounds import Bounds
from services.gateway.forms.embeddings import ImageEmbedsPart
from services.gateway.forms.openai import AnyImage, ChatRequest, Message, Part, TextPart
from services.gateway.forms.tools import (
    UNREADABLE,
    ToolCall,
    check_nesting,
    definitions,
    read_arguments,
)
from services.gateway.forms.video import AnyVideo, VideoChoice
from services.gateway.media.images import ImageSource
from services.gateway.media.videos import VideoSource
from services.gateway.prompts.chat_template import RESERVED, ChatTemplate, Conversation
from services.gateway.tokenizer.tokenizer import ModelTokenizer

_NO_IMAGES = "the model takes no images"
_NO_VIDEOS = "the model takes no videos"
_Image = AnyImage | ImageEmbedsPart
_Medium = _Image | AnyVideo
_KWARGS = "mm_processor_kwargs"
_TOOL_ROLE = re.compile(r"""["'](tool|ipython)["']""")


class ConversationReader:
    """Reads the conversations of requests to one model. Thread-safe.

    Args:
        spec: specification of the model.
        template: chat template of the model.
        bounds: bounds on the number of images and videos.
        template_defaults: template variables for requests that do not set them.

    Raises:
        ValueError: the template has no such variable.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: ModelTokenizer,
        template: ChatTemplate,
        bounds: Bounds,
        template_defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._template = template
        self._template_defaults = template_defaults
        if unknown := sorted(template_defaults.keys() - template.variables):
            known = ", ".join(sorted(template.variables)) or "none"
            raise ValueError(
                f"the chat template has no variable {unknown[0]!r} to set; it has: {known}"
            )
        self._bounds = bounds
        self._no_videos = "" if spec.vision is None or spec.vision.video else spec.vision.no_video
        self._thinks = spec.conversation.thinks and CLOSE in template.source
        self._takes_calls = "tool_calls" in template.source
        self._takes_results = _TOOL_ROLE.search(template.source) is not None
        self._takes_images = spec.vision is not None
        self._takes_tool_images = spec.vision is not None and self._shows_tool_images(
            tokenizer, spec.vision.geometry.image_token_id
        )

    def read(self, request: ChatRequest, omitted: range = range(0)) -> Conversation:
        """Returns the conversation that is rendered for a request.

        Args:
            omitted: indices of messages that are left out, because the conversation is too long.

        Raises:
            InvalidRequest: the messages or options do not fit the model or its chat template.
        """
        if self._no_videos:
            _refuse(request, AnyVideo, InvalidRequest, f"{_NO_VIDEOS}: {self._no_videos}")
        messages, images, videos = read_messages(
            request, self._bounds, takes_images=self._takes_images, omitted=omitted
        )
        ignored = [*self._unused_fields(request), *(("messages",) if omitted else ())]
        if not self._template.takes_late_system and _join_systems(messages):
            ignored.append("messages.role")
        calls = (call["function"] for each in messages for call in each.get("tool_calls", ()))
        if any(function["arguments"] is UNREADABLE for function in calls):
            ignored.append("messages.tool_calls")
        self._refuse_dropped_calls(request.messages)
        if (images or videos) and not self._takes_tool_images:
            why = "the model's chat template takes no images in tool messages"
            _refuse(request, _Medium, InvalidImage, why, "tool")
        tools = None
        if request.tools and request.tool_choice != "none":
            if not self._template.takes_tools:
                raise InvalidRequest("the model's chat template takes no tools", param="tools")
            tools = definitions(request.tools)
        continues = bool(request.continue_final_message)
        return Conversation(
            messages=messages,
            tools=tools,
            options=self._options(request),
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            images=images,
            videos=videos,
            ignored=ignored,
        )

    @property
    def can_switch_thinking(self) -> bool:
        """True if the chat template has a variable that switches thinking on and off."""
        return "enable_thinking" in self._template.variables

    def _options(self, request: ChatRequest) -> dict[str, object]:
        """Returns the variables for the template: the server's defaults, replaced by the entries of
        `chat_template_kwargs`, and by the template's variable for thinking if another field of the
        request sets it.
        """
        return {**self._template_defaults, **self._own_options(request)}

    def _own_options(self, request: ChatRequest) -> dict[str, object]:
        variables = self._template.variables
        options: dict[str, object] = {}
        for name, value in (request.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name[:100]}"
            if name in RESERVED:
                raise InvalidRequest(f"the template variable {name} cannot be set", param=param)
            if value is None or (name == "enable_thinking" and self._has_thinking_fixed(value)):
                continue
            if name not in variables:
                raise InvalidRequest(
                    f"the model's chat template has no variable {name[:100]}", param=param
                )
            check_nesting(value, param)
            options[name] = value
        thinks = request.enable_thinking
        if thinks is not None and "enable_thinking" in variables:
            options.setdefault("enable_thinking", thinks)
        elif thinks is False:
            self._refuse_no_thinking("enable_thinking")
        effort = request.reasoning_effort
        if effort is None:
            return options
        if "reasoning_effort" in variables and effort != "none":
            options.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in variables:
            options.setdefault("enable_thinking", effort != "none")
        elif effort == "none":
            self._refuse_no_thinking("reasoning_effort")
        return options

    def _refuse_no_thinking(self, param: str) -> None:
        """Refuses a field that switches thinking off, if the model always thinks."""
        if self._thinks:
            raise InvalidRequest(
                "the model always thinks; include_reasoning: false hides it", param=param
            )

    def _unused_fields(self, request: ChatRequest) -> Sequence[str]:
        """Returns the request's fields that change no answer of this model."""
        variables, found = self._template.variables, list[str]()
        if request.enable_thinking is not None and "enable_thinking" not in variables:
            found.append("enable_thinking")
        if request.thinking_token_budget is not None and not self._thinks:
            found.append("thinking_token_budget")
        if request.reasoning_effort and not {"reasoning_effort", "enable_thinking"} & variables:
            found.append("reasoning_effort")
        return found

    def _refuse_dropped_calls(self, messages: Sequence[Message]) -> None:
        """Refuses tool calls and tool results that the template would leave out of the prompt."""
        for index, message in enumerate(messages):
            if message.tool_calls and not self._takes_calls:
                path = f"messages[{index}].tool_calls"
            elif message.role == "tool" and not self._takes_results:
                path = f"messages[{index}].role"
            else:
                continue
            raise InvalidRequest("the model's chat template takes no tool calls", param=path)

    def _has_thinking_fixed(self, value: object) -> bool:
        """Returns whether the template has no variable that switches thinking, and the model thinks
        or does not think as `value` asks.
        """
        return "enable_thinking" not in self._template.variables and value is self._thinks

    def _shows_tool_images(self, tokenizer: ModelTokenizer, image_token_id: int) -> bool:
        """Returns whether the template writes the images of tool messages."""
        function = {"name": "f", "arguments": dict[str, object]()}
        call = {"id": "1", "type": "function", "function": function}
        rendered = self._template.probed(
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image"}]},
        )
        added = (tokenizer.added[piece].token_id for piece, is_added in rendered if is_added)
        return image_token_id in added


def read_messages(
    request: ChatRequest, bounds: Bounds, *, takes_images: bool, omitted: range = range(0)
) -> tuple[list[dict[str, Any]], list[ImageSource], list[VideoSource]]:
    """Separates a request's messages into messages for the chat template, images and videos.

    If the model takes no images, the text parts of a message become one string, joined by newlines,
    because templates of text models expect strings.

    Args:
        bounds: bounds on the number of images and videos.
        takes_images: True if the model takes images.
        omitted: indices of messages that are left out.

    Returns:
        The messages, the images and the videos, each in order.

    Raises:
        InvalidRequest: there are more images or videos than allowed, or a field is about images or
            videos and the model takes none.
    """
    if not takes_images:
        _refuse(request, AnyVideo, InvalidVideo, _NO_VIDEOS)
        _refuse(request, _Medium, InvalidImage, _NO_IMAGES)
        for name in ("min_pixels", "max_pixels", "mm_processor_kwargs", "media_io_kwargs"):
            if getattr(request, name) is not None:
                raise InvalidRequest(_NO_IMAGES, param=name)
    counts: dict[str, int] = {}
    for kind, noun, limit in (
        (_Image, "images", bounds.max_images_per_request),
        (AnyVideo, "videos", bounds.max_videos_per_request),
    ):
        count = counts[noun] = sum(
            isinstance(part, kind) for _, part, _ in _parts(request, omitted)
        )
        _check_count(count, noun, limit)
    if counts["videos"] and request.mm_processor_kwargs is not None:
        request.mm_processor_kwargs.check(counts["videos"], _KWARGS)
    images: list[ImageSource] = []
    videos: list[VideoSource] = []
    messages = [
        _template_message(message, f"messages[{index}]", request, images, videos, takes_images)
        for index, message in enumerate(request.messages)
        if index not in omitted
    ]
    _check_count(sum(i.num_images for i in images), "images", bounds.max_images_per_request)
    return messages, images, videos


def _check_count(count: int, noun: str, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(
            f"the request has {count} {noun}; at most {limit} are allowed "
            f"(GATEWAY_MAX_{noun.upper()})",
            param="messages",
        )


def _parts(request: ChatRequest, omitted: range = range(0)) -> Iterator[tuple[Message, Part, str]]:
    """Yields the parts of all messages, each with its message and its path in the request."""
    for index, message in enumerate(request.messages):
        parts = (
            message.content if isinstance(message.content, list) and index not in omitted else ()
        )
        for position, part in enumerate(parts):
            yield message, part, f"messages[{index}].content[{position}]"


def _refuse(
    request: ChatRequest, kinds: UnionType, error: type[InvalidRequest], why: str, role: str = ""
) -> None:
    """Raises an error for the first part of some kinds, if there is one.

    Args:
        kinds: classes of the parts that are refused.
        error: class of the error.
        why: message of the error.
        role: role of the messages that are searched. Empty if all messages are searched.
    """
    for message, part, path in _parts(request):
        if isinstance(part, kinds) and role in ("", message.role):
            raise error(why, param=path)


def _join_systems(messages: list[dict[str, Any]]) -> bool:
    """Joins all system messages to a single message at the beginning, separated by empty lines, for
    templates that take only one system message there.

    Returns:
        True if a system message came after another message.
    """
    texts: list[str] = []
    others: list[dict[str, Any]] = []
    has_moved = False
    for message in messages:
        if message["role"] != "system":
            others.append(message)
            continue
        has_moved = has_moved or bool(others)
        content: str | list[dict[str, Any]] = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        texts.append(content)
    if has_moved or len(texts) > 1:
        messages[:] = [{"role": "system", "content": "\n\n".join(texts)}, *others]
    return has_moved


def _template_message(
    message: Message,
    path: str,
    request: ChatRequest,
    images: list[ImageSource],
    videos: list[VideoSource],
    takes_images: bool,
) -> dict[str, Any]:
    """Returns a message for the chat template. Adds its images and videos to the lists."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role}
    if not isinstance(message.content, list):
        found["content"] = message.content or ""
    elif not takes_images:
        texts = [part.text for part in message.content if isinstance(part, TextPart)]
        found["content"] = "\n".join(texts)
    else:
        parts: list[dict[str, Any]] = []
        for position, part in enumerate(message.content):
            place = f"{path}.content[{position}]"
            if isinstance(part, _Image):
                images.append(source := _source(part, place, request))
                parts += [{"type": "image"}] * source.num_images
            elif isinstance(part, AnyVideo):
                videos.append(_video(part, place, request, len(videos)))
                parts.append({"type": "video"})
            else:
                parts.append({"type": "text", "text": part.text})
        found["content"] = parts
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_call(call, f"{path}.tool_calls[{at}]") for at, call in calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    return found


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    arguments = read_arguments(call, f"{path}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _source(part: _Image, param: str, request: ChatRequest) -> ImageSource:
    """Returns the source of an image, with its pixel limits. The limit of the innermost object of
    the request that gives one applies.
    """
    if isinstance(part, ImageEmbedsPart):
        url, grids = part.source(param)
        return ImageSource(url, param, grids=grids)
    image = part.image
    if not image.url and part.stored_name is None:
        raise InvalidRequest("an image needs a URL, or the uuid of an earlier one", param=param)
    scopes = (image, part, request, request.mm_processor_kwargs)
    found: dict[str, int | None] = {
        name: next((v for s in scopes if s and (v := getattr(s, name)) is not None), None)
        for name in ("min_pixels", "max_pixels")
    }
    detail = image.detail or "auto"
    least, most = found["min_pixels"], found["max_pixels"]
    return ImageSource(image.url or "", param, detail, least, most, part.stored_name)


def _video(part: AnyVideo, param: str, request: ChatRequest, index: int) -> VideoSource:
    """Returns the source of a video, with the choice of its frames.

    Args:
        param: place of the video in the request.
        index: index of the video among the request's videos.
    """
    if not part.urls:
        raise InvalidRequest("a video needs a URL, or those of its frames", param=param)
    media = request.media_io_kwargs.video if request.media_io_kwargs else None
    choice = VideoChoice(part, param, request.mm_processor_kwargs, media, index)
    return VideoSource(part.urls, param, choice.sampling(), choice.limits(), choice.taken())
