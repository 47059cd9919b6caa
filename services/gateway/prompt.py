"""Messages to token ids: the chat template, then ids, then placeholders per image.

What a user writes is text and nothing else. The template's output is split at added tokens, so
before rendering a sentinel character (one that occurs in no text of the request) goes into each
string of the user's that is an added token, or could become one together with its neighbour. Only
the template's own added tokens survive the split; the sentinel is taken out before tokenizing.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpec, ModelSpecError
from services.gateway.mrope import Grid, Int32s, image_tokens, mrope_positions
from services.gateway.tokenizer import ModelTokenizer

# Noncharacters: valid in a string, assigned to nothing.
_SENTINELS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder wants it.

    Attributes:
        token_ids: [num_tokens], placeholders expanded.
        positions: [3, num_tokens]; None for text only.
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


class PromptBuilder:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(self, config: ModelSpec, tokenizer: ModelTokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = _environment().from_string(template)
        self._image_token_id = config.vision_part.image_token_id
        self._merge_size = config.vision_part.tower.spatial_merge_size
        contents = sorted(tokenizer.added, key=len, reverse=True)
        # An alternation takes the first that matches: the longest, as `tokenizers` does.
        self._added = re.compile("(" + "|".join(map(re.escape, contents)) + ")")
        self._heads = frozenset(c[:n] for c in contents for n in range(1, len(c)))
        self._tails = frozenset(c[n:] for c in contents for n in range(1, len(c)))
        self._max_part = max(map(len, contents), default=1) - 1

    @classmethod
    def from_directory(cls, config: ModelSpec, tokenizer: ModelTokenizer) -> "PromptBuilder":
        """Reads the directory's chat template.

        Raises:
            ModelSpecError: there is none.
        """
        return cls(config, tokenizer, read_template(config.directory))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        max_tokens: int,
    ) -> list[int]:
        """Ids before expansion: one placeholder per image.

        Args:
            messages: dicts of `role` and `content`, the content a string or a list of
                `{"type": "text", "text": ...}` and `{"type": "image"}`.
            template_options: further names for the template.
            max_tokens: refuse, before tokenizing, what cannot fit in as many.

        Raises:
            InvalidRequest: the template refuses the messages.
            ContextLengthExceeded: see `max_tokens`.
        """
        text = "\0".join(_texts(messages))
        self._tokenizer.check_length(text, max_tokens)
        sentinel = next((s for s in _SENTINELS if s not in text), None)
        if sentinel is None:
            raise InvalidRequest("the text uses every Unicode noncharacter", param="messages")
        guarded = [self._guard_message(message, sentinel) for message in messages]
        try:
            rendered = self._template.render(
                messages=guarded, add_generation_prompt=True, tools=None, **template_options
            )
        except (jinja2.TemplateError, TypeError) as error:
            reason = str(error) if isinstance(error, _Refusal) else "they do not fit it"
            raise InvalidRequest(
                f"the chat template refuses the messages: {reason}", param="messages"
            ) from None
        ids: list[int] = []
        for index, piece in enumerate(self._added.split(rendered)):
            if index % 2:
                ids.append(self._tokenizer.added[piece].token_id)
            elif piece:
                ids += self._tokenizer.encode_text(piece.replace(sentinel, ""))
        return ids

    def expand(self, ids: Sequence[int], grids: Sequence[Grid]) -> Prompt:
        """Replaces each placeholder by as many as its image has tokens, and places all tokens.

        Raises:
            InvalidRequest: the template dropped or doubled an image.
        """
        compact = np.asarray(ids, np.int32)
        slots = np.flatnonzero(compact == self._image_token_id)
        if len(slots) != len(grids):
            raise InvalidRequest(
                f"the chat template placed {len(slots)} images of {len(grids)}", param="messages"
            )
        if not grids:
            return Prompt(compact, None, 0, (), ())
        lengths = [image_tokens(grid, self._merge_size) for grid in grids]
        repeats = np.ones(len(compact), np.int64)
        repeats[slots] = lengths
        expanded = np.repeat(compact, repeats)
        offsets = tuple(int(end) for end in np.cumsum(repeats)[slots] - lengths)
        positions, delta = mrope_positions(
            len(expanded), list(zip(offsets, grids, strict=True)), self._merge_size
        )
        return Prompt(expanded, positions, delta, offsets, tuple(lengths))

    def _guard_message(self, message: Mapping[str, Any], sentinel: str) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._guard(content, sentinel)}
        parts = [
            {**part, "text": self._guard(part["text"], sentinel)} if "text" in part else part
            for part in content
        ]
        return {**message, "content": parts}

    def _guard(self, text: str, sentinel: str) -> str:
        """`text` with a sentinel wherever an added token is, or may arise at an end."""
        guarded = text
        while self._added.search(guarded):  # again: added tokens may overlap
            guarded = self._added.sub(lambda m: m[0][0] + sentinel + m[0][1:], guarded)
        size = min(len(text), self._max_part)
        if any(text[:n] in self._tails for n in range(1, size + 1)):
            guarded = sentinel + guarded
        if any(text[-n:] in self._heads for n in range(1, size + 1)):
            guarded += sentinel
        return guarded


def read_template(directory: Path) -> str:
    """The chat template: chat_template.jinja, else chat_template.json or tokenizer_config.json.

    Raises:
        ModelSpecError: there is none.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                return template
    raise ModelSpecError(f"{directory} has no chat template")


class _Refusal(jinja2.TemplateError):
    """The template's own `raise_exception`."""


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as HF sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    filters: dict[str, Any] = cast(Any, environment).filters
    filters["tojson"] = _to_json
    names: dict[str, Any] = cast(Any, environment).globals
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if "text" in part)
