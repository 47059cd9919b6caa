"""The stack under test: pods of real processes behind proxies, found through a DNS server of ours.

Each encoder and decoder has an address of its own, where its proxy listens; gateways find them as
behind a headless Service. A supervisor starts what has ended again, under the same address, as a
kubelet does with a container; a pod that is told to go is replaced by one with a new address.
"""

import asyncio
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.chaos.history import ProcessEnd
from benchmarks.chaos.proxy import Proxy, Selector, port_owner
from tests.e2e.cluster import DEMO_MODEL, Service
from tests.e2e.headless import DnsServer, with_resolver
from tests.ports import free_port
from tests.redis_server import RedisServer

log = logging.getLogger(__name__)

Kind = Literal["gateway", "encoder", "decoder"]
KINDS: tuple[Kind, ...] = ("gateway", "encoder", "decoder")
_READY_TIMEOUT_S = 180.0
_PROBE_PERIOD_S, _PROBES_UNTIL_UNREADY = 0.5, 2
_GRACE_S = 20.0
_LASTING_S = 1.5
# Children go with the driver, even when it is killed.
_TETHER = ["setpriv", "--pdeathsig", "KILL"]
# What starts again gives way to what serves: a pod on a node of its own would take nothing from it.
_MORE_NICENESS = 6


@dataclass(eq=False)
class Pod:
    """One pod: its processes, and the proxy at its address.

    Attributes:
        slot: which of its kind; a replacement has the slot of what it replaces.
        proxy: None for a gateway, whose clients reach it directly.
        ready: a gateway that clients may be sent to.
        leaves: it was told to go, so it is not started again.
        seen_at: when it was last seen to run.
    """

    kind: Kind
    slot: int
    service: Service
    address: str
    proxy: Proxy | None
    ready: bool = False
    leaves: bool = False
    silent_probes: int = 0
    seen_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.slot}"


class Stack:
    """Gateways, encoders, decoders and Redis. Use `start` and `stop`; all methods are for one loop.

    Attributes:
        pods: those that serve or start, one per kind and slot.
        left: what remained of a process after its end.
        num_starts: of processes of services.
    """

    def __init__(self, directory: Path, ends: list[ProcessEnd], *, replicas: int = 2) -> None:
        self._ends = ends
        self._directory = directory
        self._replicas = replicas
        self._net = random.SystemRandom().randrange(16, 250)  # not that of another run
        self._ports = {kind: free_port() for kind in KINDS}
        self._numbers = itertools.count(1)
        self.dns = DnsServer(f"127.{self._net}.0.53")
        self.redis = RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
        self.redis_proxies = {
            kind: Proxy((f"127.{self._net}.9.{i}", self.redis.port), ("127.0.0.1", self.redis.port))
            for i, kind in enumerate(("encoder", "decoder"), 1)
        }
        self.pods: dict[tuple[Kind, int], Pod] = {}
        self._gone: list[Pod] = []
        self.left: list[str] = []
        self.num_starts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts everything and waits until it serves."""
        self.redis.start()
        for proxy in self.redis_proxies.values():
            await proxy.start()
        for kind in reversed(KINDS):
            for slot in range(self._replicas):
                await self._add(kind, slot)
        for work in (self._supervise, self._probe):
            self._spawn(work())
        await self.until_whole()

    async def stop(self) -> None:
        """Ends everything; notes what remains."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        pods = [*self.pods.values(), *self._gone]
        for pod in pods:
            pod.service.stop()
            if pod.proxy is not None:
                await pod.proxy.close()
        for proxy in self.redis_proxies.values():
            await proxy.close()
        self.redis.stop()
        self.dns.close()

    async def stop_gently(self) -> list[str]:
        """SIGTERM to all; what ended otherwise than with status 0."""
        self.end_supervision()
        wrong: list[str] = []
        for kind in KINDS:
            pods = self.of(kind)
            for pod in pods:
                pod.service.signal_front(signal.SIGTERM)
            for pod in pods:
                status = await asyncio.to_thread(pod.service.wait)
                await self._note_rest(pod)
                if status:
                    wrong.append(f"{pod.name} ended with status {status}")
        return wrong

    def end_supervision(self) -> None:
        """What ends from now on stays ended."""
        for pod in self.pods.values():
            pod.leaves = True

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- pods -----------------------------------------------------------------------------------

    def of(self, kind: Kind) -> list[Pod]:
        return [pod for (k, _), pod in self.pods.items() if k == kind]

    def ready_gateways(self) -> list[Pod]:
        """Where a Service would send new connections."""
        return [pod for pod in self.of("gateway") if pod.ready and not pod.leaves]

    async def _add(self, kind: Kind, slot: int) -> Pod:
        number = next(self._numbers)
        service = Service(
            kind, self._directory / f"{kind}-{slot}.log", **self._settings(kind, slot)
        )
        service.host, service.port = f"127.{self._net}.2.{number}", self._ports[kind]
        address, proxy = service.host, None
        if kind == "gateway":
            service.wrapper = [*with_resolver(self._directory, f"127.{self._net}.0.53"), *_TETHER]
        else:
            address = f"127.{self._net}.1.{number}"
            proxy = Proxy((address, service.port), (service.host, service.port))
            await proxy.start()
            service.wrapper = _TETHER
            self.dns.names.setdefault(kind, []).append(address)
        pod = self.pods[kind, slot] = Pod(kind, slot, service, address, proxy)
        self._start(pod)
        return pod

    def _start(self, pod: Pod) -> None:
        pod.service.start()  # in this thread: its end would be that of the process
        self.num_starts += 1
        if self.num_starts > len(KINDS) * self._replicas:
            self._spawn(self._start_in_background(pod))

    async def _start_in_background(self, pod: Pod) -> None:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, pod.service.pid, min(usual + _MORE_NICENESS, 19))
        while pod.service.is_running() and not await answers(pod):  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.2)
        for pid in pod.service.session():
            for thread in _entries(f"/proc/{pid}/task"):
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), usual)

    def _settings(self, kind: Kind, slot: int) -> dict[str, object]:
        common: dict[str, object] = {"model": DEMO_MODEL, "shutdown_grace_s": _GRACE_S}
        if kind == "gateway":
            found = {
                f"{k}_addresses": f"dns:///{k}.triptych.svc.cluster.local:{self._ports[k]}"
                for k in ("encoder", "decoder")
            }
            return {**common, **found, "served_model_name": "demo"}
        host = f"127.{self._net}.9.{1 if kind == 'encoder' else 2}"
        common |= {
            "device": "cpu",
            "dtype": "float32",
            "redis_url": f"redis://{host}:{self.redis.port}/0?socket_timeout=0.1",
        }
        if kind == "encoder":
            return {**common, "cache_bytes": 4 << 20}
        return {
            **common, "max_num_sequences": 64,
            "kv_cache_bytes": 24_000_000 if slot == 0 else 14_000_000,
            "max_model_len": 1500,
        }  # fmt: skip

    async def replace(self, pod: Pod, *, lag_s: float = 0.0) -> int:
        """Deletes a pod and starts another in its place; the old one's exit status.

        Args:
            lag_s: how long clients and DNS still know the old one.
        """
        pod.leaves = True
        pod.service.signal_front(signal.SIGTERM)
        await asyncio.sleep(lag_s)
        pod.ready = False
        if pod.kind != "gateway":
            self.dns.names[pod.kind].remove(pod.address)
        self._gone.append(pod)
        await self._add(pod.kind, pod.slot)
        status = await asyncio.to_thread(pod.service.wait, _GRACE_S + 60)
        await self._note_end(pod)
        if pod.proxy is not None:
            await pod.proxy.close()
        self._gone.remove(pod)
        return status

    # --- watching -------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            for pod in list(self.pods.values()):
                if pod.leaves:
                    continue
                if pod.service.is_running():
                    pod.seen_at = time.monotonic()
                    continue
                pod.ready = False
                await self._note_end(pod)
                self._start(pod)
            await asyncio.sleep(0.1)

    async def _note_end(self, pod: Pod) -> None:
        name, status = f"{pod.name}/{pod.service.pid}", pod.service.wait()
        self._ends.append(ProcessEnd(name, pod.seen_at, time.monotonic(), status))
        await self._note_rest(pod)

    async def _note_rest(self, pod: Pod) -> None:
        """What is left of a pod after its front process; engines get five seconds to go."""
        deadline = time.monotonic() + 5
        while (rest := pod.service.session()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if rest:
            self.left.append(f"{pod.name}: processes {rest} outlived their front")
            for pid in rest:
                os.kill(pid, signal.SIGKILL)

    async def _probe(self) -> None:
        """Readiness of gateways, as a Service knows it."""
        while True:
            for pod in self.of("gateway"):
                self._spawn(self._probe_one(pod))
            await asyncio.sleep(_PROBE_PERIOD_S)

    async def _probe_one(self, pod: Pod) -> None:
        if await _is_ready(pod.service.host, pod.service.port):
            pod.ready, pod.silent_probes = True, 0
        else:
            pod.silent_probes += 1
            pod.ready = pod.ready and pod.silent_probes < _PROBES_UNTIL_UNREADY

    async def until_whole(self, timeout_s: float = _READY_TIMEOUT_S) -> float:
        """Waits until each gateway is ready and has work for all encoders and decoders, and this
        lasts: an engine that hung may be ended although it goes on by now.

        Returns:
            Since when it is so.
        """
        deadline = time.monotonic() + timeout_s
        since = 0.0
        while True:
            now = time.monotonic()
            if why := await self._why_not_whole():
                since = 0.0
                if now > deadline:
                    raise TimeoutError(f"not within {timeout_s:g} s: {why}")
            else:
                since = since or now
                if now - since >= _LASTING_S:
                    return since
            await asyncio.sleep(0.1)

    async def _why_not_whole(self) -> str:
        for kind in KINDS:
            if any(not pod.service.is_running() for pod in self.of(kind)):
                return f"a {kind} has ended"
        for pod in self.of("gateway"):
            if not pod.ready:
                return f"{pod.name} is not ready"
            page = await metrics(pod)
            for kind in ("encoder", "decoder"):
                if (
                    value(page, "triptych_gateway_healthy_pods", f'service="{kind}"')
                    != self._replicas
                ):
                    return f"{pod.name} misses one {kind}"
        return ""

    def selector(self, kind: Kind, slot: int | None = None) -> Selector:
        """Connections of one kind's front processes, or of one pod's."""
        pods = [pod for pod in self.of(kind) if slot is None or pod.slot == slot]
        pids = [pod.service.pid for pod in pods if pod.service.is_running()]
        return lambda port: port_owner(port, pids) is not None


async def answers(pod: Pod) -> bool:
    """Whether the pod's metrics can be read."""
    return bool(await metrics(pod))


async def metrics(pod: Pod, timeout_s: float = 2.0) -> str:
    """The pod's metrics; empty if it does not answer."""
    service = pod.service
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(service.host, service.metrics_port)
            try:
                head = f"GET /metrics HTTP/1.1\r\nHost: {service.host}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                return (await reader.read()).decode(errors="replace")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""


def value(page: str, name: str, label: str = "") -> float:
    """Sum of a metric's samples."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name} ", f"{name}{{")) and label in line
    )


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


async def _is_ready(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except OSError:
        return False
