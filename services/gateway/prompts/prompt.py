"""The prompt of a conversation: its token ids and positions.

`PromptBuilder.draft` renders a conversation with the chat template and tokenizes the text. In the
draft, a single placeholder token stands for each image and each video. Once the images and videos
are loaded, their numbers of tokens are known, and `PromptBuilder.expand` replaces each placeholder
by that many tokens and computes all positions. With an image of four tokens, the draft
`[5, IMAGE, 6]` becomes the prompt `[5, IMAGE, IMAGE, IMAGE, IMAGE, 6]`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
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
        token_ids: token ids, with one placeholder per image and video.
        images: sources of the images, such as URLs, in order.
        videos: sources of the videos, in order.
        tail: text of the prompt after its last special token. It is the beginning of the model's
            turn: if it ends in an opening `<think>` tag, the answer begins with reasoning. None if
            the prompt was not rendered from messages.
        ignored: names of the request's fields that have no effect on this model's answers.
    """

    token_ids: list[int]
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    tail: str | None = None
    ignored: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the decoder takes.

    Attributes:
        token_ids: int32 [num_tokens], token ids with expanded placeholders.
        positions: int32 [3, num_tokens], positions on the axes time, height and width. None if the
            prompt has no images and videos; the positions on each axis are then 0, 1, 2, …
        position_delta: position of a generated token minus its index in the sequence. The position
            of a generated token is the same on all three axes.
        runs: the prompt's runs of placeholder tokens, in order. Each run is replaced by the
            embedding of one unit: an image or a pair of video frames. `Run.image` is the index of
            the image or video. Images are counted first, so with two images the first video is 2.
    """

    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    runs: Sequence[Run] = ()

    @property
    def num_image_tokens(self) -> int:
        """Number of tokens of images, without the tokens of videos."""
        return sum(run.num_tokens for run in self.runs if run.unit.frames is None)


class PromptBuilder:
    """Renders and tokenizes the conversations of one model. Thread-safe."""

    def __init__(self, spec: ModelSpec, tokenizer: ModelTokenizer, template: ChatTemplate) -> None:
        self._geometry = None if spec.vision is None else spec.vision.geometry
        self._pairs = None if spec.vision is None else spec.vision.video
        self._tokenizer = tokenizer
        self._template = template

    def draft(self, conversation: Conversation, max_tokens: int | None) -> Draft:
        """Renders and tokenizes a conversation. No BOS token is added, because templates write it.

        Args:
            max_tokens: number of tokens that the prompt may have. Text that is certain to have more
                is refused before it is tokenized. None if the text is known to be short.

        Raises:
            InvalidRequest: the template refuses the messages.
            ContextLengthExceeded: the text is so long that it cannot fit into `max_tokens` tokens.
        """
        if max_tokens is not None:
            self._tokenizer.check_length(conversation.text, max_tokens)
        ids: list[int] = []
        tail: list[str] = []
        # `render` yields plain text and added tokens (such as `<|im_start|>`) as separate pieces,
        # because the same characters in plain text must not become an added token.
        for piece, is_added in self._template.render(conversation):
            tail.append(piece)
            if is_added:
                token = self._tokenizer.added[piece]
                ids.append(token.token_id)
                if token.special:
                    tail.clear()
            else:
                ids += self._tokenizer.encode_text(piece, is_first=not ids)
        return Draft(
            ids, conversation.images, conversation.videos, "".join(tail), conversation.ignored
        )

    def has_placeholder(self, token_ids: Sequence[int]) -> bool:
        """Returns whether any of the tokens is the placeholder of an image or a video."""
        geometry, pairs = self._geometry, self._pairs
        has_image = geometry is not None and geometry.image_token_id in token_ids
        return has_image or (pairs is not None and pairs.video_token_id in token_ids)

    def expand(
        self, draft: Draft, images: Sequence[Sequence[Unit]], videos: Sequence[Video] = ()
    ) -> Prompt:
        """Replaces each placeholder of a draft by the tokens of its image or video, and computes
        the positions.

        Args:
            images: units of each image, in order.
            videos: loaded videos, in order.

        Raises:
            InvalidRequest: the numbers of placeholders and of images or videos differ, because the
                chat template has left one out or written one twice.
        """
        draft_ids, geometry = np.asarray(draft.token_ids, np.int32), self._geometry
        if geometry is None:
            return Prompt(draft_ids, None, 0)
        is_image = draft_ids == geometry.image_token_id
        is_video = draft_ids == (-1 if self._pairs is None else self._pairs.video_token_id)
        for is_placeholder, media, noun in (
            (is_image, images, "images"),
            (is_video, videos, "videos"),
        ):
            if (num_places := np.count_nonzero(is_placeholder)) != len(media):
                raise InvalidRequest(
                    f"the chat template placed {num_places} of the request's {len(media)} {noun}",
                    param="messages",
                )
        if not images and not videos:
            return Prompt(draft_ids, None, 0)
        pieces: list[Int32s] = []
        runs: list[Run] = []
        start, length = 0, 0
        next_image, next_video = iter(enumerate(images)), iter(enumerate(videos, len(images)))
        # `start` is the first index in `draft_ids` that is not yet copied to `pieces`; `length` is
        # the number of tokens that `pieces` has.
        for place in np.flatnonzero(is_image | is_video).tolist():
            if is_image[place]:
                image, units = next(next_image)
                ids, offsets = geometry.placeholders(units)
                steps: Sequence[int] = [0] * len(units)
            else:
                image, video = next(next_video)
                units, steps = video.units, video.steps
                ids, offsets = self._frames(video)
            length += place - start
            for unit, offset, step in zip(units, offsets, steps, strict=True):
                runs.append(Run(length + offset, geometry.num_tokens(unit), unit, image, step))
            pieces += (draft_ids[start:place], ids)
            start, length = place + 1, length + len(ids)
        token_ids = np.concatenate((*pieces, draft_ids[start:]))
        positions, delta = geometry.positions(len(token_ids), runs)
        return Prompt(token_ids, positions, delta, runs)

    def num_tokens(
        self, draft: Draft, images: Sequence[Sequence[Unit]], videos: Sequence[Video] = ()
    ) -> int:
        """Returns the number of tokens of the prompt that `expand` makes of the same arguments."""
        count, geometry = len(draft.token_ids), self._geometry
        if geometry is not None:
            count += sum(len(geometry.placeholders(units)[0]) - 1 for units in images)
            count += sum(len(self._frames(video)[0]) - 1 for video in videos)
        return count

    def num_pixels(self, units: Iterable[Unit]) -> int:
        """Returns the number of pixels of all images and frames of a prompt after resizing.

        Args:
            units: units of the images and of the videos.
        """
        if self._geometry is None:
            return 0
        # Each patch of a pair of frames covers the same square of both frames.
        num_patches = sum(unit.num_patches * (2 if unit.frames else 1) for unit in units)
        return num_patches * self._geometry.patch_size**2

    def _frames(self, video: Video) -> tuple[Int32s, Sequence[int]]:
        """Returns the token ids of a video, which replace its placeholder in the prompt, and for
        each frame pair the index of its first token in these ids.
        """
        assert self._pairs is not None
        texts = map(self._tokenizer.encode_text, self._pairs.texts(video.times))
        return self._pairs.placeholders(video.units, list(texts))
