"""Pods of each kind come and go behind headless Services, and Redis restarts: nobody notices.

`python -m tests.e2e.trials` is the long form.
"""

from collections.abc import Iterator

import pytest

from tests.e2e import trials
from tests.e2e.fleet import ProcessFleet
from tests.e2e.headless import is_possible
from tests.e2e.trials import Clients

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_possible(), reason="needs mount namespaces and port 53"),
]
Running = tuple[ProcessFleet, Clients]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ProcessFleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet, Clients(fleet, num_streams=5, num_tokens=120, num_askers=2)


@pytest.mark.parametrize("kind", trials.KINDS)
def test_pods_scale_down_and_roll_out(running: Running, kind: str) -> None:
    """Two become one, and that one is replaced."""
    for trial in (trials.scale_down, trials.roll_out):
        outcome = trial(*running, kind)
        assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"


def test_redis_restarts(running: Running) -> None:
    outcome = trials.lose_cache(*running)
    assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"
