"""Which pods there are and which of them are well: name resolution and health checks.

An address is `host:port`, taken as it is, or `dns:///name:port`, resolved again every few seconds
into one pod per address. A pod's address is also what the other services dial.
"""

import asyncio
import enum
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from services.common.errors import TriptychError
from services.common.rpc import create_channel

log = logging.getLogger(__name__)

_DNS = "dns:///"
RESOLVE_PERIOD_S = 5.0
CHECK_PERIOD_S = 1.0
_HOPEFUL_PERIOD_S = 0.05  # of one that is not healthy, so that it is found soon
CHECK_TIMEOUT_S = 2.0
# Checks in a row without an answer after which a pod's calls are given up.
_MAX_SILENT_CHECKS = 2


class PodState(enum.Enum):
    """What a health check found."""

    SERVING = "serving"
    DRAINING = "draining"  # it answers, and wants no new work
    SILENT = "silent"  # no answer in time
    GONE = "gone"  # no connection


class Pod:
    """One instance of a service.

    Attributes:
        address: host:port.
        healthy: it can be given work.
        num_in_flight: calls or sequences it works on for this gateway.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.healthy = False
        self.num_in_flight = 0
        self.channel = create_channel(address)
        self._check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    @property
    def connected(self) -> bool:
        """Whether `connect` has succeeded since the last `lose`."""
        raise NotImplementedError

    async def connect(self) -> None:
        """Learns what the pod serves and opens what it needs.

        Raises:
            TriptychError: it cannot.
        """
        raise NotImplementedError

    async def lose(self, reason: str) -> None:
        """Fails all calls on this pod, so that they can go elsewhere."""
        raise NotImplementedError

    async def close(self) -> None:
        """Frees everything."""
        await self.lose("the gateway let go of it")
        await self.channel.close()

    async def check(self) -> PodState:
        """Asks the pod's health service."""
        try:
            answer = await self._check(
                health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as failure:
            match failure.code():
                case grpc.StatusCode.UNIMPLEMENTED:
                    return PodState.SERVING  # no health service, but somebody is there
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    return PodState.SILENT
                case grpc.StatusCode.UNAVAILABLE:
                    return PodState.GONE
                case _:
                    return PodState.DRAINING
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return PodState.SERVING if serving else PodState.DRAINING


PodT = TypeVar("PodT", bound=Pod)


class PodSet(Generic[PodT]):
    """The pods behind some addresses, kept current by a task for names and one per pod.

    Args:
        addresses: as in the settings.
        create: makes the pod of one address; connects nothing yet.
    """

    def __init__(self, addresses: Sequence[str], create: Callable[[str], PodT]) -> None:
        self._addresses = addresses
        self._create = create
        self._pods: dict[str, tuple[PodT, asyncio.Task[None]]] = {}
        self._resolver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolves the addresses and keeps watching; waits for no pod."""
        await self._update()
        if any(address.startswith(_DNS) for address in self._addresses):
            self._resolver = asyncio.create_task(self._watch_names())

    async def close(self) -> None:
        """Ends all tasks and connections."""
        if self._resolver:
            await _end(self._resolver)
        for address in list(self._pods):
            await self._remove(address)

    def healthy(self) -> list[PodT]:
        """The pods that can be given work now."""
        return [pod for pod, _ in self._pods.values() if pod.healthy]

    async def _watch_names(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_PERIOD_S)
            await self._update()

    async def _update(self) -> None:
        wanted: set[str] = set()
        for address in self._addresses:
            try:
                wanted |= await _resolve(address)
            except (OSError, ValueError) as error:
                # Keep what is known: a DNS hiccup must not empty the pool.
                log.warning("cannot resolve %s: %s", address, error)
                wanted |= set(self._pods)
        for address in wanted - set(self._pods):
            pod = self._create(address)
            self._pods[address] = (pod, asyncio.create_task(_watch(pod)))
        for address in set(self._pods) - wanted:
            await self._remove(address)

    async def _remove(self, address: str) -> None:
        pod, task = self._pods[address]
        pod.healthy = False
        await _end(task)
        await pod.close()
        del self._pods[address]  # last: who is cancelled on the way leaves it to `close`


class Pool(Generic[PodT]):
    """All pods of one service, watched from `start` to `close`."""

    def __init__(self, addresses: Sequence[str], create: Callable[[str], PodT]) -> None:
        self._pods = PodSet(addresses, create)

    async def start(self) -> None:
        """Starts watching the pods."""
        await self._pods.start()

    async def close(self) -> None:
        """Ends all that they work on for this gateway."""
        await self._pods.close()

    def num_healthy(self) -> int:
        """How many can be given work now."""
        return len(self._pods.healthy())


async def _watch(pod: Pod) -> None:
    """Connects to a pod and checks it, for ever."""
    silent = 0
    while True:
        state = await pod.check()
        silent = silent + 1 if state is PodState.SILENT else 0
        was_healthy = pod.healthy
        if state is PodState.SERVING:
            pod.healthy = pod.connected or await _connect(pod)
        elif state is PodState.GONE or silent >= _MAX_SILENT_CHECKS:
            pod.healthy = False
            await pod.lose("it does not answer")
        elif state is PodState.DRAINING:
            pod.healthy = False  # what it works on may end
        if pod.healthy is not was_healthy:
            log.info("%s is %s", pod.address, state.value)
        await asyncio.sleep(CHECK_PERIOD_S if pod.healthy else _HOPEFUL_PERIOD_S)


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
    host, _, port = address[len(_DNS) :].rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return {
        f"[{entry[4][0]}]:{port}" if entry[0] == socket.AF_INET6 else f"{entry[4][0]}:{port}"
        for entry in found
    }


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
