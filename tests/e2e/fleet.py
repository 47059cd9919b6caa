"""Pods of each service as processes, which gateways find as behind headless Services.

A pod's address leaves DNS in the moment in which its process is told to end, as Kubernetes does.
Each kind has one port, each pod an address.
"""

import asyncio
import itertools
import random
import time
from pathlib import Path

from tests.e2e.cluster import DEMO_MODEL, Service, wait_until
from tests.e2e.headless import DnsServer, with_resolver
from tests.ports import free_port
from tests.redis_server import RedisServer
from triptych.probes import gateway_ready

_START_S = 180.0
_END_S = 400.0
# Until nobody chooses a gateway any more that a Service has taken out; `preStop` covers it.
_CHOSEN_S = 0.3
_CACHE_AWAY_S = 1.0
_NETS = {"decoder": 1, "encoder": 2, "gateway": 3}


class ProcessFleet:
    """Implements `trials.Fleet`. Use as a context manager.

    Args:
        directory: for logs.
        counts: of pods at first, by kind.
        grace_s: of each service.
    """

    model = "demo"

    def __init__(
        self, directory: Path, *, counts: dict[str, int] | None = None, grace_s: float = 60.0
    ) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self._counts = counts or dict.fromkeys(_NETS, 2)
        self._net = random.SystemRandom().randrange(16, 250)  # not that of another run
        self._ports = {kind: free_port() for kind in _NETS}
        self._numbers = itertools.count(1)
        self._pods: dict[str, list[Service]] = {kind: [] for kind in _NETS}
        self._leaving: list[Service] = []
        self._ready: list[Service] = []  # gateways
        self.redis = RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
        self.dns = DnsServer(f"127.{self._net}.0.53")

    def __enter__(self) -> "ProcessFleet":
        try:
            self.redis.start()
            for kind, count in self._counts.items():
                for _ in range(count):
                    self._add(kind)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for services in (*self._pods.values(), self._leaving):
            for service in services:
                service.stop()
        self.redis.stop()
        self.dns.close()

    def gateways(self) -> list[str]:
        return [f"http://{service.address}" for service in self._ready]

    def scale(self, kind: str, count: int) -> list[str]:
        mistakes: list[str] = []
        while len(self._pods[kind]) > count:
            mistakes += self._remove(kind)
        while len(self._pods[kind]) < count:
            self._add(kind)
        self._wait()
        return mistakes

    def roll_out(self, kind: str) -> list[str]:
        mistakes: list[str] = []
        for _ in list(self._pods[kind]):
            self._add(kind)
            self._wait()
            mistakes += self._remove(kind)
        return mistakes

    def restart_cache(self) -> list[str]:
        self.redis.stop()
        time.sleep(_CACHE_AWAY_S)
        self.redis.start()
        time.sleep(_CACHE_AWAY_S)
        return []

    def _add(self, kind: str) -> None:
        number = next(self._numbers)
        service = Service(kind, self._directory / f"{kind}-{number}.log", **self._settings(kind))
        service.host, service.port = f"127.{self._net}.{_NETS[kind]}.{number}", self._ports[kind]
        if kind == "gateway":
            service.wrapper = with_resolver(self._directory, f"127.{self._net}.0.53")
        else:  # in DNS at once, as `publishNotReadyAddresses` has it
            self.dns.names.setdefault(kind, []).append(service.host)
        service.start()
        self._pods[kind].append(service)

    def _remove(self, kind: str) -> list[str]:
        """Ends the oldest pod as Kubernetes does."""
        service = self._pods[kind].pop(0)
        self._leaving.append(service)
        if kind == "gateway":
            self._ready.remove(service)
            time.sleep(_CHOSEN_S)
        else:
            self.dns.names[kind].remove(service.host)
        status = service.terminate(_END_S)
        self._leaving.remove(service)
        return [f"a {kind} ended with status {status}"] if status else []

    def _settings(self, kind: str) -> dict[str, object]:
        common: dict[str, object] = {"model": DEMO_MODEL, "shutdown_grace_s": self._grace_s}
        if kind == "gateway":
            names = {
                f"{k}_addresses": f"dns:///{k}.triptych.svc.cluster.local:{self._ports[k]}"
                for k in ("encoder", "decoder")
            }
            return {**common, **names, "served_model_name": self.model}
        return {
            **common,
            "device": "cpu",
            "dtype": "float32",
            # A machine that is busy with something else must not make Redis look slow.
            "redis_url": f"{self.redis.url}?socket_timeout=1",
        }

    def _wait(self) -> None:
        wait_until(self._is_whole, _START_S, "each gateway has work for all pods", period_s=0.1)
        self._ready = list(self._pods["gateway"])

    def _is_whole(self) -> bool:
        for gateway in self._pods["gateway"]:
            if not gateway.is_running() or not gateway.answers():
                return False
            for kind in ("encoder", "decoder"):
                healthy = gateway.metric("triptych_gateway_healthy_pods", service=kind)
                if healthy != len(self._pods[kind]):
                    return False
            serves = asyncio.run(gateway_ready(gateway.host, gateway.port))
            if serves != all(self._pods.values()):  # scaled to zero, it only answers
                return False
        return True
