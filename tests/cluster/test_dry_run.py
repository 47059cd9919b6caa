"""What a real API server says to the manifests: a strict dry run, in which a warning is an error.

For the cluster of KUBECONFIG, which is not changed: its namespace `triptych` must exist, and of
other projects' kinds those are tried that it has.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.combinations import COMBINATIONS, INSTALLATIONS, K8S, combine, installed
from tests.unit.deploy.kustomize import render

pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None,
    reason="needs a cluster: KUBECONFIG and kubectl",
)
EXAMPLES = sorted(path.parent.name for path in (K8S / "examples").glob("*/kustomization.yaml"))
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())


def kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def dry_run(directory: Path) -> subprocess.CompletedProcess[str]:
    return kubectl(
        "apply", "-k", str(directory), "--dry-run=server", "--validate=strict",
        "--warnings-as-errors",
    )  # fmt: skip


@pytest.fixture(scope="module")
def kinds() -> set[str]:
    """Kinds that the cluster has."""
    found = kubectl("api-resources", "--no-headers")
    assert found.returncode == 0, found.stderr
    namespace = kubectl("get", "namespace", "triptych")
    if namespace.returncode:
        pytest.skip("the cluster has no namespace triptych: deploy/k8s/namespace/namespace.yaml")
    return {line.split()[-1] for line in found.stdout.splitlines()}


def missing(directory: Path, kinds: set[str]) -> set[str]:
    return {resource["kind"] for resource in render(directory)} - kinds


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_api_server_takes_the_examples(name: str, kinds: set[str]) -> None:
    found = dry_run(K8S / "examples" / name)
    assert kinds and found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr


@pytest.mark.parametrize("name", [*OVERLAYS, *COMBINATIONS])
def test_the_api_server_takes_everything(name: str, kinds: set[str], tmp_path: Path) -> None:
    known = name in OVERLAYS
    directory = (
        K8S / "overlays" / name if known else combine(*COMBINATIONS[name], directory=tmp_path)
    )
    if absent := missing(directory, kinds):
        pytest.skip(f"the cluster has no {', '.join(sorted(absent))}")
    found = dry_run(directory)
    assert found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr
    assert len(found.stdout.splitlines()) == len(render(directory))
    assert "server dry run" in found.stdout


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_the_api_server_takes_another_installation(
    name: str, kinds: set[str], tmp_path: Path
) -> None:
    namespace = INSTALLATIONS[name][2]
    if kubectl("get", "namespace", namespace).returncode:
        pytest.skip(f"the cluster has no namespace {namespace}")
    directory = installed(name, tmp_path / "own")
    rendered = kubectl("kustomize", str(directory)).stdout
    if absent := {d["kind"] for d in yaml.safe_load_all(rendered)} - kinds:
        pytest.skip(f"the cluster has no {', '.join(sorted(absent))}")
    found = dry_run(directory)
    assert found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr


@pytest.mark.parametrize(
    ("overlay", "components", "target", "operation"),
    [
        ("local", (), ("Deployment", "decoder"),
         {"op": "add", "path": "/spec/template/spec/dnsPolcy", "value": "Default"}),
        ("local", (), ("Deployment", "decoder"),
         {"op": "replace", "path": "/spec/selector/matchLabels", "value": {"a": "b"}}),
        ("local", (), ("Deployment", "decoder"),
         {"op": "replace", "path": "/spec/template/spec/securityContext/runAsNonRoot",
          "value": False}),
        ("gpu", ("autoscaling",), ("ScaledObject", "decoder"),
         {"op": "add", "path": "/spec/minReplicas", "value": 1}),
        ("gpu", ("monitoring",), ("PodMonitor", "triptych"),
         {"op": "add", "path": "/spec/podMetricsEndpoints/0/intervall", "value": "1s"}),
        ("gpu", ("dra",), ("ResourceClaimTemplate", "gpu"),
         {"op": "add", "path": "/spec/spec/devices/requests/0/exactly/selectors/-",
          "value": {"cel": {"expression": "device.driver =="}}}),
    ],
    ids=["field", "selector", "root", "scaler", "monitor", "claim"],
)  # fmt: skip
def test_the_api_server_refuses_mistakes(
    overlay: str,
    components: tuple[str, ...],
    target: tuple[str, str],
    operation: dict[str, object],
    kinds: set[str],
    tmp_path: Path,
) -> None:
    directory = combine(overlay, *components, directory=tmp_path)
    if absent := missing(directory, kinds):
        pytest.skip(f"the cluster has no {', '.join(sorted(absent))}")
    path = directory / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    kind, name = target
    patch = {"target": {"kind": kind, "name": name}, "patch": yaml.safe_dump([operation])}
    path.write_text(yaml.safe_dump(content | {"patches": [patch]}))
    assert dry_run(directory).returncode != 0
