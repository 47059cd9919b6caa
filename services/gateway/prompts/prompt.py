"""A conversation to the prompt's token ids and positions.

`PromptBuilder.draft` renders and tokenizes it, with one placeholder per image; once the images are
loaded, `PromptBuilder.expand` puts their units there and computes positions. `ChatService` calls
both; bytes of images are not seen here. Messages that do not fit the template or the context are an
`InvalidRequest`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.common.geometry import Int32s, Run, Unit
from services.common.model_spec import ModelSpec
from services.gateway.media.images import ImageSource
from services.gateway.prompts.chat_template import ChatTemplate, Conversation
from services.gateway.tokenizer.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before its images are loaded.

    Attributes:
        token_ids: one placeholder per image.
        images: in order.
        tail: the text after the last special token: the beginning of the model's turn; None: the
            prompt is not rendered.
        ignored: fields of the request that change no answer of this model.
    """

    token_ids: list[int]
    images: Sequence[ImageSource] = ()
    tail: str | None = None
    ignored: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder takes it.

    Attributes:
        token_ids: [num_tokens], placeholders expanded.
        positions: [3, num_tokens]; None without images: 0 to num_tokens - 1 on each axis.
        position_delta: what decode steps add to a token's index.
        runs: the tokens of each image's units.
    """

    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    runs: Sequence[Run] = ()

    @property
    def num_image_tokens(self) -> int:
        """Tokens of all images."""
        return sum(run.num_tokens for run in self.runs)


class PromptBuilder:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(self, spec: ModelSpec, tokenizer: ModelTokenizer, template: ChatTemplate) -> None:
        self._geometry = None if spec.vision is None else spec.vision.geometry
        self._tokenizer = tokenizer
        self._template = template

    def draft(self, conversation: Conversation, max_tokens: int) -> Draft:
        """Renders and tokenizes. No BOS token is added: a template writes its own.

        Raises:
            InvalidRequest: the template refuses the messages.
            ContextLengthExceeded: the text is longer than `max_tokens` can be.
        """
        self._tokenizer.check_length(conversation.text, max_tokens)
        ids: list[int] = []
        tail: list[str] = []
        for piece, is_added in self._template.render(conversation):
            tail.append(piece)
            if is_added:
                token = self._tokenizer.added[piece]
                ids.append(token.token_id)
                if token.special:
                    tail.clear()
            else:
                ids += self._tokenizer.encode_text(piece)
        return Draft(ids, conversation.images, "".join(tail), conversation.ignored)

    def has_placeholder(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the tokens stands for an image."""
        return self._geometry is not None and self._geometry.image_token_id in token_ids

    def expand(self, draft: Draft, images: Sequence[Sequence[Unit]]) -> Prompt:
        """Puts each image's units in the place of its placeholder, and computes positions.

        Raises:
            InvalidRequest: the template dropped or repeated an image.
        """
        compact, geometry = np.asarray(draft.token_ids, np.int32), self._geometry
        if geometry is None:
            return Prompt(compact, None, 0)
        places = np.flatnonzero(compact == geometry.image_token_id).tolist()
        if len(places) != len(images):
            raise InvalidRequest(
                f"the chat template placed {len(places)} images of {len(images)}",
                param="messages",
            )
        if not images:
            return Prompt(compact, None, 0)
        pieces: list[Int32s] = []
        runs: list[Run] = []
        start, length = 0, 0
        for image, (place, units) in enumerate(zip(places, images, strict=True)):
            ids, offsets = geometry.placeholders(units)
            length += place - start
            for unit, offset in zip(units, offsets, strict=True):
                runs.append(Run(length + offset, geometry.num_tokens(unit), unit, image))
            pieces += (compact[start:place], ids)
            start, length = place + 1, length + len(ids)
        token_ids = np.concatenate((*pieces, compact[start:]))
        positions, delta = geometry.positions(len(token_ids), runs)
        return Prompt(token_ids, positions, delta, runs)
