"""Credentials on gRPC channels and servers: certificates and tokens, reloaded while they are used.

A certificate names its service: `gateway`, `encoder` or `decoder` is one of its DNS names. Pods are
dialled under IP addresses, which no certificate names, so a channel expects the service's name,
whatever the address is.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import lru_cache, partial, partialmethod
from inspect import isasyncgenfunction
from typing import Any, cast

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter

from services.common.security.credentials import Certificates, Credentials

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_TOKEN = "authorization"
_SCHEME = "Bearer "
_TRANSPORT = "transport_security_type"
_MAX_LOGGED = 4096


class CredentialedChannel:
    """A channel that sends a token with each call, and reconnects when the certificates have
    changed.

    Calls after a change use the new connection. The old connection is closed with its last call.
    The class is not an interceptor of gRPC, because an interceptor wraps each message of a stream
    and cannot change certificates.

    Args:
        address: `host:port` or `unix:path`.
        credentials: credentials that calls show, and by which the server is checked.
        peer: name of the service that listens at the address.
        options: channel options of gRPC.
    """

    def __init__(
        self, address: str, credentials: Credentials, peer: str, options: list[tuple[str, Any]]
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._peer = peer
        self._options = options
        self._dial()

    async def __aenter__(self) -> "CredentialedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _method(self, kind: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - gRPC's
        """Returns a method's multi-callable, whose calls use the newest connection."""

        def start(*call: Any, metadata: Any = None, **options: Any) -> Any:  # noqa: ANN401 - gRPC's
            watched = self._credentials.certificates
            if watched is not None and watched.current() is not self._shown:
                self._dial()
            channel = self._channel
            if start not in self._methods:
                self._methods[start] = getattr(channel, kind)(*args, **kwargs)
            if self._credentials.token is not None:
                token = _TOKEN, _SCHEME + self._credentials.token.sent
                metadata = *(metadata or ()), token
            running = self._methods[start](*call, metadata=metadata, **options)
            # A channel without references closes itself, so a running call refers to its channel.
            running.add_done_callback(partial(_keep, channel))
            return running

        return start

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def _dial(self) -> None:
        self._methods: dict[object, Any] = {}  # multi-callables of the newest connection
        self._shown: Certificates | None = None
        if self._credentials.certificates is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
            return
        self._shown = found = self._credentials.certificates.current()
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.chain)
        options = [*self._options, ("grpc.ssl_target_name_override", self._peer)]
        self._channel = grpc.aio.secure_channel(self._address, credentials, options=options)


class PeerCheck(grpc.aio.ServerInterceptor):
    """Refuses calls whose callers do not show the credentials that are required.

    Args:
        credentials: credentials of this service.
        service: name of this service, which is the prefix of the metric.
        callers: names of the services that may call, which are compared with certificates.
        registry: registry of the metric of refused calls. None leaves the metric out.
    """

    def __init__(
        self,
        credentials: Credentials,
        service: str,
        callers: Collection[str],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._credentials = credentials
        self._callers = callers
        self._refused = Counter(
            f"triptych_{service}_peers_refused",
            "Refused calls, by reason: without a valid token (token), of a service that may not "
            "call (name)",
            ["reason"],
            registry=registry,
        )
        self._log_once = lru_cache(_MAX_LOGGED)(log.warning)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Makes the server listen at an address and returns the port. gRPC itself refuses
        connections without a valid certificate.
        """
        watched = self._credentials.certificates
        if watched is None:
            return server.add_insecure_port(address)
        shown = watched.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Returns the certificates if they have changed, else None. gRPC calls it before each
            handshake, in a thread of its own.
            """
            nonlocal shown
            before, shown = shown, watched.current()
            return None if shown is before else _configuration(shown)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(shown), cast("Any", changed), True
        )
        return server.add_secure_port(address, credentials)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - gRPC's
        metadata: Any = dict(handler_call_details.invocation_metadata or ())
        if not self._accepts(metadata.get(_TOKEN)):
            # A handler of this kind can refuse any method, before a message is read.
            return cast("Any", grpc).stream_stream_rpc_method_handler(self._refuse_token)
        handler = await continuation(handler_call_details)
        if handler is None or self._credentials.certificates is None:
            return handler
        return self._checked(handler)

    def _accepts(self, given: str | bytes | None) -> bool:
        token = self._credentials.token
        if token is None or (given is None and self._credentials.stage != "required"):
            return True
        return isinstance(given, str) and token.accepts(given.removeprefix(_SCHEME))

    async def _refuse_token(self, _: object, context: Context) -> None:
        await self._refuse(context, "token", "the call has no valid token")

    async def _check_name(self, context: Context) -> None:
        auth = context.auth_context()
        if self._credentials.stage != "required" and b"ssl" not in auth.get(_TRANSPORT, ()):
            return
        names = {name.decode() for name in auth.get("peer_dns", ())}
        if names.isdisjoint(self._callers):
            shown = ", ".join(sorted(names)) or "no name"
            await self._refuse(context, "name", f"a certificate of {shown} may not call")

    def _checked(self, handler: Any) -> Any:  # noqa: ANN401 - gRPC's
        """Returns a handler that first checks the caller's name."""
        kind = f"{'stream' if handler.request_streaming else 'unary'}_" + (
            "stream" if handler.response_streaming else "unary"
        )
        behaviour = getattr(handler, kind)
        if isasyncgenfunction(behaviour):

            async def stream(request: object, context: Context) -> AsyncIterator[object]:
                await self._check_name(context)
                async for message in behaviour(request, context):
                    yield message

            return handler._replace(**{kind: stream})

        async def call(request: object, context: Context) -> object:
            await self._check_name(context)
            return await behaviour(request, context)

        return handler._replace(**{kind: call})

    async def _refuse(self, context: Context, reason: str, message: str) -> None:
        self._refused.labels(reason).inc()
        host = context.peer().rpartition(":")[0]
        self._log_once("refused a call from %s: %s (logged once, counted always)", host, message)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def _keep(_: grpc.aio.Channel, __: object) -> None:
    """Does nothing. A call with this callback refers to its channel until the call ends."""


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], found.ca)
