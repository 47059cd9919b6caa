"""Credentials on gRPC channels and servers: certificates and tokens, reloaded while they are used.

A certificate's name says which service it is: `gateway`, `encoder` or `decoder` is one of its DNS
names. Pods are dialled under IP addresses, which no certificate names, so a channel expects the
service's name, whatever the address is.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, cast

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter

from services.common.credentials import Certificates, Credentials

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]
Context = grpc.aio.ServicerContext[Any, Any]

_TOKEN = "authorization"
_SCHEME = "Bearer "
_TRANSPORT = "transport_security_type"
# A connection that has made no call in this time was refused in its handshake.
_HANDSHAKE_S = 5.0
_MAX_PEERS = 4096


def dial(address: str, credentials: Credentials, peer: str, options: Options) -> grpc.aio.Channel:
    """A channel to a service; without credentials, gRPC's own.

    Args:
        address: `host:port` or `unix:path`.
        credentials: of the caller.
        peer: the service's name, `encoder` or `decoder`.
        options: of gRPC.
    """
    if not credentials:
        return grpc.aio.insecure_channel(address, options=list(options))
    return CredentialedChannel(address, credentials, peer, options)


@dataclass(eq=False, slots=True)
class _Dialled:
    """A connection, and the calls that still use it."""

    channel: grpc.aio.Channel
    certificates: Certificates | None
    num_calls: int = 0
    retired: bool = False
    methods: "dict[_Method, Callable[..., Any]]" = field(
        default_factory=dict["_Method", Callable[..., Any]]
    )


class CredentialedChannel(grpc.aio.Channel):
    """A channel that shows a token with each call, and dials again when certificates have changed:
    calls from then on use the new connection, running ones end on the old one.
    """

    def __init__(self, address: str, credentials: Credentials, peer: str, options: Options) -> None:
        self._address = address
        self._credentials = credentials
        self._peer = peer
        self._options = list(options)
        self._closing: set[asyncio.Task[None]] = set()
        self._retired: set[_Dialled] = set()
        self._dialled = self._dial()

    def start(self, method: "_Method", args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - gRPC's
        """Starts a call on the newest connection."""
        dialled = self._newest()
        multicallable = dialled.methods.get(method)
        if multicallable is None:
            multicallable = dialled.methods[method] = method.make(dialled.channel)
        if self._credentials.token is not None:
            token = (_TOKEN, _SCHEME + self._credentials.token.sent)
            kwargs["metadata"] = (*(kwargs.get("metadata") or ()), token)
        call = multicallable(*args, **kwargs)
        dialled.num_calls += 1
        call.add_done_callback(partial(self._ended, dialled))
        return call

    def _dial(self) -> _Dialled:
        watched = self._credentials.certificates
        if watched is None:
            return _Dialled(grpc.aio.insecure_channel(self._address, options=self._options), None)
        found = watched.current()
        shown = grpc.ssl_channel_credentials(found.ca, found.key, found.chain)
        options = [*self._options, ("grpc.ssl_target_name_override", self._peer)]
        return _Dialled(grpc.aio.secure_channel(self._address, shown, options=options), found)

    def _newest(self) -> _Dialled:
        watched = self._credentials.certificates
        if watched is not None and watched.current() is not self._dialled.certificates:
            old, self._dialled = self._dialled, self._dial()
            old.retired = True
            self._retired.add(old)
            self._close_unused(old)
        return self._dialled

    def _ended(self, dialled: _Dialled, _: object) -> None:
        dialled.num_calls -= 1
        self._close_unused(dialled)

    def _close_unused(self, dialled: _Dialled) -> None:
        if dialled in self._retired and not dialled.num_calls:
            self._retired.remove(dialled)
            task = asyncio.ensure_future(dialled.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        retired, self._retired = self._retired, set()
        await asyncio.gather(
            *self._closing, *(each.channel.close(grace) for each in (*retired, self._dialled))
        )

    async def __aenter__(self) -> "CredentialedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._newest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._newest().channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - gRPC's
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return _Method(self, "stream_stream", args, kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class _Method:
    """A method of a channel, on whichever connection is the newest."""

    channel: CredentialedChannel
    kind: str
    args: Any
    kwargs: Any

    def make(self, channel: grpc.aio.Channel) -> Callable[..., Any]:
        return getattr(channel, self.kind)(*self.args, **self.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - gRPC's
        return self.channel.start(self, args, kwargs)


class PeerCheck(grpc.aio.ServerInterceptor):
    """Lets a call pass if its caller has shown what the credentials ask for.

    Args:
        credentials: of this service.
        service: its name, for the metric.
        callers: the services that may call; asked only of certificates.
        registry: for the metric.
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
            "Refused, by reason: calls without a valid token (token) or of a service that may not "
            "call (name), connections without a valid certificate (certificate)",
            ["reason"],
            registry=registry,
        )
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._handshakes: deque[float] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown: Certificates | None = None

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listens; the port. Call in the event loop."""
        watched = self._credentials.certificates
        if watched is None:
            return server.add_insecure_port(address)
        self._loop, self._shown = asyncio.get_running_loop(), watched.current()
        shown = grpc.dynamic_ssl_server_credentials(
            _server_configuration(self._shown), cast("Any", self._changed_configuration), True
        )
        return server.add_secure_port(address, shown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - gRPC's
        token = self._credentials.token
        if token is not None:
            found: Any = dict(handler_call_details.invocation_metadata or ())
            given = found.get(_TOKEN, "")
            is_optional = self._credentials.stage != "required" and _TOKEN not in found
            if is_optional:
                pass
            elif not isinstance(given, str) or not token.accepts(given.removeprefix(_SCHEME)):
                # For any kind of method: it is refused before a message is read.
                return cast("Any", grpc).stream_stream_rpc_method_handler(self._refuse_token)
        handler = await continuation(handler_call_details)
        if handler is None or self._credentials.certificates is None:
            return handler
        return _checked(handler, self._check_certificate)

    async def _refuse_token(self, _: object, context: Context) -> None:
        await self._refuse(context, "token", "the call has no valid token")

    async def _check_certificate(self, context: Context) -> None:
        auth = context.auth_context()
        if self._credentials.stage != "required" and b"ssl" not in auth.get(_TRANSPORT, ()):
            return
        peer = context.peer()
        if peer not in self._peers:
            self._peers[peer] = None
            if self._handshakes:
                self._handshakes.pop()  # this connection's
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        names = {name.decode() for name in auth.get("peer_dns", ())}
        if names.isdisjoint(self._callers):
            shown = ", ".join(sorted(names)) or "no name"
            await self._refuse(context, "name", f"a certificate of {shown} may not call")

    async def _refuse(self, context: Context, reason: str, message: str) -> None:
        self._refused.labels(reason).inc()
        self._log_once(context.peer().rpartition(":")[0], reason, message)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    def _log_once(self, peer: str, reason: str, message: str) -> None:
        if (peer, reason) in self._logged:
            return
        self._logged[peer, reason] = None
        if len(self._logged) > _MAX_PEERS:
            self._logged.popitem(last=False)
        log.warning("refused %s: %s (said once, counted always)", peer, message)

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake, in a thread of gRPC's; None: nothing has changed."""
        assert self._loop is not None and self._credentials.certificates is not None
        # Behind `BothTransports` all connections have one peer, and none can be told from another.
        if not self._loop.is_closed() and self._credentials.stage == "required":
            self._loop.call_soon_threadsafe(self._handshake_started)
        found = self._credentials.certificates.current()
        if found is self._shown:
            return None
        self._shown = found
        return _server_configuration(found)

    def _handshake_started(self) -> None:
        # gRPC tells of no failed handshake. But each connection of ours is opened for a call, so
        # one that makes none was refused.
        loop = asyncio.get_running_loop()
        self._handshakes.append(loop.time())
        loop.call_later(_HANDSHAKE_S, self._count_failed_handshakes)

    def _count_failed_handshakes(self) -> None:
        oldest = asyncio.get_running_loop().time() - 0.99 * _HANDSHAKE_S
        while self._handshakes and self._handshakes[0] <= oldest:
            self._handshakes.popleft()
            self._refused.labels("certificate").inc()
            message = "a TLS handshake failed; GRPC_VERBOSITY=INFO lets gRPC say why"
            self._log_once("a connection", "certificate", message)


def _server_configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
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
