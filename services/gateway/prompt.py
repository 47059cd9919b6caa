"""A request's messages to the prompt's token ids and positions.

`PromptBuilder.draft` renders and tokenizes the messages, with one placeholder per image; once the
images are loaded, `PromptBuilder.expand` repeats each placeholder and computes M-RoPE positions.
`ChatService` calls both; bytes of images are not seen here. Messages that do not fit the model, its
template or its context are an `InvalidRequest`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpec
from services.gateway.chat_template import ChatTemplate, message_texts
from services.gateway.images import ImageSource
from services.gateway.openai import ChatRequest, ImagePart, Message, TextPart
from services.gateway.tokenizer import ModelTokenizer

Grid = tuple[int, int, int]
Int32s = npt.NDArray[np.int32]
_NO_IMAGES = "the model takes no images"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template, and their images in order."""

    messages: list[dict[str, Any]]
    images: list[ImageSource]
    template_options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before its images are loaded.

    Attributes:
        token_ids: one placeholder per image.
        images: in order.
    """

    token_ids: list[int]
    images: list[ImageSource]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder takes it.

    Attributes:
        token_ids: [num_tokens], placeholders expanded.
        positions: [3, num_tokens]; None without images: 0 to num_tokens - 1 on each axis.
        position_delta: what decode steps add to a token's index.
        image_offsets: first placeholder of each image.
        image_lengths: placeholders of each image.
    """

    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    image_offsets: tuple[int, ...]
    image_lengths: tuple[int, ...]

    @property
    def num_image_tokens(self) -> int:
        """Placeholders of all images."""
        return sum(self.image_lengths)


def read_conversation(request: ChatRequest, *, max_images: int, takes_images: bool) -> Conversation:
    """Separates a request's messages into template messages and images.

    Without images in the model, text parts of a message become one string, joined by newlines:
    templates of text models expect strings.

    Raises:
        InvalidRequest: more than `max_images` images, or any field about images if the model takes
            none.
    """
    if not takes_images:
        _refuse_images(request)
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
        _template_message(message, f"messages[{index}]", request, images, takes_images)
        for index, message in enumerate(request.messages)
    ]
    options: dict[str, object] = {}
    if (given := request.chat_template_kwargs) is not None:
        options = {
            name: value
            for name in given.__struct_fields__
            if (value := getattr(given, name)) is not None
        }
    return Conversation(messages, images, options)


def _refuse_images(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        parts = message.content if isinstance(message.content, list) else ()
        for position, part in enumerate(parts):
            if isinstance(part, ImagePart):
                raise InvalidRequest(_NO_IMAGES, param=f"messages[{index}].content[{position}]")
    for name in ("min_pixels", "max_pixels", "mm_processor_kwargs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(_NO_IMAGES, param=name)


def _refuse_late_system(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        if index > 0 and message.role in ("system", "developer"):
            raise InvalidRequest(
                "the model's chat template takes a system message only as the first message",
                param=f"messages[{index}].role",
            )


def _template_message(
    message: Message,
    path: str,
    request: ChatRequest,
    images: list[ImageSource],
    takes_images: bool,
) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if not isinstance(message.content, list):
        return {"role": role, "content": message.content or ""}
    if not takes_images:
        texts = [part.text for part in message.content if isinstance(part, TextPart)]
        return {"role": role, "content": "\n".join(texts)}
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            images.append(_source(part, f"{path}.content[{position}]", request))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": role, "content": parts}


def _source(part: ImagePart, param: str, request: ChatRequest) -> ImageSource:
    """The image with its pixel limits; the innermost limit that is given applies."""
    image = part.image
    scopes = (image, part, request, request.mm_processor_kwargs)
    found = {
        name: next((v for s in scopes if s and (v := getattr(s, name)) is not None), None)
        for name in ("min_pixels", "max_pixels")
    }
    return ImageSource(image.url, param, image.detail or "auto", **found)


class PromptBuilder:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: ModelTokenizer,
        template: ChatTemplate,
        *,
        max_images: int = 0,
    ) -> None:
        self._vision = spec.vision
        self._tokenizer = tokenizer
        self._template = template
        self._max_images = max_images

    def draft(self, request: ChatRequest, max_tokens: int) -> Draft:
        """Renders and tokenizes a request's messages.

        Raises:
            InvalidRequest: the messages do not fit the model or its chat template.
            ContextLengthExceeded: the text is longer than `max_tokens` can be.
        """
        conversation = read_conversation(
            request, max_images=self._max_images, takes_images=self._vision is not None
        )
        if not self._template.takes_late_system:
            _refuse_late_system(request.messages)
        ids = self.render(conversation.messages, conversation.template_options, max_tokens)
        return Draft(ids, conversation.images)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, object],
        max_tokens: int,
    ) -> list[int]:
        """Token ids before expansion: one placeholder per image.

        No BOS token is added: a template writes its own.

        Args:
            messages: see `ChatTemplate.render`.
            template_options: further variables of the template.
            max_tokens: longer text is refused, before it is tokenized.

        Raises:
            InvalidRequest: the template refuses the messages, or has no such variable.
            ContextLengthExceeded: the text is longer than `max_tokens` can be.
        """
        for name in template_options:
            if name not in self._template.variables:
                raise InvalidRequest(
                    f"the model's chat template has no {name}",
                    param=f"chat_template_kwargs.{name}",
                )
        self._tokenizer.check_length("\0".join(message_texts(messages)), max_tokens)
        ids: list[int] = []
        for piece, is_added in self._template.render(messages, template_options):
            if is_added:
                ids.append(self._tokenizer.added[piece].token_id)
            else:
                ids += self._tokenizer.encode_text(piece)
        return ids

    def expand(self, draft: Draft, grids: Sequence[Grid]) -> Prompt:
        """Repeats each placeholder once per token of its image, and computes positions.

        Raises:
            InvalidRequest: the template dropped or repeated an image.
        """
        compact = np.asarray(draft.token_ids, np.int32)
        if self._vision is None:
            return Prompt(compact, None, 0, (), ())
        placeholders = np.flatnonzero(compact == self._vision.image_token_id)
        if len(placeholders) != len(grids):
            raise InvalidRequest(
                f"the chat template placed {len(placeholders)} images of {len(grids)}",
                param="messages",
            )
        if not grids:
            return Prompt(compact, None, 0, (), ())
        merge_size = self._vision.tower.spatial_merge_size
        lengths = [image_tokens(grid, merge_size) for grid in grids]
        repeats = np.ones(len(compact), np.int64)
        repeats[placeholders] = lengths
        expanded = np.repeat(compact, repeats)
        offsets = tuple(int(end) for end in np.cumsum(repeats)[placeholders] - lengths)
        positions, delta = mrope_positions(
            len(expanded), list(zip(offsets, grids, strict=True)), merge_size
        )
        return Prompt(expanded, positions, delta, offsets, tuple(lengths))


def image_tokens(grid: Grid, merge_size: int) -> int:
    """Placeholders of an image with that grid (t, h, w) in patches before merging."""
    t, h, w = grid
    return t * h * w // merge_size**2


def mrope_positions(
    num_tokens: int, images: Sequence[tuple[int, Grid]], merge_size: int
) -> tuple[Int32s, int]:
    """M-RoPE positions (time, height, width) of an expanded prompt.

    A text token at p has position (p, p, p) and the next token p + 1. An image of h x w merged
    cells at p has positions (p, p + row, p + column), row by row, and the next token p + max(h, w).

    Args:
        num_tokens: length of the prompt, placeholders included.
        images: (offset of the first placeholder, grid) in order of offset, not overlapping.
        merge_size: patches per side of a merged cell.

    Returns:
        positions [3, num_tokens], and the delta that decode steps add to a token's index.
    """
    positions = np.empty((3, num_tokens), np.int32)
    index, position = 0, 0
    for offset, (t, h, w) in images:
        text = offset - index
        positions[:, index:offset] = np.arange(position, position + text, dtype=np.int32)
        position += text
        rows, columns = h // merge_size, w // merge_size
        index = offset + t * rows * columns
        span = positions[:, offset:index].reshape(3, t, rows, columns)
        span[0] = position
        span[1] = position + np.arange(rows, dtype=np.int32)[:, None]
        span[2] = position + np.arange(columns, dtype=np.int32)
        position += max(rows, columns)
    tail = num_tokens - index
    positions[:, index:] = np.arange(position, position + tail, dtype=np.int32)
    return positions, position + tail - num_tokens
