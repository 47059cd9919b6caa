"""POST /tokenize, POST /detokenize and GET /tokenizer_info: what the model's tokenizer does.

The names and shapes are vLLM's. Errors are raised as `TriptychError`s.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest
from services.common.model_spec import read_json
from services.gateway.endpoints.request_context import parse_body
from services.gateway.forms.generation import TokenId
from services.gateway.forms.json_body import Body, Parser
from services.gateway.forms.openai import (
    MAX_MESSAGES,
    ChatRequest,
    Message,
    MultimodalOptions,
    check_chat_request,
)
from services.gateway.forms.responses import VideoUsage, encode_json
from services.gateway.forms.tools import MAX_TOOLS, Tool
from services.gateway.forms.video import MediaOptions
from services.gateway.http.exchange import JsonResponse
from services.gateway.request.chat import ChatService
from services.gateway.request.sampling import check_ids
from services.gateway.tenancy.slot import Slot

_MAX_TOKENS = 1 << 20  # most token ids of a body, more than any context has
# The text of an answer is in memory this many times: as bytes, as characters and as JSON.
_TEXT_COPIES = 3


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /tokenize: plain text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: MultimodalOptions | None = None
    media_io_kwargs: MediaOptions | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct):
    """The token ids of a prompt, with the tokens of its images and videos. `token_strs` are the
    tokens as the vocabulary writes them. `videos` has the sampled frames of each video, as `usage`
    of an answer would have them.
    """

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None
    videos: list[VideoUsage] | UnsetType = UNSET


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=_MAX_TOKENS)]
    model: str | None = None


class DetokenizeResponse(Struct):
    """The text of all tokens, special ones included."""

    prompt: str


_parse_tokenize = Parser(TokenizeRequest)
_parse_detokenize = Parser(DetokenizeRequest)


async def prompt_ids(
    service: ChatService, request: ChatRequest, slot: Slot
) -> tuple[list[int], list[VideoUsage]]:
    """Returns the token ids of a request's prompt, as `ChatService.prepare` makes it, and the
    sampled frames of its videos.

    Raises:
        TriptychError: the messages do not fit the template or the context, or an image or a
            video is unreadable.
    """
    draft = await service.drafts.read(request, service.decoder(request.model).max_model_len)
    images, videos = await service.read_media(draft, slot)
    prompt = service.prompts.expand(draft, [image.units for image in images], videos)
    return prompt.token_ids.tolist(), [video.usage for video in videos]


async def tokenize(service: ChatService, request: Request, slot: Slot, body: Body) -> Response:
    """Returns the token ids of the request's text or messages. A text is plain text, or a prompt
    of /v1/completions if `add_special_tokens` is given.
    """
    parsed = await parse_body(service, _parse_tokenize, body, request.scope)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    videos: list[VideoUsage] = []
    if (text := parsed.prompt) is not None:
        max_model_len = service.decoder(parsed.model).max_model_len
        service.tokenizer.check_length(text, max_model_len, "prompt")
        tokens = await service.drafts.encode(text, add_special_tokens=parsed.add_special_tokens)
    elif parsed.add_special_tokens and service.tokenizer.encode_prompt("", True):
        raise InvalidRequest(
            "not supported with messages: the chat template adds the special tokens",
            param="add_special_tokens",
        )
    else:
        chat = ChatRequest(parsed.messages or [], parsed.model)
        for name in (
            "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
            "mm_processor_kwargs", "media_io_kwargs",
        ):  # fmt: skip
            setattr(chat, name, getattr(parsed, name))
        check_chat_request(chat)
        tokens, videos = await prompt_ids(service, chat, slot)
    answer = TokenizeResponse(len(tokens), service.max_model_len(), tokens)
    if videos:
        answer.videos = videos
    if parsed.return_token_strs:
        answer.token_strs = [service.tokenizer.token_string(token) for token in tokens]
    return JsonResponse(answer)


async def detokenize(service: ChatService, request: Request, slot: Slot, body: Body) -> Response:
    """Returns the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
    parsed = await parse_body(service, _parse_detokenize, body, request.scope)
    decoder = service.decoder(parsed.model)
    if len(parsed.tokens) > decoder.max_model_len:
        raise InvalidRequest(
            f"has more than {decoder.max_model_len} tokens, which is the model's context length",
            param="tokens",
        )
    check_ids("tokens", parsed.tokens, decoder.vocab_size)
    text = await service.parsers.run(service.tokenizer.decode, parsed.tokens)
    slot.memory.add(_TEXT_COPIES * len(text.encode()))
    return await service.parsers.run(lambda: JsonResponse(DetokenizeResponse(text)))


@dataclass(frozen=True)
class TokenizerInfo:
    """The answer of GET /tokenizer_info, which is encoded once.

    Attributes:
        directory: the checkpoint, whose tokenizer_config.json is shown.
        template: source of the chat template that the gateway renders.
    """

    directory: Path
    template: str

    @cached_property
    def body(self) -> bytes:
        """JSON of tokenizer_config.json, with the chat template."""
        path = self.directory / "tokenizer_config.json"
        config: dict[str, Any] = read_json(path) if path.exists() else {}
        return encode_json({**config, "chat_template": self.template})


async def tokenizer_info(service: ChatService, info: TokenizerInfo, request: Request) -> Response:
    """Returns tokenizer_config.json and the chat template."""
    body = await service.parsers.run(lambda: info.body)
    return Response(body, media_type="application/json")
