"""Credentials on gRPC channels and servers: certificates and tokens, reloaded while they are used.

A certificate's name says which service it is: `gateway`, `encoder` or `decoder` is one of its DNS
names. Pods are dialled under IP addresses, which no certificate names, so a channel expects the
service's name, whatever the address is.
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
    """A channel that shows a token with each call, and dials again when certificates have changed:
    calls from then on use the new connection. The old one is closed with the last call on it.

    Not an interceptor of gRPC's: that wraps each message of a stream, and changes no certificate.
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

    def _method(self, kind: str, *args: object, **kwargs: object) -> Callable[..., Any]:
        """A method, on whichever connection is the newest."""

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
            # A channel that nobody refers to closes itself.
            running.add_done_callback(partial(_keep, channel))
            return running

        return start

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def _dial(self) -> None:
        self._methods: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._shown: Certificates | None = None
        if self._credentials.certificates is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
            return
        self._shown = found = self._credentials.certificates.current()
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.chain)
        options = [*self._options, ("grpc.ssl_target_name_override", self._peer)]
        self._channel = grpc.aio.secure_channel(self._address, credentials, options=options)


class PeerCheck(grpc.aio.ServerInterceptor):
    """Lets a call pass if its caller has shown what the credentials ask for.

    Args:
        callers: the services that may call; asked only of certificates.
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
            f"{service}_peers_refused",
            "Refused calls, by reason: without a valid token (token), of a service that may not "
            "call (name)",
            ["reason"],
            registry=registry,
        )
        self._log_once = lru_cache(_MAX_LOGGED)(log.warning)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listens; the port. gRPC itself refuses connections without a valid certificate."""
        watched = self._credentials.certificates
        if watched is None:
            return server.add_insecure_port(address)
        shown = watched.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called before each handshake, in a thread of gRPC's; None: nothing has changed."""
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
            # For any kind of method: it is refused before a message is read.
            return cast("Any", grpc).stream_stream_rpc_method_handler(self._refuse_token)
        handler = await continuation(handler_call_details)
        if handler is None or self._credentials.certificates is None:
            return handler
        return _checked(handler, self._check_name)

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

    async def _refuse(self, context: Context, reason: str, message: str) -> None:
        self._refused.labels(reason).inc()
        host = context.peer().rpartition(":")[0]
        self._log_once("refused %s: %s (said once, counted always)", host, message)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def _keep(_: grpc.aio.Channel, __: object) -> None:
    """Called when a call has ended, until when it refers to its channel."""


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], found.ca)


def _checked(handler: Any, check: Callable[[Context], Awaitable[None]]) -> Any:  # noqa: ANN401
    """The handler with a check of its caller before it."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_" + (
        "stream" if handler.response_streaming else "unary"
    )
    behaviour = getattr(handler, kind)
    if isasyncgenfunction(behaviour):

        async def stream(request: object, context: Context) -> AsyncIterator[object]:
            await check(context)
            async for message in behaviour(request, context):
                yield message

        return handler._replace(**{kind: stream})

    async def call(request: object, context: Context) -> object:
        await check(context)
        return await behaviour(request, context)

    return handler._replace(**{kind: call})
