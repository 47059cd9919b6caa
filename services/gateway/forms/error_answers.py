"""The bodies of errors: OpenAI's shape, and Anthropic's on Anthropic's paths."""

import re
from typing import Any

from msgspec import Struct

from services.common.errors import TriptychError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(Struct):
    """What is wrong; `param` is the path of a field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


class MessagesErrorDetail(Struct):
    """What is wrong."""

    type: str
    message: str


class MessagesErrorAnswer(Struct, tag_field="type", tag="error"):
    """The body of every error below /v1/messages, and the last event of a stream that failed."""

    error: MessagesErrorDetail


def error_body(
    message: str, *, kind: str, param: str | None, code: str | None
) -> dict[str, dict[str, Any]]:
    """OpenAI's error shape. Anything that looks like a memory address is masked."""
    return {
        "error": {
            "message": _ADDRESS.sub("0x...", message),
            "type": kind,
            "param": None if param is None else _ADDRESS.sub("0x...", param),
            "code": code,
        }
    }


def error_of(error: TriptychError) -> dict[str, dict[str, Any]]:
    """`error_body` of one of our errors; the message begins with the path of the field."""
    return error_body(
        _message_of(error), kind=error.openai_type, param=error.param, code=error.code
    )


def messages_error_of(error: TriptychError) -> MessagesErrorAnswer:
    """Anthropic's error shape of one of our errors."""
    message = _ADDRESS.sub("0x...", _message_of(error))
    return MessagesErrorAnswer(MessagesErrorDetail(_anthropic_type(error.http_status), message))


def shaped_for(path: str, status: int, body: dict[str, dict[str, Any]]) -> object:
    """OpenAI's error body in the shape that the path's clients read."""
    if path != _MESSAGES_PATH and not path.startswith(f"{_MESSAGES_PATH}/"):
        return body
    detail = MessagesErrorDetail(_anthropic_type(status), body["error"]["message"])
    return MessagesErrorAnswer(detail)


def _message_of(error: TriptychError) -> str:
    if error.param is not None and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message


def _anthropic_type(status: int) -> str:
    found = _ANTHROPIC_TYPES.get(status)
    return found or ("invalid_request_error" if status < 500 else "api_error")
