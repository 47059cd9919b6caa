"""The error tree, and the one table from an error to gRPC and HTTP.

    TriptychError
    ├── InvalidRequest                 400  the caller's fault; `param` names the field
    │   ├── ContextLengthExceeded      400
    │   ├── InvalidImage               400
    │   ├── InvalidVideo               400
    │   ├── InvalidGrammar             400
    │   ├── ThreadUnsupported          400
    │   ├── ModelNotFound              404
    │   └── NotFound                   404  what an earlier request made, or another tenant's did
    ├── PayloadTooLarge                413
    ├── UnsupportedMediaType           415  the body is declared as something other than JSON
    ├── MediaFetchFailed               422  a URL answered, but not with an image
    ├── RateLimited                    429  a limit of the caller's tenant; `retry_after_s`
    ├── Cancelled                      499  the caller disconnected (never sent, only logged)
    ├── InternalError                  500
    ├── EmbeddingUnavailable           503  one encoder did not deliver an embedding
    ├── WrongImageKey                  503  one encoder has another key for the image
    ├── VideoNotHeld                   503  one encoder no longer has the file: send it again
    ├── Unavailable                    503  no healthy service is left
    │   ├── Overloaded                 503  full or draining; `retry_after_s` says when to come back
    │   └── ProcessLost                503  the process that had the work died, perhaps of it
    │       └── EngineLost             503  an engine died while it worked on this, says its front
    └── DeadlineExceeded               504

Errors cross gRPC as a status code plus the trailing metadata of `transport/rpc.py`; a status code
alone is never trusted, because gRPC itself sends the same ones.
"""

from typing import ClassVar, Self


class TriptychError(Exception):
    """An error with a status in every protocol.

    Attributes:
        code: stable machine-readable name, also on the wire.
        http_status: status of an HTTP answer.
        openai_type: `error.type` of an OpenAI error body.
        grpc_status: name of the `grpc.StatusCode`.
        retryable: another instance may succeed with the same request.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def without_frames(self) -> Self:
        """This error without traceback and context, once nobody raises it any more. Their frames
        hold a whole request, and often the error itself: a cycle, which only the garbage collector
        would free.
        """
        self.__traceback__ = self.__context__ = None
        return self


class InvalidRequest(TriptychError):
    """The request must be changed before it can be served."""

    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and completion do not fit in the model's context."""

    code = "context_length_exceeded"


class InvalidImage(InvalidRequest):
    """Bytes that are not an image of an allowed format and size."""

    code = "invalid_image"


class InvalidVideo(InvalidRequest):
    """Bytes that are not a video of an allowed container and size, or cannot be decoded."""

    code = "invalid_video"


class InvalidGrammar(InvalidRequest):
    """A schema, expression or grammar that an answer cannot be held to."""

    code = "invalid_grammar"


class ThreadUnsupported(InvalidRequest):
    """Anthropic's clients send the whole conversation then."""

    code = "thread_unsupported_request"


class ModelNotFound(InvalidRequest):
    """No model of that name is served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class NotFound(InvalidRequest):
    """What the request names is not kept here, or belongs to another tenant."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class PayloadTooLarge(TriptychError):
    """The request body is over the limit."""

    code = "payload_too_large"
    http_status = 413
    openai_type = "invalid_request_error"
    grpc_status = "RESOURCE_EXHAUSTED"


class UnsupportedMediaType(TriptychError):
    """The body's content type is not JSON's."""

    code = "unsupported_media_type"
    http_status = 415
    openai_type = "invalid_request_error"
    grpc_status = "INVALID_ARGUMENT"


class MediaFetchFailed(TriptychError):
    """An image URL could not be turned into bytes."""

    code = "media_fetch_failed"
    http_status = 422
    openai_type = "invalid_request_error"
    grpc_status = "FAILED_PRECONDITION"


class RateLimited(TriptychError):
    """A tenant has used what it may use for now."""

    code = "rate_limit_exceeded"
    http_status = 429
    openai_type = "rate_limit_error"
    grpc_status = "RESOURCE_EXHAUSTED"


class Cancelled(TriptychError):
    """The caller disconnected or cancelled."""

    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class InternalError(TriptychError):
    """A bug, or a broken device. The message reveals nothing about the process."""


class EmbeddingUnavailable(TriptychError):
    """The encoder did not deliver an embedding; another encoder may."""

    code = "embedding_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class WrongImageKey(TriptychError):
    """The image key is not that of the image, its grid and salt at this encoder: the caller forges
    it, or took the encoder for one of another model.
    """

    code = "wrong_image_key"
    http_status = 503
    grpc_status = "INVALID_ARGUMENT"
    retryable = True


class VideoNotHeld(TriptychError):
    """The encoder does not keep the file that a digest names, or no longer: its caller sends it."""

    code = "video_not_held"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"


class Unavailable(TriptychError):
    """A service that is needed does not answer."""

    code = "unavailable"
    http_status = 503
    openai_type = "service_unavailable"
    grpc_status = "UNAVAILABLE"
    retryable = True


class Overloaded(Unavailable):
    """A service is full or draining."""

    code = "overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"


class ProcessLost(Unavailable):
    """The process that had the work ended, broke its connection or fell silent. The work may be the
    cause, so gateways give it to one other process at most.
    """

    code = "process_lost"


class EngineLost(ProcessLost):
    """An engine process ended while it worked on this image or sequence, says its front."""

    code = "engine_lost"


class DeadlineExceeded(TriptychError):
    """The time given to the request is over."""

    code = "deadline_exceeded"
    http_status = 504
    openai_type = "timeout_error"
    grpc_status = "DEADLINE_EXCEEDED"


def _tree(root: type[TriptychError]) -> dict[str, type[TriptychError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[TriptychError]] = _tree(TriptychError) | {"internal_error": InternalError}


def from_code(code: str, message: str, *, param: str | None = None) -> TriptychError:
    """The error that `code` names; an unknown code is an `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, param=param)
