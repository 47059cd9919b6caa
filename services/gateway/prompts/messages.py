"""A request's messages as chat templates take them, and their images.

`PromptBuilder` reads them. What the model or its template does not take is an `InvalidRequest`;
`param` names the field.
"""

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.forms.openai import ChatRequest, ImagePart, Message, TextPart
from services.gateway.forms.tools import read_arguments
from services.gateway.media.images import ImageSource

_NO_IMAGES = "the model takes no images"


def read_messages(
    request: ChatRequest, *, max_images: int, takes_images: bool, cut: range = range(0)
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Separates a request's messages into messages for the chat template and images, in order.

    Without images in the model, text parts of a message become one string, joined by newlines:
    templates of text models expect strings.

    Args:
        request: of the client.
        max_images: of a request.
        takes_images: the model does.
        cut: messages that are left out.

    Raises:
        InvalidRequest: more than `max_images` images, or any field about images if the model takes
            none; arguments of a tool call that are no JSON object.
    """
    if not takes_images:
        _refuse_images(request)
    num_images = sum(
        isinstance(part, ImagePart)
        for index, message in enumerate(request.messages)
        if isinstance(message.content, list) and index not in cut
        for part in message.content
    )
    if num_images > max_images:
        raise InvalidRequest(
            f"the request has {num_images} images; at most {max_images} are allowed",
            param="messages",
        )
    images: list[ImageSource] = []
    messages = [
        _template_message(message, f"messages[{index}]", request, images, takes_images)
        for index, message in enumerate(request.messages)
        if index not in cut
    ]
    return messages, images


def oldest_turns(messages: Sequence[Message]) -> list[range]:
    """What may be cut of a conversation that is too long, the least first: its oldest turns. A turn
    is a user's message and what follows it; system messages at the beginning and the last turn
    stay.
    """
    roles = ["system" if m.role == "developer" else m.role for m in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    starts = [i for i, role in enumerate(roles) if role == "user" and i > first]
    return [range(first, start) for start in starts]


def _refuse_images(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        parts = message.content if isinstance(message.content, list) else ()
        for position, part in enumerate(parts):
            if isinstance(part, ImagePart):
                raise InvalidRequest(_NO_IMAGES, param=f"messages[{index}].content[{position}]")
    for name in ("min_pixels", "max_pixels", "mm_processor_kwargs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(_NO_IMAGES, param=name)


def refuse_late_system(messages: Sequence[Message]) -> None:
    """For a template that takes system messages at the beginning alone."""
    has_turned = False
    for index, message in enumerate(messages):
        is_system = message.role in ("system", "developer")
        has_turned = has_turned or not is_system
        if is_system and has_turned:
            raise InvalidRequest(
                "the model's chat template takes system messages only at the beginning",
                param=f"messages[{index}].role",
            )


def join_systems(messages: list[dict[str, Any]]) -> None:
    """Makes one message of the system messages at the beginning, with an empty line between them:
    for a template that takes one.
    """
    texts: list[str] = []
    for message in messages:
        if message["role"] != "system":
            break
        content: str | list[dict[str, Any]] = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        texts.append(content)
    if len(texts) > 1:
        messages[: len(texts)] = [{"role": "system", "content": "\n\n".join(texts)}]


def _template_message(
    message: Message,
    path: str,
    request: ChatRequest,
    images: list[ImageSource],
    takes_images: bool,
) -> dict[str, Any]:
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
            if isinstance(part, ImagePart):
                images.append(_source(part, f"{path}.content[{position}]", request))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part.text})
        found["content"] = parts
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": read_arguments(
                        call, f"{path}.tool_calls[{index}].function.arguments"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    return found


def _source(part: ImagePart, param: str, request: ChatRequest) -> ImageSource:
    """The image with its pixel limits; the innermost limit that is given applies."""
    image = part.image
    if not image.url and part.uuid is None:
        raise InvalidRequest("an image needs a URL, or the uuid of an earlier one", param=param)
    scopes = (image, part, request, request.mm_processor_kwargs)
    found = {
        name: next((v for s in scopes if s and (v := getattr(s, name)) is not None), None)
        for name in ("min_pixels", "max_pixels")
    }
    detail = "high" if image.detail == "original" else image.detail or "auto"
    return ImageSource(image.url or "", param, detail, uuid=part.uuid, **found)


def refuse_tool_images(request: ChatRequest) -> None:
    """For a template that shows no images in tool messages."""
    for index, message in enumerate(request.messages):
        if message.role == "tool" and isinstance(message.content, list):
            for position, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    raise InvalidRequest(
                        "the model's chat template takes no images in tool messages",
                        param=f"messages[{index}].content[{position}]",
                    )
