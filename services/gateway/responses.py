"""What the gateway answers: OpenAI's shapes, written as JSON."""

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.common.errors import TriptychError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
encode_json = msgspec.json.encode


class TopLogprob(Struct):
    """One of a token's alternatives."""

    token: str
    bytes: list[int]
    logprob: float


class LogprobEntry(Struct):
    """A token of the text."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    """Of a choice or a chunk of it."""

    content: list[LogprobEntry]
    refusal: None = None


class PromptTokensDetails(Struct, omit_defaults=True):
    """`cached_tokens` is absent where the decoder had no chance to say it."""

    image_tokens: int | None = None
    cached_tokens: int | None = None


class Usage(Struct):
    """Tokens of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ImageReport(Struct):
    """Of one image, with `include_stage_times`: where its embedding came from.

    `encode_source` is computed, memory, redis or joined; null where the decoder had it first.
    """

    encode_source: str | None
    num_tokens: int
    grid_thw: tuple[int, int, int]


class AssistantMessage(Struct):
    """The answer's text."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ResponseChoice(Struct):
    """One whole answer."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: Logprobs | None


class ChatCompletion(Struct):
    """The response without a stream."""

    id: str
    created: int
    model: str
    choices: list[ResponseChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None
    stage_times_ms: dict[str, float] | UnsetType = UNSET
    images: list[ImageReport] | UnsetType = UNSET


def error_body(
    message: str, *, kind: str, param: str | None, code: str | None
) -> dict[str, dict[str, Any]]:
    """OpenAI's error shape. Nothing that looks like an address of this process gets out."""
    return {
        "error": {
            "message": _ADDRESS.sub("0x...", message),
            "type": kind,
            "param": None if param is None else _ADDRESS.sub("0x...", param),
            "code": code,
        }
    }


def error_of(error: TriptychError) -> dict[str, dict[str, Any]]:
    """The body for one of our errors."""
    return error_body(error.message, kind=error.openai_type, param=error.param, code=error.code)
