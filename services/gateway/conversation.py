"""A request's messages as the template's messages and the pictures among them."""

from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.images import ImageSource
from services.gateway.openai import ChatRequest, ImagePart, ImageUrl, Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is shown: messages for the chat template, pictures in their order."""

    messages: list[dict[str, Any]]
    images: list[ImageSource]
    template_options: dict[str, Any]


def read_conversation(request: ChatRequest, max_images: int) -> Conversation:
    """Takes a request's messages apart.

    Raises:
        InvalidRequest: more than `max_images` pictures.
    """
    num_images = sum(
        isinstance(part, ImagePart)
        for message in request.messages
        if isinstance(message.content, list)
        for part in message.content
    )
    if num_images > max_images:
        raise InvalidRequest(
            f"the request has {num_images} images; at most {max_images} are allowed",
            param="messages",
        )
    images: list[ImageSource] = []
    messages = [
        _template_message(message, f"messages[{index}]", request, images)
        for index, message in enumerate(request.messages)
    ]
    options: dict[str, Any] = {}
    if request.chat_template_kwargs and request.chat_template_kwargs.add_vision_id is not None:
        options["add_vision_id"] = request.chat_template_kwargs.add_vision_id
    return Conversation(messages, images, options)


def _template_message(
    message: Message, path: str, request: ChatRequest, images: list[ImageSource]
) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if not isinstance(message.content, list):
        return {"role": role, "content": message.content or ""}
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            images.append(_source(part, f"{path}.content[{position}]", request))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": role, "content": parts}


def _source(part: ImagePart, param: str, request: ChatRequest) -> ImageSource:
    """The innermost limit that is given holds."""
    image = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(part.image_url)
    scopes = (image, part, request, request.mm_processor_kwargs)
    found = {
        name: next((v for s in scopes if s and (v := getattr(s, name)) is not None), None)
        for name in ("min_pixels", "max_pixels")
    }
    return ImageSource(image.url, param, image.detail or "auto", **found)
