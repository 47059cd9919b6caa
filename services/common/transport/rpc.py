"""gRPC construction shared by the services: servers, channels, metadata, and errors on the wire.

A servicer adopts the caller's request id and trace, and ends a failed call with `abort`; the caller
gets the same error back from `error_from_rpc`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ProcessLost,
    TriptychError,
    Unavailable,
    from_code,
)
from services.common.security.credentials import NO_CREDENTIALS, Credentials
from services.common.security.rpc_credentials import CredentialedChannel, PeerCheck
from services.common.spans import TRACEPARENT, traceparent
from services.common.telemetry import bind_request_id, current_request_id

Server = grpc.aio.Server
# Of proto/, as `DescribeEncoderResponse.protocol` says.
PROTOCOL = 1
# An encoded image is at most tens of MiB and an embedding travels in chunks.
MAX_MESSAGE_BYTES = 64 << 20
_CODE = "triptych-code"
_PARAM = "triptych-param"
_RETRY_AFTER = "triptych-retry-after-s"
_MESSAGE_BYTES = "triptych-message-bytes"
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_CHARS = 256
_ONE_OR_MANY = "unary", "stream"

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The ping of a keepalive has a time-out of its own: the longer of both counts, and this one's
    # default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_metadata_size", 16 << 10),
    # The services call each other, never through a proxy of the environment's.
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Pings that a pause of the network has held up arrive together, and gRPC sends some besides
    # those of keepalive: a server that minds them ends the connection with all calls on it.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 4096),
    # Calls that have come while the loop was busy: the units of many videos are thousands at once.
    # Above the first limit gRPC cancels some by lot (its own are 1,000 and 3,000).
    ("grpc.server.max_pending_requests", 1 << 14),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 14),
)


def create_channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, *, peer: str = ""
) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:path`, connected on first use.

    Args:
        credentials: that calls show, and that the server is checked against.
        peer: the service that listens there: `encoder` or `decoder`.
    """
    options = list(CHANNEL_OPTIONS)
    if not credentials:
        return grpc.aio.insecure_channel(address, options=options)
    channel = CredentialedChannel(address, credentials, peer, options)
    return cast("grpc.aio.Channel", channel)


def create_server(check: PeerCheck | None = None) -> grpc.aio.Server:
    """A server without servicers or ports; `check` looks at each call."""
    return grpc.aio.server(
        interceptors=[] if check is None else [check], options=list(_SERVER_OPTIONS)
    )


class Servicer:
    """The calls of a service of proto/, by their names.

    Attributes:
        SERVICE: which one.
        READING: calls that read their one message themselves, so that its bytes are counted before
            gRPC takes them from the connection.
        SERIALIZERS: of answers, by call, where protobuf's would not do.
    """

    SERVICE: ClassVar[ServiceDescriptor]
    READING: ClassVar[Collection[str]] = ()
    SERIALIZERS: ClassVar[Mapping[str, Callable[[Any], bytes]]] = {}

    def register(self, server: grpc.aio.Server) -> None:
        """Serves the calls that there are."""
        handlers: dict[str, Any] = {}
        for method in self.SERVICE.methods:
            if (call := getattr(self, method.name, None)) is None:
                continue
            request, answer = map(GetMessageClass, (method.input_type, method.output_type))
            many = method.client_streaming or method.name in self.READING
            kind = f"{_ONE_OR_MANY[many]}_{_ONE_OR_MANY[method.server_streaming]}"
            serialize = self.SERIALIZERS.get(method.name, answer.SerializeToString)
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            handlers[method.name] = make(call, request.FromString, serialize)
        cast("Any", server).add_registered_method_handlers(self.SERVICE.full_name, handlers)


def outgoing_metadata(num_bytes: int = 0) -> tuple[tuple[str, str], ...]:
    """Metadata for a call made on behalf of the current request: its id and its trace.

    Args:
        num_bytes: of the call's message, for `message_bytes`; 0: they are not said.
    """
    pairs = (REQUEST_ID, current_request_id()), (TRACEPARENT, traceparent())
    sizes = ((_MESSAGE_BYTES, str(num_bytes)),) if num_bytes else ()
    return (*(pair for pair in pairs if pair[1]), *sizes)


def message_bytes(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """Size of a call's message as its caller says it; the largest possible where it does not."""
    said = _text(dict(context.invocation_metadata() or ()).get(_MESSAGE_BYTES))
    return min(int(said), MAX_MESSAGE_BYTES) if said.isdecimal() else MAX_MESSAGE_BYTES


def adopt_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Makes the caller's request id that of the running call.

    Returns:
        The caller's `traceparent`, or an empty string.
    """
    metadata = dict(context.invocation_metadata() or ())
    bind_request_id(_text(metadata.get(REQUEST_ID))[:MAX_REQUEST_ID_CHARS])
    return _text(metadata.get(TRACEPARENT))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TriptychError) -> NoReturn:
    """Ends the call with the error's status; its code and details are trailing metadata."""
    trailers = [(_CODE, error.code)]
    if error.param:
        trailers.append((_PARAM, error.param))
    if error.retry_after_s is not None:
        trailers.append((_RETRY_AFTER, f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(trailers))
    raise AssertionError("abort returns never")


def error_from_rpc(failure: grpc.aio.AioRpcError, peer: str) -> TriptychError:
    """Our error for a failed call to `peer`; gRPC's own failures become retryable ones."""
    trailers = dict(failure.trailing_metadata() or ())
    code = trailers.get(_CODE)
    if isinstance(code, str):
        param = trailers.get(_PARAM)
        error = from_code(
            code, failure.details() or code, param=param if isinstance(param, str) else None
        )
        error.retry_after_s = _seconds(trailers.get(_RETRY_AFTER))
        return error
    match failure.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return Cancelled(f"the call to {peer} was cancelled")
        case grpc.StatusCode.UNAVAILABLE:
            if "failed to connect" in (failure.details() or "").lower():  # nothing was sent
                return Unavailable(f"{peer} is not reachable")
            return ProcessLost(f"{peer} was lost during the call")
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unavailable(f"{peer} does not accept this service's credentials")
        case status:
            return InternalError(f"{peer} failed: {status.name}")


def _text(value: str | bytes | None) -> str:
    return value if isinstance(value, str) else ""


def _seconds(text: str | bytes | None) -> float | None:
    """A peer's number; whatever else it sent counts as nothing."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
