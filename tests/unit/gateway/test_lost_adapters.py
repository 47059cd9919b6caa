"""The adapters of decoders that are gone and may come back, see test_gateway_adapters, too."""

import time
from dataclasses import replace

import pytest

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.decoders import DecoderPod, DecoderPool
from services.gateway.clients.pods import PodDialer, PodNames, PodState, PodTimes
from services.gateway.clients.served_model import ServedModel
from tests.noise import PATIENCE_S
from tests.unit.gateway.test_clients import until


class Names(PodNames):
    """A name that has the IP addresses of a list."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    async def look_up(self, host: str, port: int) -> list[str]:
        return list(self._found)


@pytest.fixture
def reporting(monkeypatch) -> dict[str, list[str]]:
    """Names of the adapters of decoders by address, which are healthy without a connection."""
    found: dict[str, list[str]] = {}

    async def check(pod):
        pod.adapters = [pb.Adapter(name=name) for name in found.get(pod.address, ())]
        pod.reported_at = time.monotonic()
        pod.healthy = pod.address in found
        return PodState.SERVING if pod.healthy else PodState.DRAINING

    monkeypatch.setattr(DecoderPod, "check", check)
    monkeypatch.setattr(DecoderPod, "connected", True)
    return found


async def test_adapters_of_removed_decoders_are_remembered_while_they_may_restart(reporting):
    """A name has other addresses after a restart."""
    found = ["10.0.0.1", "10.0.0.2"]
    reporting |= {"10.0.0.1:1": ["sql", "both"], "10.0.0.2:1": ["both"], "10.0.0.3:1": []}
    times = PodTimes(resolve_s=0.01, restart_s=PATIENCE_S)
    dialer = PodDialer(times=times, names=Names(found))
    pool = DecoderPool(["dns:///decoder:1"], ServedModel(), dialer)
    await pool.start()
    await until(lambda: len(pool.healthy()) == 2)
    assert pool.lost_adapters.names() == []
    found.remove("10.0.0.1")
    await until(lambda: {pod.address for pod in pool.pods} == {"10.0.0.2:1"})
    assert pool.lost_adapters.names() == ["sql", "both"]
    dialer.times = replace(times, restart_s=0)
    assert pool.lost_adapters.names() == []
    dialer.times = times
    pool.lost_adapters.forget("both")
    assert pool.lost_adapters.names() == ["sql"]
    dialer.times = replace(times, restart_s=0)
    found.append("10.0.0.3")
    await until(lambda: len(pool.healthy()) == 2)
    found.remove("10.0.0.2")
    await until(lambda: {pod.address for pod in pool.pods} == {"10.0.0.3:1"})
    dialer.times = times
    assert pool.lost_adapters.names() == ["both"]  # the time of sql was over when this one left
    await pool.close()


async def test_adapters_are_remembered_for_as_long_as_no_decoder_is_healthy(reporting):
    reporting["10.0.0.1:1"] = ["sql"]
    found = ["10.0.0.1"]
    dialer = PodDialer(times=PodTimes(resolve_s=0.01, restart_s=0), names=Names(found))
    pool = DecoderPool(["dns:///decoder:1"], ServedModel(), dialer)
    await pool.start()
    await until(pool.healthy)
    found.clear()
    await until(lambda: not pool.pods)
    assert pool.lost_adapters.names() == ["sql"]
    reporting["10.0.0.2:1"] = []
    found.append("10.0.0.2")
    await until(pool.healthy)
    assert pool.lost_adapters.names() == []
    await pool.close()
