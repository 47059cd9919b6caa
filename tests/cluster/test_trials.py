"""The trials of tests/e2e/trials.py on a real cluster: `KUBECONFIG=... pytest tests/cluster`.

The cluster has the images of deploy/k8s/README.md. What clients check is what the processes of
tests/e2e/test_trials.py are checked with; only `KubernetesFleet` differs.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kubernetes import KubernetesFleet, is_possible, kubectl
from tests.e2e import trials
from tests.e2e.trials import Clients

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not is_possible(), reason="needs kubectl and KUBECONFIG"),
]
K8S = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
Running = tuple[KubernetesFleet, Clients]


def deploy() -> None:
    """Applies overlays/local as its README does."""
    kubectl("apply", "-f", str(K8S / "base" / "namespace.yaml"))
    if "triptych-redis" not in kubectl("get", "secrets", "-o", "name"):
        password = secrets.token_hex(24)
        acl = (
            f"user default off\nuser triptych on >{password} ~triptych:* "
            "+@read +@write +@connection -@dangerous -@scripting"
        )
        url = f"redis://triptych:{password}@redis:6379/0"
        given = [f"--from-literal=users.acl={acl}", f"--from-literal=url={url}"]
        kubectl("create", "secret", "generic", "triptych-redis", *given)
    kubectl("apply", "-k", str(K8S / "overlays" / "local"))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    deploy()
    with KubernetesFleet() as fleet:
        for kind in trials.KINDS:
            assert not fleet.scale(kind, 2)
        yield fleet, Clients(fleet, num_streams=8, num_tokens=400, num_askers=2)


@pytest.mark.parametrize("kind", trials.KINDS)
def test_pods_scale_down_and_roll_out(running: Running, kind: str) -> None:
    fleet, _ = running
    for trial in (trials.scale_down, trials.roll_out):
        outcome = trial(*running, kind)
        print(outcome)
        assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"
        assert not fleet.scale(kind, 2)


def test_redis_is_deleted(running: Running) -> None:
    outcome = trials.lose_cache(*running)
    print(outcome)
    assert not outcome.mistakes, f"{outcome}: {outcome.mistakes[0]}"
