"""All errors that the services send to clients and to each other, with their HTTP statuses.

    TriptychError
    ├── InvalidRequest                 400  the caller must change the request; `param` is the field
    │   ├── ContextLengthExceeded      400
    │   ├── InvalidImage               400
    │   ├── InvalidVideo               400
    │   ├── InvalidGrammar             400
    │   ├── NoTokenAllowed             400
    │   ├── ThreadUnsupported          400
    │   ├── ModelNotFound              404
    │   └── NotFound                   404  the named object does not exist for this tenant
    ├── Unauthorized                   401  the caller has no valid key
    ├── Forbidden                      403  the key or the calling page may not make this request
    ├── PayloadTooLarge                413
    ├── UnsupportedMediaType           415  the body's content type is not JSON
    ├── MediaFetchFailed               422  the file behind a URL could not be fetched
    ├── RateLimited                    429  the tenant is at a limit until `retry_after_s`
    ├── Cancelled                      499  the caller disconnected (no client gets it)
    ├── InternalError                  500
    ├── EmbeddingUnavailable           503  an encoder did not deliver an embedding
    ├── WrongImageKey                  503  an encoder computed another key for the image
    ├── VideoNotHeld                   503  an encoder lacks a video's file; the gateway sends it
    ├── Unavailable                    503  no healthy service is left
    │   ├── AdapterUnavailable         503  a lost decoder had the adapter, and no healthy decoder
    │   ├── Overloaded                 503  a service is full or draining until `retry_after_s`
    │   └── ProcessLost                503  a process ended, perhaps because of the request
    │       └── EngineLost             503  an engine ended, perhaps because of the request
    └── DeadlineExceeded               504

`endpoints` turn an error into an HTTP answer. `transport/rpc.py` turns an error into a gRPC status
and back. The error's code travels in trailing metadata, because gRPC itself ends calls with the
same statuses, so that a status alone does not identify an error.
"""

from typing import ClassVar, Self

BY_CODE: "dict[str, type[TriptychError]]" = {}  # filled by the subclasses


class TriptychError(Exception):
    """An error with a status in HTTP and in gRPC.

    A subclass gives its class attributes as arguments of its class statement, such as
    `class InvalidImage(InvalidRequest, code="invalid_image")`, and inherits all others.

    Attributes:
        code: stable, machine-readable name, which is also sent between the services.
        http_status: status of the HTTP answer.
        openai_type: `error.type` in the body of the HTTP answer, as OpenAI names it.
        grpc_status: name of the `grpc.StatusCode`.
        retryable: True if another instance of the service may succeed with the same request.
        message: text for the caller.
        param: name of the request's field that is at fault. None if no single field is.
        retry_after_s: seconds after which the caller may try again. None if that is unknown.
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
        """Drops traceback and context from an error that will not be raised again, and returns it.

        The frames of a traceback refer to a whole request, and often to the error itself. Only the
        garbage collector would free such a cycle, and with it the request's memory.
        """
        self.__traceback__ = self.__context__ = None
        return self


_CALLER = "invalid_request_error"


class InvalidRequest(
    TriptychError, code="invalid_request", http=400, openai=_CALLER, grpc="INVALID_ARGUMENT"
):
    """The request must be changed before it can be served."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt leaves no token of the model's context for an answer."""

    @classmethod
    def of(cls, num_tokens: int, max_model_len: int, *, param: str | None = None) -> Self:
        """Creates the error for a prompt of `num_tokens` tokens.

        Agent programs look for the words of Anthropic's error or of OpenAI's, and shorten the
        conversation if they find them, so the message has both.
        """
        return cls(
            f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum: the maximum "
            f"context length is {max_model_len} tokens, and an answer has at least one",
            param=param,
        )


class InvalidImage(InvalidRequest, code="invalid_image"):
    """The bytes are not an image of an allowed format and size."""


class InvalidVideo(InvalidRequest, code="invalid_video"):
    """The bytes are not a video of an allowed container and size, or cannot be decoded."""


class InvalidGrammar(InvalidRequest, code="invalid_grammar"):
    """The schema, regular expression or grammar of an answer cannot be enforced."""


class NoTokenAllowed(InvalidRequest, code="no_token_allowed"):
    """The constraints of the request (`allowed_token_ids`, `bad_words`, a grammar, `min_tokens`)
    together forbid every token that could come next in an answer.
    """


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """The request names earlier messages of a thread by an id, but this server stores no threads.
    Anthropic's clients react to the error's code by sending all messages.
    """


class ModelNotFound(InvalidRequest, code="model_not_found", http=404, grpc="NOT_FOUND"):
    """No model of the requested name is served."""


class NotFound(InvalidRequest, code="not_found", http=404, grpc="NOT_FOUND"):
    """The object that the request names is not stored, or belongs to another tenant."""


class Unauthorized(
    TriptychError,
    code="invalid_api_key",
    http=401,
    openai="authentication_error",
    grpc="UNAUTHENTICATED",
):
    """The request needs a valid API key and has none."""


class Forbidden(
    TriptychError, code="forbidden", http=403, openai="permission_error", grpc="PERMISSION_DENIED"
):
    """The caller's key, or the web page that calls, may not make this request."""


class PayloadTooLarge(
    TriptychError, code="payload_too_large", http=413, openai=_CALLER, grpc="RESOURCE_EXHAUSTED"
):
    """The request body is larger than the limit."""


class UnsupportedMediaType(
    TriptychError, code="unsupported_media_type", http=415, openai=_CALLER, grpc="INVALID_ARGUMENT"
):
    """The content type of the body is not that of JSON."""


class MediaFetchFailed(
    TriptychError, code="media_fetch_failed", http=422, openai=_CALLER, grpc="FAILED_PRECONDITION"
):
    """The file behind a URL could not be fetched."""


class RateLimited(
    TriptychError,
    code="rate_limit_exceeded",
    http=429,
    openai="rate_limit_error",
    grpc="RESOURCE_EXHAUSTED",
):
    """The tenant has reached one of its limits."""


class Cancelled(TriptychError, code="cancelled", http=499, grpc="CANCELLED"):
    """The caller disconnected or cancelled."""


class InternalError(TriptychError, code="internal_error"):
    """A bug or a broken device. The message for the caller reveals no internals of the process."""


class EmbeddingUnavailable(
    TriptychError, code="embedding_unavailable", http=503, grpc="UNAVAILABLE", retry=True
):
    """The encoder did not deliver an embedding. Another encoder may."""


class WrongImageKey(
    TriptychError, code="wrong_image_key", http=503, grpc="INVALID_ARGUMENT", retry=True
):
    """The image key of a call is not the key that the encoder computes from the call's image, grid
    and salt. The caller forges keys, or expects another model on the encoder.
    """


class VideoNotHeld(TriptychError, code="video_not_held", http=503, grpc="FAILED_PRECONDITION"):
    """The encoder does not have the video file that a digest names, because the file never arrived
    or was dropped. The gateway sends the file again.
    """


class Unavailable(
    TriptychError,
    code="unavailable",
    http=503,
    openai="service_unavailable",
    grpc="UNAVAILABLE",
    retry=True,
):
    """A service that the request needs does not answer."""


class AdapterUnavailable(Unavailable):
    """No healthy decoder has the adapter that the request names, and a decoder that had the adapter
    was lost and may come back. Clients get the code of `Unavailable`.
    """


class Overloaded(Unavailable, code="overloaded", grpc="RESOURCE_EXHAUSTED"):
    """A service is full or draining."""


class ProcessLost(Unavailable, code="process_lost"):
    """A process that worked on the request ended, closed its connection or stopped answering. The
    request may be the cause, so a gateway tries it once more at most.
    """


class EngineLost(ProcessLost, code="engine_lost"):
    """An engine process ended while it worked on this image or sequence, as its front reports."""


class DeadlineExceeded(
    TriptychError,
    code="deadline_exceeded",
    http=504,
    openai="timeout_error",
    grpc="DEADLINE_EXCEEDED",
):
    """The request was not finished within its time limit."""


def from_code(code: str, message: str, *, param: str | None = None) -> TriptychError:
    """Creates the error with a code. An unknown code becomes an `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, param=param)
