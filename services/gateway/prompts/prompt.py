"""A conversation to the prompt's token ids and positions.

`PromptBuilder.draft` renders and tokenizes it, with one placeholder per image and video; once they
are loaded, `PromptBuilder.expand` puts their units there and computes positions. `ChatService`
calls both; bytes of images are not seen here. Messages that do not fit the template or the context
are an `InvalidRequest`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.common.frame_pairs import time_text
from services.common.geometry import Int32s, Run, Unit
from services.common.model_spec import ModelSpec
from services.gateway.media.images import ImageSource
from services.gateway.media.videos import Video, VideoSource
from services.gateway.prompts.chat_template import ChatTemplate, Conversation
from services.gateway.tokenizer.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before its images are loaded.

    Attributes:
        token_ids: one placeholder per image and video.
        tail: the text after the last special token: the beginning of the model's turn; None: the
            prompt is not rendered.
        ignored: fields of the request that change no answer of this model.
    """

    token_ids: list[int]
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    tail: str | None = None
    ignored: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder takes it.

    Attributes:
        token_ids: [num_tokens], placeholders expanded.
        positions: [3, num_tokens]; None without images: 0 to num_tokens - 1 on each axis.
        position_delta: what decode steps add to a token's index.
        runs: the tokens of each unit of images and videos; `Run.image` counts videos behind all
            images.
    """

    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    runs: Sequence[Run] = ()

    @property
    def num_image_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs if run.unit.frames is None)


class PromptBuilder:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(self, spec: ModelSpec, tokenizer: ModelTokenizer, template: ChatTemplate) -> None:
        self._geometry = None if spec.vision is None else spec.vision.geometry
        self._pairs = None if spec.vision is None else spec.vision.video
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
        return Draft(
            ids, conversation.images, conversation.videos, "".join(tail), conversation.ignored
        )

    def has_placeholder(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the tokens stands for an image or a video."""
        geometry, pairs = self._geometry, self._pairs
        has_image = geometry is not None and geometry.image_token_id in token_ids
        return has_image or (pairs is not None and pairs.video_token_id in token_ids)

    def expand(
        self, draft: Draft, images: Sequence[Sequence[Unit]], videos: Sequence[Video] = ()
    ) -> Prompt:
        """Puts the units of each image and video in the place of its placeholder, and computes
        positions.

        Raises:
            InvalidRequest: the template dropped or repeated an image or a video.
        """
        compact, geometry = np.asarray(draft.token_ids, np.int32), self._geometry
        if geometry is None:
            return Prompt(compact, None, 0)
        is_image = compact == geometry.image_token_id
        is_video = compact == (-1 if self._pairs is None else self._pairs.video_token_id)
        for found, given, noun in ((is_image, images, "images"), (is_video, videos, "videos")):
            if (num_places := np.count_nonzero(found)) != len(given):
                raise InvalidRequest(
                    f"the chat template placed {num_places} {noun} of {len(given)}",
                    param="messages",
                )
        if not images and not videos:
            return Prompt(compact, None, 0)
        pieces: list[Int32s] = []
        runs: list[Run] = []
        start, length = 0, 0
        next_image, next_video = iter(enumerate(images)), iter(enumerate(videos, len(images)))
        for place in np.flatnonzero(is_image | is_video).tolist():
            if is_image[place]:
                medium, units = next(next_image)
                ids, offsets = geometry.placeholders(units)
            else:
                medium, video = next(next_video)
                units = video.units
                ids, offsets = self._frames(video)
            length += place - start
            for unit, offset in zip(units, offsets, strict=True):
                runs.append(Run(length + offset, geometry.num_tokens(unit), unit, medium))
            pieces += (compact[start:place], ids)
            start, length = place + 1, length + len(ids)
        token_ids = np.concatenate((*pieces, compact[start:]))
        positions, delta = geometry.positions(len(token_ids), runs)
        return Prompt(token_ids, positions, delta, runs)

    def num_pixels(self, prompt: Prompt) -> int:
        """Of all images and frames of a prompt, resized."""
        if self._geometry is None:
            return 0
        units = [run.unit for run in prompt.runs]
        num_patches = sum(unit.num_patches * (2 if unit.frames else 1) for unit in units)
        return num_patches * self._geometry.patch_size**2

    def _frames(self, video: Video) -> tuple[Int32s, Sequence[int]]:
        """The tokens of a video, and the offsets of its units' runs."""
        assert self._pairs is not None
        texts = [self._tokenizer.encode_text(time_text(time)) for time in video.times]
        return self._pairs.placeholders(video.units, texts)
