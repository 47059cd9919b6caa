"""The bodies of errors: OpenAI's shape, and Anthropic's for its clients."""

import re

from msgspec import Struct

from services.common.errors import InvalidImage, TriptychError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
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
    """The description of an error. `param` is the path of the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


class MessagesErrorDetail(Struct):
    """The description of an error. `details` has the `error_code`."""

    type: str
    message: str
    details: dict[str, str | None]


class MessagesErrorAnswer(Struct, tag_field="type", tag="error"):
    """The body of errors for Anthropic's clients, and the last event of a stream that failed."""

    error: MessagesErrorDetail


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> ErrorAnswer:
    """Returns an error in OpenAI's shape. Texts that look like memory addresses are masked."""
    param = None if param is None else _ADDRESS.sub("0x...", param)
    return ErrorAnswer(ErrorDetail(_ADDRESS.sub("0x...", message), kind, param, code))


def error_of(error: TriptychError) -> ErrorAnswer:
    """Returns an exception in OpenAI's shape. The field is put before a message that does not name
    the field.
    """
    message, param = error.message, error.param
    if param is not None and not re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message):
        message = f"{param}: {message}"
    return error_body(message, kind=error.openai_type, code=error.code, param=param)


def messages_error(status: int, body: ErrorAnswer) -> MessagesErrorAnswer:
    """Converts an error from OpenAI's to Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "api_error")
    message, code = body.error.message, body.error.code
    if code == InvalidImage.code:  # Claude Code continues without the image at this text.
        message = f"Could not process image: {message}"
    return MessagesErrorAnswer(MessagesErrorDetail(kind, message, {"error_code": code}))
