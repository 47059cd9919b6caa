"""examples/: every image from one place, pods that wait for the model, commands that fit."""

import re
import shutil
from typing import Any

import pytest

from tests.unit.deploy.combinations import K8S
from tests.unit.deploy.kustomize import Resource, by_kubectl
from tests.unit.deploy.schemas import validate
from tests.unit.deploy.test_components import KUBERNETES_VERSION, of_kind, pods
from tests.unit.deploy.test_defaults import missing_of
from tests.unit.deploy.test_secrets import read_by

EXAMPLES = K8S / "examples"
ROOT = K8S.parents[1]
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = README.partition("```sh")[2].partition("```")[0]
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/kustomization.yaml"))
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders them")


@pytest.fixture(scope="module", params=NAMES)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return by_kubectl(EXAMPLES / request.param)


def containers(resources: list[Resource]) -> list[dict[str, Any]]:
    return [
        container
        for pod in pods(resources).values()
        for kind in ("initContainers", "containers")
        for container in pod["spec"].get(kind, ())
    ]


@needs_kubectl
def test_every_object_is_valid(resources: list[Resource]) -> None:
    for resource in resources:
        validate(resource, KUBERNETES_VERSION)


@needs_kubectl
def test_every_image_of_ours_comes_from_the_registry(resources: list[Resource]) -> None:
    images = {c["image"] for c in containers(resources) if not c["image"].startswith("redis:")}
    assert len(images) >= 2
    for image in images:
        assert re.fullmatch(r"registry\.example\.com/triptych/\w+:0\.1\.0(-gpu)?", image)
        built = image.replace("registry.example.com", "$REGISTRY")
        assert f"docker build -t {built} " in COMMANDS
        assert image.rpartition("/")[2] in COMMANDS.partition("# 3.")[2]  # pushed


@needs_kubectl
def test_pods_wait_for_a_job_that_fills_a_claim_large_enough(resources: list[Resource]) -> None:
    job = pods(resources)["model-download"]
    (download,) = job["spec"]["containers"]
    variables = {v["name"]: v.get("value") for v in download["env"]}
    claims = of_kind(resources, "PersistentVolumeClaim")
    claim = claims["model"]["spec"]["resources"]["requests"]["storage"]
    model = variables["MODEL"].partition("/")[2].removesuffix("-Instruct")
    row = re.search(rf"^\| {model} \| ([\d.]+) GB \| (\d+) Gi ", README, re.MULTILINE)
    assert row is not None and f"{row[2]}Gi" == claim
    for name, deployment in of_kind(resources, "Deployment").items():
        waits = "initContainers" in deployment["spec"]["template"]["spec"]
        assert waits == (name != "redis")
    assert not [place for resource in resources for place in missing_of(resource)]


def test_claims_and_cards_have_room_for_weights() -> None:
    rows = re.findall(r"^\| [\w.-]+ \| ([\d.]+) GB \| (\d+) Gi \| (\d+) GB", README, re.MULTILINE)
    assert len(rows) > 5
    for weights_gb, claim_gib, card_gb in rows:
        assert float(claim_gib) * 1.0737 > 1.2 * float(weights_gb)
        assert float(card_gb) * 0.9 > 1.5 * float(weights_gb)


@needs_kubectl
def test_the_commands_make_what_the_pods_read(resources: list[Resource]) -> None:
    needed = {name for name, _ in read_by(resources)} - {"triptych-hub"}
    (names,) = re.findall(r"secrets\.sh ([\w ]+) \|", COMMANDS)
    made = {f"triptych-{name}" for name in names.split()}
    made |= set(re.findall(r"create secret generic ([\w-]+)", COMMANDS))
    assert needed <= made and len(needed) >= 2
    assert re.findall(r"^# (\d+)\.", COMMANDS, re.MULTILINE) == [str(n) for n in range(1, 11)]


def test_what_the_commands_name_is_there() -> None:
    assert NAMES and all(f"`{name}`" in README for name in NAMES)
    paths = set(re.findall(r"(?<![\w/])(?:deploy|services|tests)/[\w./-]+", README))
    assert len(paths) > 4
    for path in paths:
        assert (ROOT / path).exists(), path
