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
    ├── Unauthorized                   401  the caller has no valid key
    ├── Forbidden                      403  its key, or the page that it is, may not ask this
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

BY_CODE: "dict[str, type[TriptychError]]" = {}


class TriptychError(Exception):
    """An error with a status in every protocol. A subclass names what differs from its parent's.

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

    def __init_subclass__(
        cls, code: str = "", http: int = 0, openai: str = "", grpc: str = "", retry: bool = False
    ) -> None:
        if code:
            BY_CODE[code] = cls
        cls.code, cls.http_status = code or cls.code, http or cls.http_status
        cls.openai_type, cls.grpc_status = openai or cls.openai_type, grpc or cls.grpc_status
        cls.retryable = retry or cls.retryable

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


_CALLERS = "invalid_request_error"


class InvalidRequest(
    TriptychError, code="invalid_request", http=400, openai=_CALLERS, grpc="INVALID_ARGUMENT"
):
    """The request must be changed before it can be served."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Prompt and completion do not fit in the model's context."""


class InvalidImage(InvalidRequest, code="invalid_image"):
    """Bytes that are not an image of an allowed format and size."""


class InvalidVideo(InvalidRequest, code="invalid_video"):
    """Bytes that are not a video of an allowed container and size, or cannot be decoded."""


class InvalidGrammar(InvalidRequest, code="invalid_grammar"):
    """A schema, expression or grammar that an answer cannot be held to."""


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """Anthropic's clients send the whole conversation then."""


class ModelNotFound(InvalidRequest, code="model_not_found", http=404, grpc="NOT_FOUND"):
    """No model of that name is served here."""


class NotFound(InvalidRequest, code="not_found", http=404, grpc="NOT_FOUND"):
    """What the request names is not kept here, or belongs to another tenant."""


class Unauthorized(
    TriptychError,
    code="invalid_api_key", http=401, openai="authentication_error", grpc="UNAUTHENTICATED",
):  # fmt: skip
    """A key is needed, and none that is valid was given."""


class Forbidden(
    TriptychError, code="forbidden", http=403, openai="permission_error", grpc="PERMISSION_DENIED"
):
    """The caller is known, or is a page of another site, and may not ask this."""


class PayloadTooLarge(
    TriptychError, code="payload_too_large", http=413, openai=_CALLERS, grpc="RESOURCE_EXHAUSTED"
):
    """The request body is over the limit."""


class UnsupportedMediaType(
    TriptychError, code="unsupported_media_type", http=415, openai=_CALLERS, grpc="INVALID_ARGUMENT"
):
    """The body's content type is not JSON's."""


class MediaFetchFailed(
    TriptychError, code="media_fetch_failed", http=422, openai=_CALLERS, grpc="FAILED_PRECONDITION"
):
    """An image URL could not be turned into bytes."""


class RateLimited(
    TriptychError,
    code="rate_limit_exceeded", http=429, openai="rate_limit_error", grpc="RESOURCE_EXHAUSTED",
):  # fmt: skip
    """A tenant has used what it may use for now."""


class Cancelled(TriptychError, code="cancelled", http=499, grpc="CANCELLED"):
    """The caller disconnected or cancelled."""


class InternalError(TriptychError, code="internal_error"):
    """A bug, or a broken device. The message reveals nothing about the process."""


class EmbeddingUnavailable(
    TriptychError, code="embedding_unavailable", http=503, grpc="UNAVAILABLE", retry=True
):
    """The encoder did not deliver an embedding; another encoder may."""


class WrongImageKey(
    TriptychError, code="wrong_image_key", http=503, grpc="INVALID_ARGUMENT", retry=True
):
    """The image key is not that of the image, its grid and salt at this encoder: the caller forges
    it, or took the encoder for one of another model.
    """


class VideoNotHeld(TriptychError, code="video_not_held", http=503, grpc="FAILED_PRECONDITION"):
    """The encoder does not keep the file that a digest names, or no longer: its caller sends it."""


class Unavailable(
    TriptychError,
    code="unavailable", http=503, openai="service_unavailable", grpc="UNAVAILABLE", retry=True,
):  # fmt: skip
    """A service that is needed does not answer."""


class Overloaded(Unavailable, code="overloaded", grpc="RESOURCE_EXHAUSTED"):
    """A service is full or draining."""


class ProcessLost(Unavailable, code="process_lost"):
    """The process that had the work ended, broke its connection or fell silent. The work may be the
    cause, so gateways give it to one other process at most.
    """


class EngineLost(ProcessLost, code="engine_lost"):
    """An engine process ended while it worked on this image or sequence, says its front."""


class DeadlineExceeded(
    TriptychError,
    code="deadline_exceeded", http=504, openai="timeout_error", grpc="DEADLINE_EXCEEDED",
):  # fmt: skip
    """The time given to the request is over."""


def from_code(code: str, message: str, *, param: str | None = None) -> TriptychError:
    """The error that `code` names; an unknown code is an `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, param=param)
