"""The trials of tests/e2e/trials.py on a real cluster: `KUBECONFIG=... pytest tests/cluster`.

The cluster has the images of deploy/k8s/README.md. What clients check is what the processes of
tests/e2e/test_trials.py are checked with; only `KubernetesFleet` differs.
"""

import json
import subprocess
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
    kubectl("apply", "--server-side", "-f", str(K8S / "base" / "namespace.yaml"))
    if "triptych-redis" not in kubectl("get", "secrets", "-o", "name"):
        made = subprocess.run([K8S / "secrets.sh", "redis"], stdout=subprocess.PIPE, text=True)
        assert not made.returncode, "secrets.sh has failed"
        kubectl("create", "-f", "-", stdin=made.stdout)
    kubectl("apply", "--server-side", "-k", str(K8S / "overlays" / "local"))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    deploy()
    with KubernetesFleet() as fleet:
        for kind in trials.KINDS:
            assert not fleet.scale(kind, 2)
        yield fleet, Clients(fleet, num_streams=8, num_tokens=400, num_askers=2)


def test_a_second_apply_changes_nothing(running: Running) -> None:
    applied = [
        kubectl("apply", "--server-side", "-k", str(K8S / "overlays" / "local"), "-o", "json")
        for _ in range(2)
    ]
    first, second = (
        {
            (item["kind"], item["metadata"]["name"]): item["metadata"].get("generation")
            for item in json.loads(text)["items"]
        }
        for text in applied
    )
    assert len(first) > 10 and first == second
    diff = ["diff", "--server-side", "-k", str(K8S / "overlays" / "local")]
    assert not kubectl(*diff)  # an exit status other than 0 is a difference


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
