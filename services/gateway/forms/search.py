"""The requests and answers of search: vectors, reranking and scores.

The fields are those of OpenAI, vLLM, Cohere and Jina. An input is a text, a list of token ids, or
an object with `text`, `image` and `video`, as the reference code of the model cards takes them;
`content` takes the content parts of a chat message in their place.
"""

import re
from typing import Annotated, Any, Literal, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from services.common.errors import InvalidRequest
from services.gateway.forms.generation import TokenId, check_salt
from services.gateway.forms.json_body import Parser
from services.gateway.forms.openai import (
    MAX_PARTS,
    ChatRequest,
    Message,
    NamedImagePart,
    Part,
    TextPart,
    check_message,
)
from services.gateway.forms.video import (
    MediaOptions,
    MultimodalOptions,
    NamedVideoPart,
    Pixels,
)

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 1 << 20
_MAX_INSTRUCTION = 1 << 14

_Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_INPUT_TOKENS)]
_Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]
_Instruction = Annotated[str, Meta(max_length=_MAX_INSTRUCTION)]
_Truncation = Annotated[int, Meta(ge=-1, le=1 << 31)]


class SearchItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """An input of a model for search that is more than a text."""

    text: str | None = None
    image: str | None = None
    video: str | list[str] | None = None
    content: str | _Parts | None = None
    instruction: _Instruction | None = None

    def parts(self, path: str) -> str | list[Part]:
        """Returns the content of a message, in the order of the model cards.

        Raises:
            InvalidRequest: the object has `content` and other fields, or nothing.
        """
        named: list[Part] = []
        if self.video is not None:
            named.append(NamedVideoPart(video=self.video))
        if self.image is not None:
            named.append(NamedImagePart(url=self.image))
        if self.text is not None:
            named.append(TextPart(self.text))
        if (self.content is None) != bool(named):
            raise InvalidRequest(
                "give text, image and video, or content, and one of them at least", param=path
            )
        return named if self.content is None else self.content


Input = str | SearchItem


class SearchFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all requests of search share."""

    model: str | None = None
    instruction: _Instruction | None = None
    truncate_prompt_tokens: _Truncation | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    mm_processor_kwargs: MultimodalOptions | None = None
    media_io_kwargs: MediaOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None

    def chat(self, *contents: str | list[Part]) -> ChatRequest:
        """Returns the messages of a prompt with the request's options for images and videos."""
        return ChatRequest(
            [Message(role="user", content=content) for content in contents],
            self.model,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=self.media_io_kwargs,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


_IMAGE = re.compile(r"data:image/[\w.+-]{1,32};base64,")


def is_image(text: str) -> bool:
    """Returns whether a text is the `data:` URL of an image, as Jina's clients send images."""
    return _IMAGE.match(text) is not None


class EmbeddingRequest(SearchFields, kw_only=True):
    """POST /v1/embeddings. `messages` is one input: a user message, with the instruction as the
    system message before it.
    """

    input: (
        str
        | SearchItem
        | Annotated[list[str | TokenId | _Ids | SearchItem], Meta(max_length=MAX_INPUT_TOKENS)]
        | None
    ) = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=3)] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def inputs(self) -> list[Input | list[int]]:
        """The inputs, each with its own type."""
        given = self.input
        if given is None or not isinstance(given, list):
            return [] if given is None else [given]
        if given and isinstance(given[0], int):
            return [cast("list[int]", given)]
        return cast("list[Input | list[int]]", given)


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling: the vectors of all tokens of inputs."""

    task: Literal["token_embed"] | None = None


class PairFields(SearchFields, kw_only=True):
    """The fields of requests for pairs of a query and a document."""

    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None


class RerankRequest(PairFields, kw_only=True):
    """POST /v1/rerank and /v2/rerank."""

    query: Input
    documents: Annotated[list[Input], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


_Side = Input | Annotated[list[Input], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(PairFields, kw_only=True):
    """POST /v1/score: pairs of a query and a document, under the names of vLLM's versions."""

    queries: _Side | None = None
    documents: _Side | None = None
    text_1: _Side | None = None
    text_2: _Side | None = None
    data_1: _Side | None = None
    data_2: _Side | None = None

    def sides(self) -> tuple[tuple[str, list[Input]], tuple[str, list[Input]]]:
        """Returns the names and the elements of both sides.

        Raises:
            InvalidRequest: a side is missing or given twice, or the numbers of both do not fit.
        """
        first = self._side("queries", "text_1", "data_1")
        second = self._side("documents", "text_2", "data_2")
        if len(first[1]) not in (1, len(second[1])):
            raise InvalidRequest(
                f"{len(first[1])} for {len(second[1])} of {second[0]}; give one, or as many",
                param=first[0],
            )
        return first, second

    def _side(self, *names: str) -> tuple[str, list[Input]]:
        given = [(name, side) for name in names if (side := getattr(self, name)) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"give one of {', '.join(names)}", param=names[0])
        ((name, side),) = given
        return name, cast("list[Input]", side) if isinstance(side, list) else [side]


def _check(request: SearchFields) -> None:
    check_salt(request.cache_salt)
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest("0 would leave nothing of the prompt", param="truncate_prompt_tokens")


def _check_embedding(request: EmbeddingRequest) -> None:
    _check(request)
    inputs = request.inputs
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("give input or messages", param="input")
    if request.messages is not None:
        _check_messages(request.messages, request.instruction)
    elif not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"give 1 to {MAX_INPUTS} inputs", param="input")
    given: list[object] = list(request.input) if isinstance(request.input, list) else []
    num_ids = sum(isinstance(each, int) for each in given)
    if num_ids not in (0, len(given)):
        raise InvalidRequest("token ids and other inputs are mixed", param="input")


def _check_messages(messages: list[Message], instruction: str | None) -> None:
    """Checks that the messages are one input, in one of vLLM's forms: perhaps a system message, a
    user message, and perhaps an assistant's message without text.
    """
    for index, message in enumerate(messages):
        check_message(message, index)
    roles = [message.role for message in messages]
    last = messages[-1]
    if roles[-1] == "assistant" and not text_of(last):
        roles.pop()
    if roles and roles[0] in ("system", "developer"):
        if instruction is not None:
            raise InvalidRequest("the system message has an instruction", param="instruction")
        roles.pop(0)
    if roles != ["user"]:
        raise InvalidRequest(
            "an input is one user message, after a system message with the instruction if any",
            param="messages",
        )


def text_of(message: Message) -> str:
    """Returns the text of a message."""
    content = message.content or ""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


parse_embedding_request = Parser(EmbeddingRequest, _check_embedding)


def _check_pooling(request: PoolingRequest) -> None:
    _check_embedding(request)
    if request.dimensions is not None:
        raise InvalidRequest("the vectors of tokens have one length", param="dimensions")


parse_pooling_request = Parser(PoolingRequest, _check_pooling)
parse_rerank_request = Parser(RerankRequest, _check)
parse_score_request = Parser(ScoreRequest, _check)


class SearchUsage(Struct):
    """Tokens of all prompts of a request. `prompt_tokens_details` has those found in caches and
    those of images.
    """

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Embedding(Struct):
    """The vector of an input: numbers, or their float32 in little-endian order as base64.

    `truncated` is true if the input was cut to `truncate_prompt_tokens`.
    """

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"
    truncated: bool | UnsetType = UNSET


class EmbeddingList(Struct):
    """The answer of /v1/embeddings, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: SearchUsage
    object: Literal["list"] = "list"


class TokenVectors(Struct):
    """The vectors of an input's tokens: a list of numbers for each, or the float32 of all of them,
    one behind the other in little-endian order, as base64.

    `truncated` is true if the input was cut to `truncate_prompt_tokens`.
    """

    index: int
    data: list[list[float]] | str
    object: Literal["pooling"] = "pooling"
    truncated: bool | UnsetType = UNSET


class TokenVectorsList(Struct):
    """The answer of /pooling, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[TokenVectors]
    usage: SearchUsage
    object: Literal["list"] = "list"


class RankedDocument(Struct):
    """A document with its score: a probability, or the MaxSim of vectors of tokens."""

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET


class Ranking(Struct):
    """The answer of /v1/rerank and /v2/rerank: the best document first. `meta` is Cohere's."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: SearchUsage
    meta: dict[str, Any]
    object: Literal["list"] = "list"


class Score(Struct):
    """The score of a pair: a probability, or the MaxSim of vectors of tokens."""

    index: int
    score: float
    truncated: bool | UnsetType = UNSET
    object: Literal["score"] = "score"


class ScoreList(Struct):
    """The answer of /v1/score, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: SearchUsage
    object: Literal["list"] = "list"
