"""Pods: name resolution, health checks, and the choice of the pod for a piece of work.

An address is `host:port` or `unix:path`, which is used literally, or `dns:///name:port`, which is
resolved every few seconds into one pod per IP address. The other services dial a pod under the same
address. `EncoderPool` and `DecoderPool` are the subclasses of `Pool` that know the services. A
failed look-up keeps the known pods. The calls to a pod that cannot be reached fail.

A name loses a pod that terminates or that misses some readiness probes, and neither may break the
pod's running work. So a pod without a name gets no new work, and is closed when its work has ended.
"""

import asyncio
import enum
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from blake3 import blake3
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.common.errors import TriptychError
from services.common.security.credentials import NO_CREDENTIALS, Credentials
from services.common.transport.rpc import create_channel, error_from_rpc
from services.gateway.clients.served_model import ServedModel
from services.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)
# A method of a pod's service with one message in each direction.
Method: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT]

_DNS = "dns:"
# An unhealthy pod is checked soon, so that it gets work soon after it recovers, and then less and
# less often, because loading a model takes minutes.
_UNHEALTHY_PERIOD_S = 0.05
_UNHEALTHY_GROWTH = 1.2
_ASK_TIMEOUT_S = 2.0
# Consecutive checks without an answer after which a pod's calls fail.
_MAX_SILENT_CHECKS = 2
# Work that a pod may have before equal keys go to another pod: this multiple of the mean, and this
# many more pieces.
_SLACK = 1.25
_HEADROOM = 8
# Parts of gRPC's error messages about a certificate that is not accepted.
_WRONG_CERTIFICATE = ("handshake failed", "verification check failed")


class PodState(enum.Enum):
    """The result of a health check."""

    SERVING = "serving"
    DRAINING = "draining"  # answers, and takes no new work
    SILENT = "silent"  # gives no answer in time
    UNREACHABLE = "unreachable"  # accepts no connection
    REFUSED = "refused"  # does not accept the gateway's credentials


_STATES = {
    grpc.StatusCode.UNAUTHENTICATED: PodState.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: PodState.SERVING,  # reachable, without a health service
    grpc.StatusCode.DEADLINE_EXCEEDED: PodState.SILENT,
    grpc.StatusCode.UNAVAILABLE: PodState.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class PodTimes:
    """Periods and timeouts of look-ups and health checks, in seconds.

    Attributes:
        resolve_s: period of the look-ups of names.
        resolve_empty_s: period of the look-ups while no pod accepts work.
        check_s: period of the health checks of a healthy pod.
        check_timeout_s: timeout of a health check.
        absent_s: time from the gateway's start after which services that have not answered are
            assumed to be scaled to zero.
        restart_s: time in which a lost decoder restarts and has the adapters of its settings again.
            The manifests give a decoder as much time for its start.
    """

    resolve_s: float = 5.0
    resolve_empty_s: float = 1.0
    check_s: float = 1.0
    check_timeout_s: float = 2.0
    absent_s: float = 10.0
    restart_s: float = 900.0


class PodNames:
    """Resolves the addresses of the settings into the addresses of pods."""

    async def resolve(self, address: str) -> set[str]:
        """Returns the addresses of the pods behind an address.

        Raises:
            OSError: the name has no address.
            ValueError: the address has no port.
        """
        if not address.startswith(_DNS):
            return {address}
        host, _, port = address.removeprefix(_DNS).removeprefix("///").rpartition(":")
        found = await self.look_up(host, int(port))
        return {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in found}

    async def look_up(self, host: str, port: int) -> list[str]:
        """Returns the IP addresses of a name. Tests override it.

        Raises:
            OSError: the name has no address.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(entry[4][0]) for entry in found]


class PodDialer:
    """Opens the gateway's channels to pods.

    Args:
        credentials: credentials that calls show, and by which pods are checked.
        metrics: metrics that count refused credentials. None counts nothing.

    Attributes:
        times: periods and timeouts of look-ups and health checks.
        names: resolver of the pods' names.
    """

    def __init__(
        self,
        credentials: Credentials = NO_CREDENTIALS,
        metrics: GatewayMetrics | None = None,
        times: PodTimes | None = None,
        names: PodNames | None = None,
    ) -> None:
        self._credentials = credentials
        self._metrics = metrics
        self.times = times or PodTimes()
        self.names = names or PodNames()

    def dial(self, address: str, service: str) -> grpc.aio.Channel:
        """Returns a channel to the address of an `encoder` or a `decoder`, which connects on first
        use.
        """
        return create_channel(address, self._credentials, peer=service)

    def count_refusal(self, reason: str) -> None:
        """Counts a health check that failed because of a `token` or a `certificate`."""
        if self._metrics is not None:
            self._metrics.peers_refused.labels(reason).inc()


class Pod:
    """An instance of a service, which accepts work at an address.

    Attributes:
        service: name of the service, `encoder` or `decoder`.
        address: host:port, or unix:path.
        served: model that the pod has to serve.
        healthy: True if the pod accepts work.
        unlisted: True if the pod's name no longer resolves to the pod.
        num_in_flight: number of running calls or sequences from this gateway.
        channel: channel to the pod.
    """

    service: ClassVar[str] = ""

    def __init__(self, address: str, served: ServedModel, dialer: PodDialer) -> None:
        self.address = address
        self.served = served
        self.healthy = False
        self.unlisted = False
        self.num_in_flight = 0
        self._dialer = dialer
        self._refusal = ""
        self.channel = dialer.dial(address, self.service)
        self._check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def unary(
        self, method: str, request: type[RequestT], answer: type[AnswerT]
    ) -> Method[RequestT, AnswerT]:
        """Returns a method of the pod's service that has one message in each direction."""
        return self.channel.unary_unary(
            f"/triptych.v1.{self.service.capitalize()}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )

    async def ask(
        self,
        method: Method[RequestT, AnswerT],
        request: RequestT,
        timeout_s: float = _ASK_TIMEOUT_S,
    ) -> AnswerT:
        """Calls a method that answers quickly, unless another timeout is given.

        Raises:
            TriptychError: the pod fails or does not answer.
        """
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"the {self.service}") from None

    @property
    def misfit(self) -> str:
        """Reason why the pod cannot serve the gateway's model. Empty if it can."""
        return ""

    @property
    def connected(self) -> bool:
        """True if `connect` need not be called after a health check. Always false for pods without
        a stream, because another pod may have started under the address.
        """
        return False

    async def connect(self) -> None:
        """Calls the pod's `Describe` method, and opens the stream of a decoder.

        Raises:
            TriptychError: the pod fails or does not answer.
        """
        raise NotImplementedError

    async def disconnect(self, reason: str) -> None:
        """Fails all calls to this pod, so that the requests can be tried on another pod."""
        raise NotImplementedError

    async def close(self) -> None:
        """Fails all calls and closes the connection."""
        await self.disconnect("the gateway closed the connection")
        await self.channel.close()

    async def check(self) -> PodState:
        """Checks the pod's health."""
        try:
            answer = await self._check(
                health_pb2.HealthCheckRequest(),
                timeout=self._dialer.times.check_timeout_s,
                wait_for_ready=False,
            )
        except grpc.aio.AioRpcError as failure:
            self._look_for_refusal(failure)
            return _STATES.get(failure.code(), PodState.DRAINING)
        self._refusal = ""
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return PodState.SERVING if serving else PodState.DRAINING

    def _look_for_refusal(self, failure: grpc.aio.AioRpcError) -> None:
        """Counts a check that failed because of credentials, and logs the first such check."""
        details = failure.details() or ""
        if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
            reason = "token"
        elif any(mark in details.lower() for mark in _WRONG_CERTIFICATE):
            reason = "certificate"
        else:
            return
        self._dialer.count_refusal(reason)
        if reason != self._refusal:
            self._refusal = reason
            log.warning("%s gets no calls: %s", self.address, details)


PodT = TypeVar("PodT", bound=Pod)


class Loaded(Protocol):
    """A pod with an address, and the number of pieces of this gateway's work there."""

    address: str
    num_in_flight: int


LoadedT = TypeVar("LoadedT", bound=Loaded)


def pick(pods: Sequence[LoadedT], key: bytes) -> LoadedT:
    """Returns the pod for a key by rendezvous hashing with bounded loads: equal keys get the same
    pod, unless the pod has too much work. Then the next pod in the key's order gets the key.
    """
    return min(within_bound(pods), key=lambda pod: rank(pod.address, key))


def within_bound(pods: Sequence[LoadedT]) -> Sequence[LoadedT]:
    """Returns the pods that do not have much more work than the mean. At least one pod does not."""
    bound = sum(pod.num_in_flight for pod in pods) / len(pods) * _SLACK + _HEADROOM
    return [pod for pod in pods if pod.num_in_flight <= bound]


def rank(address: str, key: bytes) -> tuple[bytes, bytes]:
    """Returns the sort key of a pod's address for a key. Hosts are compared first, so that an
    encoder and a decoder of the same host are chosen together.
    """
    return _hash(host_of(address), key), _hash(address, key)


def host_of(address: str) -> str:
    """Returns the host of a pod's address, for comparison."""
    return address.rpartition(":")[0]


def _hash(name: str, key: bytes) -> bytes:
    return blake3(name.encode() + key).digest(8)


class Pool(Generic[PodT]):
    """The pods behind some addresses. One task resolves the names, and one task per pod checks the
    pod's health.

    Args:
        addresses: addresses of the settings.
        served: model that all pods have to serve.

    Attributes:
        pod: class of the pods.
    """

    pod: type[PodT]

    def __init__(self, addresses: Sequence[str], served: ServedModel, dialer: PodDialer) -> None:
        self._addresses = addresses
        self._served = served
        self._dialer = dialer
        self._pods: dict[str, tuple[PodT, asyncio.Task[None]]] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._unresolved: set[str] = set()

    async def start(self) -> None:
        """Starts the tasks. Does not wait for any pod or look-up."""
        if any(address.startswith(_DNS) for address in self._addresses):
            self._resolver = asyncio.create_task(self._watch_names())
        else:
            await self._update()

    async def close(self) -> None:
        """Ends the tasks and closes the connections to all pods."""
        if self._resolver:
            await _end(self._resolver)
        for address in list(self._pods):
            await self._remove(address)

    @property
    def pods(self) -> list[PodT]:
        """All pods that are known, healthy or not."""
        return [pod for pod, _ in self._pods.values()]

    @property
    def served(self) -> ServedModel:
        """Model that all pods have to serve."""
        return self._served

    def healthy(self) -> list[PodT]:
        """Returns the pods that accept work and serve the model."""
        return [pod for pod in self.serving() if not pod.misfit]

    def serving(self) -> list[PodT]:
        """Returns the pods that would accept work, whichever model they serve."""
        pods = list(self._pods.values())  # The list is copied, because a thread reads metrics.
        return [pod for pod, _ in pods if pod.healthy and not pod.unlisted]

    def fitting(self) -> list[PodT]:
        """Returns the pods that serve the model. Unhealthy pods count if they served the model when
        they were last connected.
        """
        pods = list(self._pods.values())
        return [pod for pod, _ in pods if not pod.unlisted and not pod.misfit]

    def misfits(self) -> dict[str, str]:
        """Returns the addresses of pods that serve another model, each with the difference."""
        return {pod.address: pod.misfit for pod in self.serving() if pod.misfit}

    async def _watch_names(self) -> None:
        while True:
            await self._update()
            times = self._dialer.times
            period_s = times.resolve_s if self.healthy() else times.resolve_empty_s
            await asyncio.sleep(min(period_s, times.resolve_s))

    async def _update(self) -> None:
        wanted: set[str] = set()
        for address in self._addresses:
            try:
                wanted |= await self._dialer.names.resolve(address)
                self._unresolved.discard(address)
            except (OSError, ValueError) as error:
                # The known pods are kept: a failed look-up must not empty the pool.
                if address not in self._unresolved:
                    log.warning("cannot resolve %s: %s", address, error)
                self._unresolved.add(address)
                wanted |= set(self._pods)
        for address in wanted - set(self._pods):
            pod = self.pod(address, self._served, self._dialer)
            self._pods[address] = (pod, asyncio.create_task(_watch(pod, self._dialer.times)))
        for address, (pod, _) in list(self._pods.items()):
            pod.unlisted = address not in wanted
            if pod.unlisted and not pod.num_in_flight:
                await self._remove(address)

    async def _remove(self, address: str) -> None:
        pod, task = self._pods[address]
        pod.healthy = False
        await _end(task)
        await pod.close()
        del self._pods[address]  # This is last: `close` finds the pod if this task is cancelled.


async def _watch(pod: Pod, times: PodTimes) -> None:
    """Checks a pod's health and connects to the pod, until cancelled."""
    silent, unhealthy_period_s, misfit = 0, _UNHEALTHY_PERIOD_S, ""
    while True:
        state = await pod.check()
        silent = silent + 1 if state is PodState.SILENT else 0
        was_healthy = pod.healthy
        if state is PodState.SERVING:
            pod.healthy = pod.connected or await _connect(pod)
        elif state is PodState.UNREACHABLE or silent >= _MAX_SILENT_CHECKS:
            pod.healthy = False
            await pod.disconnect("it does not answer")
        elif state in (PodState.DRAINING, PodState.REFUSED):
            pod.healthy = False  # Its running calls may finish.
        if pod.healthy and pod.misfit != misfit:
            misfit = pod.misfit
            if misfit:
                log.warning("%s gets no work: %s", pod.address, misfit)
        if pod.healthy is not was_healthy:
            log.info("%s is %s", pod.address, state.value)
        if pod.healthy or was_healthy:
            unhealthy_period_s = _UNHEALTHY_PERIOD_S
        await asyncio.sleep(times.check_s if pod.healthy else unhealthy_period_s)
        if not pod.healthy:
            unhealthy_period_s = min(times.check_s, unhealthy_period_s * _UNHEALTHY_GROWTH)


async def _connect(pod: Pod) -> bool:
    try:
        await pod.connect()
    except TriptychError as error:
        log.warning("%s: %s", pod.address, error.message)
        return False
    return True


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
