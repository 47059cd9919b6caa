"""The prompts of models for search, in the form of their model cards.

Each of the four kinds of models has a template of its own here, so that no chat template and no
option decides what a vector or a score means:

- An embedding model of texts takes the text alone, or `Instruct: {instruction}`, a line break and
  `Query:{text}`; then `<|endoftext|>`.
- A vision-language embedding model takes the instruction as system message, the input as user
  message, and the beginning of the model's turn.
- A reranker takes a fixed system message, and a user message with instruction, query and document.
  That of a vision-language model has no line break before `<Query>:`.
- A model with a vector for each token takes a text and ten `<|endoftext|>`, or an image and
  "Describe the image." in a user message, with the text behind it. It has no instruction.

Client text is encoded without added tokens, as everywhere in the gateway, so that a document cannot
contain the end of its own message. Tokens that tokenizer.json adds to each text are added here,
too: transformers pools `<|endoftext|>` because the tokenizer of an embedding model appends it.

A prompt that is too long is cut as in the cards: on the right, where the template's last tokens
stay. `SearchPrompts` makes drafts; `PromptBuilder.expand` replaces their placeholders.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpec, ModelSpecError
from services.gateway.bounds import Bounds
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.search import text_of
from services.gateway.prompts.conversation import read_messages
from services.gateway.prompts.prompt import Draft
from services.gateway.tokenizer.tokenizer import ModelTokenizer

_END = "<|endoftext|>"
_EMBED = "Represent the user's input."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_RANK_TEXT = "Given a web search query, retrieve relevant passages that answer the query"
_RANK_VL = "Given a search query, retrieve relevant candidates that answer the query."
_TURN_END = "<|im_end|>\n<|im_start|>assistant\n"
_DESCRIBE = "Describe the image."
_NUM_ENDS = 10  # tokens behind a text that has a vector for each token
_NULL = "NULL"  # stands for an input without text, images and videos
_NEEDED = ("<|im_start|>", "<|im_end|>", _END)


@dataclass(frozen=True, slots=True)
class SearchDraft:
    """The prompt of an input or of a pair, before its images are loaded.

    Attributes:
        draft: token ids, with one placeholder per image and video.
        num_head, num_tail: number of tokens at the beginning and at the end that are never cut off.
        uncut: ids of tokens that are left when others are cut.
        is_cut: True if tokens were cut off.
    """

    draft: Draft
    num_head: int
    num_tail: int
    uncut: frozenset[int] = frozenset()
    is_cut: bool = False

    def shortened(self, count: int, placeholders: Sequence[int]) -> "SearchDraft":
        """Returns the draft without the last `count` tokens that may be cut.

        Args:
            placeholders: ids that stand for an image or a video.

        Raises:
            InvalidRequest: the template and the images take more tokens than are left.
        """
        ids = self.draft.token_ids
        end = len(ids) - self.num_tail
        places = [i for i in range(self.num_head, end) if ids[i] not in self.uncut]
        cut = set(places[-count:])
        if len(cut) < count or any(ids[place] in placeholders for place in cut):
            raise InvalidRequest(
                "the images, the videos and the template of the prompt alone have more tokens",
                param="truncate_prompt_tokens",
            )
        left = [token_id for place, token_id in enumerate(ids) if place not in cut]
        return replace(self, draft=replace(self.draft, token_ids=left), is_cut=True)


class SearchPrompts:
    """Makes the prompts of one model for search. Thread-safe.

    Args:
        spec: specification of the model, which is one for search.
        tokenizer: tokenizer of the model.
        bounds: bounds on the number of images and videos of a prompt.

    Raises:
        ModelSpecError: the tokenizer lacks a token of the templates.
    """

    def __init__(self, spec: ModelSpec, tokenizer: ModelTokenizer, bounds: Bounds) -> None:
        assert spec.search is not None
        if missing := [name for name in _NEEDED if name not in tokenizer.added]:
            raise ModelSpecError(
                f"{spec.directory}/tokenizer.json: a model for search needs the token {missing[0]}"
            )
        self._tokenizer, self._bounds = tokenizer, bounds
        self._takes_images = spec.vision is not None
        self._task = spec.task
        self._ranks = spec.task == "rank"
        self._prompt = spec.search.default_prompt
        self._before, self._after = _added_around(tokenizer)
        if not self._takes_images and not self._ranks and not self._after:
            # Tokenizers of the first Qwen3-Embedding files did not append the token themselves.
            self._after = [tokenizer.added[_END].token_id]
        self._media: dict[str, list[int]] = {}
        if spec.vision is not None:
            edges = [tokenizer.added[f"<|vision_{name}|>"].token_id for name in ("start", "end")]
            kinds = {"image": spec.vision.geometry.image_token_id}
            if spec.vision.video is not None:
                kinds["video"] = spec.vision.video.video_token_id
            self._media = {kind: [edges[0], of, edges[1]] for kind, of in kinds.items()}

    @property
    def placeholders(self) -> list[int]:
        """Ids that stand for an image or a video in a draft."""
        return [ids[1] for ids in self._media.values()]

    def draft(
        self, request: ChatRequest, instruction: str | None, max_document_tokens: int | None = None
    ) -> SearchDraft:
        """Makes the prompt of an input, or of a query and a document.

        Args:
            request: the input as a user message, or the query and the document as two.
            instruction: task of the search in a sentence. None for the model's own.
            max_document_tokens: most tokens of the text of the last message, a document, which is
                cut on the right. None if it is not cut.

        Raises:
            InvalidRequest: the model takes no images or videos, or too many are given.
        """
        messages, images, videos = read_messages(
            request, self._bounds, takes_images=self._takes_images
        )
        contents = [message["content"] for message in messages]
        if self._ranks:
            make = self._vision_pair if self._takes_images else self._text_pair
            found = make(contents[0], contents[1], instruction)
        elif self._task == "token_embed":
            found = self._input_of_tokens(contents[0], instruction)
        elif self._takes_images:
            found = self._vision_input(contents[0], instruction)
        else:
            found = self._text_input(contents[0], instruction)
        if max_document_tokens is not None:
            text = text_of(request.messages[-1])
            if self._task == "token_embed":
                text = text.strip()  # as in the prompt
            document = self._tokenizer.encode_text(text)
            if (excess := len(document) - max_document_tokens) > 0:
                found = found.shortened(excess, self.placeholders)
        return replace(found, draft=replace(found.draft, images=images, videos=videos))

    def of_ids(self, token_ids: Sequence[int]) -> SearchDraft:
        """Makes the prompt of an input that the client has tokenized. Nothing is added to it. If
        the input is cut, a special token at its end stays.
        """
        num_tail = int(token_ids[-1] in self._tokenizer.special_ids)
        return SearchDraft(Draft(list(token_ids)), 0, num_tail)

    def _text_input(self, text: str, instruction: str | None) -> SearchDraft:
        if instruction is not None:
            text = f"Instruct: {instruction}\nQuery:{text}"
        else:
            text = self._prompt + text
        return self._joined(self._before, self._tokenizer.encode_text(text), self._after)

    def _vision_input(self, content: Any, instruction: str | None) -> SearchDraft:  # noqa: ANN401
        system = (instruction or "").strip()
        if system and not unicodedata.category(system[-1]).startswith("P"):
            system += "."
        body = self._encode(
            (
                *self._turn("system", system or self._prompt or _EMBED),
                *self._opened("user"),
                *self._parts(content),
                *self._closed(),
                *self._opened("assistant"),
            )
        )
        return self._joined(self._before, body, self._after)

    def _text_pair(self, query: str, document: str, instruction: str | None) -> SearchDraft:
        task = instruction or self._prompt or _RANK_TEXT
        body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        # The card tokenizes the three parts one by one.
        head = f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
        return self._joined(
            self._tokenizer.encode_prompt(head, add_special_tokens=False),
            self._tokenizer.encode_text(body),
            self._tokenizer.encode_prompt(
                f"{_TURN_END}<think>\n\n</think>\n\n", add_special_tokens=False
            ),
        )

    def _vision_pair(
        self,
        query: Any,  # noqa: ANN401
        document: Any,  # noqa: ANN401
        instruction: str | None,
    ) -> SearchDraft:
        task = instruction or self._prompt or _RANK_VL
        body = self._encode(
            (
                *self._turn("system", _JUDGE),
                *self._opened("user"),
                f"<Instruct>: {task}<Query>:",
                *self._parts(query),
                "\n<Document>:",
                *self._parts(document),
            )
        )
        tail = self._tokenizer.encode_prompt(_TURN_END, add_special_tokens=False)
        made = self._joined(self._before, body, [*tail, *self._after])
        return replace(made, uncut=self._tokenizer.special_ids)

    def _input_of_tokens(self, content: Any, instruction: str | None) -> SearchDraft:  # noqa: ANN401
        if instruction is not None:
            raise InvalidRequest("the model takes no instruction", param="instruction")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for index, part in enumerate(parts):
            if part["type"] not in ("text", *self._media):
                raise InvalidRequest(
                    "the model takes no videos", param=f"messages[0].content[{index}]"
                )
        images = [part for part in parts if part["type"] != "text"]
        text = "".join(part["text"] for part in parts if part["type"] == "text").strip()
        end = self._tokenizer.added[_END].token_id
        if not images:
            return self._joined([], self._encode((text,)), [end] * _NUM_ENDS)
        if len(images) > 1:
            raise InvalidRequest("an input has one image at most", param="messages[0].content")
        body = (*self._opened("user"), *self._media["image"], f"{_DESCRIBE} {text}".strip())
        close = self._tokenizer.added["<|im_end|>"].token_id
        return self._joined([], self._encode(body), [close, end])

    def _joined(self, head: list[int], body: list[int], tail: list[int]) -> SearchDraft:
        return SearchDraft(Draft([*head, *body, *tail]), len(head), len(tail))

    def _opened(self, role: str) -> Iterator[str | int]:
        yield self._tokenizer.added["<|im_start|>"].token_id
        yield f"{role}\n"

    def _closed(self) -> Iterator[str | int]:
        yield self._tokenizer.added["<|im_end|>"].token_id
        yield "\n"

    def _turn(self, role: str, text: str) -> Iterator[str | int]:
        yield from self._opened(role)
        yield text
        yield from self._closed()

    def _parts(self, content: str | Sequence[dict[str, Any]]) -> Iterator[str | int]:
        """Yields the text and the placeholders of a message's content."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        is_empty = True
        for part in parts:
            if part["type"] == "text":
                is_empty = is_empty and not part["text"]
                yield part["text"]
            else:
                is_empty = False
                yield from self._media[part["type"]]
        if is_empty:
            yield _NULL

    def _encode(self, pieces: Iterable[str | int]) -> list[int]:
        """Encodes text and token ids. Text without an id in between is encoded as a whole."""
        ids: list[int] = []
        text = ""
        for piece in (*pieces, None):
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                ids += self._tokenizer.encode_text(text)
                text = ""
            if piece is not None:
                ids.append(piece)
        return ids


def _added_around(tokenizer: ModelTokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids that tokenizer.json adds before and after each text."""
    inner = tokenizer.encode_prompt("a", add_special_tokens=False)
    whole = tokenizer.encode_prompt("a", add_special_tokens=True)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []
