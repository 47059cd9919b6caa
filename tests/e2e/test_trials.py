"""Pods of each kind come and go behind headless Services, and Redis restarts: nobody notices.

`python -m tests.e2e.trials` is the long form; `make test` has the handover of test_handover.py and
the chaos of test_chaos.py.
"""

from collections.abc import Iterator

import httpx2
import pytest

from tests.e2e import trials
from tests.e2e.fleet import ProcessFleet
from tests.e2e.headless import is_possible
from tests.e2e.trials import Clients
from tests.noise import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_possible(), reason="needs mount namespaces and port 53"),
]
Running = tuple[ProcessFleet, Clients]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    counts = {"decoder": 2, "encoder": 1, "gateway": 1}
    with ProcessFleet(tmp_path_factory.mktemp("fleet"), counts=counts) as fleet:
        yield fleet, Clients(fleet, num_streams=3, num_tokens=110, num_askers=1)


@pytest.mark.parametrize("kind", trials.KINDS)
def test_pods_scale_down_and_roll_out(running: Running, kind: str) -> None:
    """Two become one, and that one is replaced."""
    running[0].scale(kind, 2)
    for trial in (trials.scale_down, trials.roll_out):
        outcome = trial(*running, kind)
        assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"


def test_redis_restarts(running: Running) -> None:
    outcome = trials.lose_cache(*running)
    assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"


def test_decoders_scale_to_zero_and_back(running: Running) -> None:
    fleet, clients = running
    assert not fleet.scale("decoder", 0)  # the name has no address any more
    (url,) = fleet.gateways()
    body = {"model": fleet.model, "messages": [{"role": "user", "content": "hello"}]}
    refused = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert httpx2.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
    assert not fleet.scale("decoder", 1)
    outcome = clients.during("decoders 0 → 1", list)
    assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"
