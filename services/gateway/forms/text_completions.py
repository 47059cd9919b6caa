"""The types of POST /v1/completions: OpenAI's text completions, with vLLM's further fields.

A prompt is the whole input of the model, and no chat template is applied. The names of special
tokens in a prompt become special tokens, as in transformers.
"""

from typing import Annotated, Literal, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from services.common.errors import InvalidRequest
from services.gateway.forms.generation import (
    MAX_TOP_LOGPROBS,
    GenerationFields,
    TokenId,
    check_generation,
)
from services.gateway.forms.json_body import Parser
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import PromptLogprob, Usage

MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 1 << 20
DEFAULT_MAX_TOKENS = 16

_Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` is a text, token ids, or a list of texts or of token ids."""

    model: str | None = None
    prompt: str | Annotated[list[str | TokenId | _Ids], Meta(max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, all as texts or all as token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [cast("list[int]", given)]
        return cast("list[str | list[int]]", given)

    def to_chat(self) -> ChatRequest:
        """Returns a chat request without messages that has the request's sampling parameters."""
        chat = ChatRequest([], self.model)
        for name in GenerationFields.__struct_fields__:
            setattr(chat, name, getattr(self, name))
        # For `max_tokens: 0`, one token is generated and discarded.
        wanted = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        chat.max_tokens = max(1, wanted)
        if self.logprobs is not None:
            chat.logprobs, chat.top_logprobs = True, self.logprobs
            if self.echo and chat.prompt_logprobs is None:
                chat.prompt_logprobs = self.logprobs
        return chat


class TextLogprobs(Struct):
    """Logprobs of a choice, with an entry for each token of the text. The tokens of an echoed
    prompt are included.

    The first token of a prompt has no logprob. The keys of `top_logprobs` are the texts of tokens.
    `text_offset` is the position of each token in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    """A choice, or a piece of one. Choice `index` is prompt * n + choice of the prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET

    def fill(self) -> None:
        """Sets omitted fields to null, because readers of a whole answer expect every field."""
        for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
            if getattr(self, name) is UNSET:
                setattr(self, name, None)


class TextCompletion(Struct):
    """An answer, or an event of a stream. If the request asks for the usage, the last event has the
    usage and no choices.
    """

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None


def _check(request: CompletionRequest) -> None:
    check_generation(request)
    prompts = request.prompts
    mixed = isinstance(request.prompt, list) and len({type(p) for p in request.prompt}) > 1
    if not prompts or mixed or (isinstance(request.prompt, list) and len(prompts) > MAX_PROMPTS):
        raise InvalidRequest(
            f"give a text, token ids, or 1 to {MAX_PROMPTS} of one kind", param="prompt"
        )
    if len(prompts) * (request.n or 1) > MAX_PROMPTS:
        raise InvalidRequest(
            f"all prompts together may have at most {MAX_PROMPTS} answers", param="n"
        )
    if request.stream and request.echo and request.logprobs is not None and (request.n or 1) > 1:
        raise InvalidRequest("a stream of several answers has no logprobs of the prompt", param="n")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("0 needs echo: true", param="max_tokens")


parse_completion_request = Parser(CompletionRequest, _check)
