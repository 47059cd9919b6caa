"""gRPC servers, channels, metadata and errors on the wire, for all services.

A servicer adopts the caller's request id and trace with `adopt_metadata`, and ends a failed call
with `abort`. The caller gets the same error back from `error_from_rpc`.
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
# Version of proto/, which both services return as `protocol` of their Describe responses.
PROTOCOL = 1
# An image file has tens of MiB at most, and an embedding is sent in chunks.
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
    # A keepalive's ping has a timeout of its own, with a default of a minute. The longer timeout
    # counts.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_metadata_size", 16 << 10),
    # The services never call each other through a proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Pings that a pause of the network has delayed arrive together, and gRPC sends more pings than
    # those of keepalive. By default the server would close the connection with all its calls.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 4096),
    # Limits of calls that have arrived while the event loop was busy: the units of many videos are
    # thousands at once. Above the first limit gRPC cancels random calls (defaults: 1,000 and
    # 3,000).
    ("grpc.server.max_pending_requests", 1 << 14),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 14),
    # Seconds after which gRPC cancels such a call (default: 30). Deadlines of calls are shorter.
    ("grpc.server_max_unrequested_time_in_server", 3600),
)


def create_channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, *, peer: str = ""
) -> grpc.aio.Channel:
    """Creates a channel, which connects on first use.

    Args:
        address: `host:port` or `unix:path`.
        credentials: credentials that calls show, and by which the server is checked.
        peer: name of the service that listens at the address: `encoder` or `decoder`.
    """
    options = list(CHANNEL_OPTIONS)
    if not credentials:
        return grpc.aio.insecure_channel(address, options=options)
    channel = CredentialedChannel(address, credentials, peer, options)
    return cast("grpc.aio.Channel", channel)


def create_server(check: PeerCheck | None = None) -> grpc.aio.Server:
    """Creates a server without servicers and ports.

    Args:
        check: check of each call's credentials. None accepts every call.
    """
    return grpc.aio.server(
        interceptors=[] if check is None else [check], options=list(_SERVER_OPTIONS)
    )


class Servicer:
    """Base of the servicers. A subclass implements the calls of proto/ as methods of their names.

    Attributes:
        SERVICE: descriptor of the service in proto/.
        READING: names of unary calls that read their message themselves, which counts the bytes
            before gRPC reads them from the connection.
        SERIALIZERS: serializers of responses, by call. Other responses are serialized by protobuf.
    """

    SERVICE: ClassVar[ServiceDescriptor]
    READING: ClassVar[Collection[str]] = ()
    SERIALIZERS: ClassVar[Mapping[str, Callable[[Any], bytes]]] = {}

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the calls that the subclass implements to a server."""
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
    """Returns the metadata of a call on behalf of the current request: its id and its trace.

    Args:
        num_bytes: size of the call's message, for `message_bytes`. 0 leaves the size out.
    """
    pairs = (REQUEST_ID, current_request_id()), (TRACEPARENT, traceparent())
    sizes = ((_MESSAGE_BYTES, str(num_bytes)),) if num_bytes else ()
    return (*(pair for pair in pairs if pair[1]), *sizes)


def message_bytes(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """Returns the size of a call's message that the caller has announced, or else the largest size
    that is possible.
    """
    announced = _text(dict(context.invocation_metadata() or ()).get(_MESSAGE_BYTES))
    return min(int(announced), MAX_MESSAGE_BYTES) if announced.isdecimal() else MAX_MESSAGE_BYTES


def adopt_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Adopts the caller's request id for the running call.

    Returns:
        The caller's `traceparent`, or an empty string.
    """
    metadata = dict(context.invocation_metadata() or ())
    bind_request_id(_text(metadata.get(REQUEST_ID))[:MAX_REQUEST_ID_CHARS])
    return _text(metadata.get(TRACEPARENT))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TriptychError) -> NoReturn:
    """Ends the call with the error's status. The error's code and details are trailing metadata."""
    trailers = [(_CODE, error.code)]
    if error.param:
        trailers.append((_PARAM, error.param))
    if error.retry_after_s is not None:
        trailers.append((_RETRY_AFTER, f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(trailers))
    raise AssertionError("abort never returns")


def error_from_rpc(failure: grpc.aio.AioRpcError, peer: str) -> TriptychError:
    """Returns our error for a failed call. Failures of gRPC itself become retryable errors.

    Args:
        failure: the failed call.
        peer: name of the called service and its address, for the message.
    """
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
    """Reads a number of seconds that a peer has sent. Returns None for anything else."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
