"""Pods: name resolution, health checks, and which pod gets a piece of work.

An address is `host:port` or `unix:path`, used literally, or `dns:///name:port`, resolved every few
seconds into one pod per IP address. The other services dial a pod under the same address.
`EncoderPool` and `DecoderPool` build on this file; what a pod serves is theirs. A failed lookup
keeps the known pods; the calls of a pod that cannot be reached fail.

A name loses a pod when it terminates or misses some readiness probes; neither may break what runs
there. So a pod that has left its name gets no new work, and is closed when it has none.
"""

import asyncio
import enum
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from blake3 import blake3
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.common.errors import TriptychError
from services.common.transport.rpc import error_from_rpc
from services.gateway.clients.served_model import ServedModel

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)

_DNS = "dns:"
RESOLVE_PERIOD_S = 5.0
_RESOLVE_EMPTY_PERIOD_S = 1.0  # while no pod accepts work
CHECK_PERIOD_S = 1.0
# An unhealthy pod is checked soon, so that it gets work soon after it recovers, then less and less
# often: loading a model takes minutes.
_UNHEALTHY_PERIOD_S = 0.05
_UNHEALTHY_GROWTH = 1.2
CHECK_TIMEOUT_S = 2.0
_ASK_TIMEOUT_S = 2.0
# Consecutive checks without an answer after which a pod's calls fail.
_MAX_SILENT_CHECKS = 2
# A pod may have this many more pieces of work than the mean before equal keys go to another one.
_SLACK = 1.25
_HEADROOM = 8
# What gRPC says of a pod whose certificate is not accepted.
_WRONG_CERTIFICATE = ("handshake failed", "verification check failed")


class PodState(enum.Enum):
    """The result of a health check."""

    SERVING = "serving"
    DRAINING = "draining"  # answers, and takes no new work
    SILENT = "silent"  # no answer in time
    UNREACHABLE = "unreachable"  # no connection
    REFUSED = "refused"  # does not accept the gateway's credentials


_STATES = {
    grpc.StatusCode.UNAUTHENTICATED: PodState.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: PodState.SERVING,  # reachable, without a health service
    grpc.StatusCode.DEADLINE_EXCEEDED: PodState.SILENT,
    grpc.StatusCode.UNAVAILABLE: PodState.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class Dialling:
    """With what the gateway calls pods.

    Attributes:
        channel: to an address, at which that service listens.
        refused: called with `token` or `certificate` when a check fails for it.
    """

    channel: Callable[[str, str], grpc.aio.Channel]
    refused: Callable[[str], None]


class Pod:
    """One instance of a service.

    Attributes:
        service: encoder or decoder.
        address: host:port, or unix:path.
        healthy: it accepts work.
        leaving: its name no longer resolves to it.
        num_in_flight: its calls or sequences from this gateway.
    """

    service: ClassVar[str] = ""

    def __init__(self, address: str, served: ServedModel, dialling: Dialling) -> None:
        self.address = address
        self.served = served
        self.healthy = False
        self.leaving = False
        self.num_in_flight = 0
        self._dialling = dialling
        self._refusal = ""
        self.channel = self._dialling.channel(address, self.service)
        self._check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def unary(
        self, method: str, request: type[RequestT], answer: type[AnswerT]
    ) -> "grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT]":
        """The caller of a method of its service that has one message each way."""
        return self.channel.unary_unary(
            f"/triptych.v1.{self.service.capitalize()}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )

    async def ask(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT]", request: RequestT
    ) -> AnswerT:
        """A short call; raises TriptychError if the pod fails or does not answer."""
        try:
            return await method(request, timeout=_ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"the {self.service}") from None

    @property
    def misfit(self) -> str:
        """Why the pod cannot serve the gateway's model; empty: it can."""
        return ""

    @property
    def connected(self) -> bool:
        """Whether `connect` need not be called again. False: another pod may have started under the
        address between two checks.
        """
        return False

    async def connect(self) -> None:
        """Calls the pod's `Describe` and opens its stream, if it has one.

        Raises:
            TriptychError: the pod fails or does not answer.
        """
        raise NotImplementedError

    async def disconnect(self, reason: str) -> None:
        """Fails all calls to this pod, so that they can be retried on another one."""
        raise NotImplementedError

    async def close(self) -> None:
        """Fails all calls and closes the connection."""
        await self.disconnect("the gateway closed the connection")
        await self.channel.close()

    async def check(self) -> PodState:
        try:
            answer = await self._check(
                health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as failure:
            self._look_for_refusal(failure)
            return _STATES.get(failure.code(), PodState.DRAINING)
        self._refusal = ""
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return PodState.SERVING if serving else PodState.DRAINING

    def _look_for_refusal(self, failure: grpc.aio.AioRpcError) -> None:
        """Counts that one side does not accept the other, and logs it once."""
        details = failure.details() or ""
        if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
            reason = "token"
        elif any(mark in details.lower() for mark in _WRONG_CERTIFICATE):
            reason = "certificate"
        else:
            return
        self._dialling.refused(reason)
        if reason != self._refusal:
            self._refusal = reason
            log.warning("%s gets no calls: %s", self.address, details)


PodT = TypeVar("PodT", bound=Pod)


class Loaded(Protocol):
    """What has an address and work of this gateway."""

    address: str
    num_in_flight: int


LoadedT = TypeVar("LoadedT", bound=Loaded)


def pick(pods: Sequence[LoadedT], key: bytes) -> LoadedT:
    """Rendezvous hashing with bounded loads: the same pod for equal keys, unless it has too much
    work; then the next in the key's order.
    """
    return min(within_bound(pods), key=lambda pod: rank(pod.address, key))


def within_bound(pods: Sequence[LoadedT]) -> Sequence[LoadedT]:
    """The pods that do not have much more work than the mean; at least one."""
    bound = sum(pod.num_in_flight for pod in pods) / len(pods) * _SLACK + _HEADROOM
    return [pod for pod in pods if pod.num_in_flight <= bound]


def rank(address: str, key: bytes) -> tuple[bytes, bytes]:
    """Orders pods for a key. Hosts come first, so that an encoder and a decoder of the same host
    are chosen together.
    """
    return _hash(host_of(address), key), _hash(address, key)


def host_of(address: str) -> str:
    """Of a pod, for comparison."""
    return address.rpartition(":")[0]


def _hash(name: str, key: bytes) -> bytes:
    return blake3(name.encode() + key).digest(8)


class Pool(Generic[PodT]):
    """The pods behind some addresses. One task resolves names, one task per pod checks its health.

    Args:
        addresses: as in the settings.
        served: what all pods have to serve.

    Attributes:
        pod: what the pods are.
    """

    pod: type[PodT]

    def __init__(self, addresses: Sequence[str], served: ServedModel, dialling: Dialling) -> None:
        self._addresses = addresses
        self._served = served
        self._dialling = dialling
        self._pods: dict[str, tuple[PodT, asyncio.Task[None]]] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._unresolved: set[str] = set()

    async def start(self) -> None:
        """Starts the tasks; waits for no pod and for no name."""
        if any(address.startswith(_DNS) for address in self._addresses):
            self._resolver = asyncio.create_task(self._watch_names())
        else:
            await self._update()

    async def close(self) -> None:
        if self._resolver:
            await _end(self._resolver)
        for address in list(self._pods):
            await self._remove(address)

    def healthy(self) -> list[PodT]:
        """The pods that accept work now."""
        return [pod for pod in self.serving() if not pod.misfit]

    def serving(self) -> list[PodT]:
        """The pods that would accept work, whatever they serve."""
        pods = list(self._pods.values())  # metrics are read in a thread
        return [pod for pod, _ in pods if pod.healthy and not pod.leaving]

    def fitting(self) -> list[PodT]:
        """The pods that serve the model, or did when they were there last."""
        pods = list(self._pods.values())
        return [pod for pod, _ in pods if not pod.leaving and not pod.misfit]

    def misfits(self) -> dict[str, str]:
        """The pods that serve another model, and how it differs."""
        return {pod.address: pod.misfit for pod in self.serving() if pod.misfit}

    async def _watch_names(self) -> None:
        while True:
            await self._update()
            period_s = RESOLVE_PERIOD_S if self.healthy() else _RESOLVE_EMPTY_PERIOD_S
            await asyncio.sleep(min(period_s, RESOLVE_PERIOD_S))

    async def _update(self) -> None:
        wanted: set[str] = set()
        for address in self._addresses:
            try:
                wanted |= await _resolve(address)
                self._unresolved.discard(address)
            except (OSError, ValueError) as error:
                # Keep the known pods: a failed lookup must not empty the pool.
                if address not in self._unresolved:
                    log.warning("cannot resolve %s: %s", address, error)
                self._unresolved.add(address)
                wanted |= set(self._pods)
        for address in wanted - set(self._pods):
            pod = self.pod(address, self._served, self._dialling)
            self._pods[address] = (pod, asyncio.create_task(_watch(pod)))
        for address, (pod, _) in list(self._pods.items()):
            pod.leaving = address not in wanted
            if pod.leaving and not pod.num_in_flight:
                await self._remove(address)

    async def _remove(self, address: str) -> None:
        pod, task = self._pods[address]
        pod.healthy = False
        await _end(task)
        await pod.close()
        del self._pods[address]  # last: if this is cancelled, `close` still finds the pod


async def _watch(pod: Pod) -> None:
    """Checks a pod's health and connects it, until cancelled."""
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
            pod.healthy = False  # its running calls may finish
        if pod.healthy and pod.misfit != misfit:
            misfit = pod.misfit
            if misfit:
                log.warning("%s gets no work: %s", pod.address, misfit)
        if pod.healthy is not was_healthy:
            log.info("%s is %s", pod.address, state.value)
        if pod.healthy or was_healthy:
            unhealthy_period_s = _UNHEALTHY_PERIOD_S
        await asyncio.sleep(CHECK_PERIOD_S if pod.healthy else unhealthy_period_s)
        if not pod.healthy:
            unhealthy_period_s = min(CHECK_PERIOD_S, unhealthy_period_s * _UNHEALTHY_GROWTH)


async def _connect(pod: Pod) -> bool:
    try:
        await pod.connect()
    except TriptychError as error:
        log.warning("%s: %s", pod.address, error.message)
        return False
    return True


async def _resolve(address: str) -> set[str]:
    if not address.startswith(_DNS):
        return {address}
    host, _, port = address.removeprefix(_DNS).removeprefix("///").rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return {
        f"[{entry[4][0]}]:{port}" if entry[0] == socket.AF_INET6 else f"{entry[4][0]}:{port}"
        for entry in found
    }


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
