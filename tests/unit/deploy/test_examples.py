"""examples/: every image from one place, pods that wait for the model, commands that fit."""

import re
import shutil
from typing import Any

import pytest

from tests.unit.deploy.combinations import K8S, VERSION
from tests.unit.deploy.kustomize import Resource, by_kubectl
from tests.unit.deploy.schemas import validate
from tests.unit.deploy.test_components import KUBERNETES_VERSION, of_kind, pods
from tests.unit.deploy.test_defaults import missing_of
from tests.unit.deploy.test_secrets import read_by

EXAMPLES = K8S / "examples"
ROOT = K8S.parents[1]
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/kustomization.yaml"))
SINGLE = [name for name in NAMES if name.endswith("-single")]
SPLIT = [name for name in NAMES if name not in SINGLE]
# The commands of one pod, and those of a pod for each service.
SINGLE_COMMANDS, SPLIT_COMMANDS = re.findall(r"^```sh\n(# 1\..*?)^```", README, re.M | re.S)
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders them")


@pytest.fixture(scope="module", params=NAMES)
def example(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def resources(example: str) -> list[Resource]:
    return by_kubectl(EXAMPLES / example)


def commands_of(example: str) -> str:
    """The README's commands, as it says to change them for this example."""
    if example not in SINGLE:
        return SPLIT_COMMANDS
    if example == "qwen3-vl-2b-single":
        return SINGLE_COMMANDS
    return SINGLE_COMMANDS.replace("-gpu-8.9", "-gpu").replace("=8.9", "=9.0a")


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
def test_every_image_of_ours_comes_from_the_registry(
    example: str, resources: list[Resource]
) -> None:
    images = {c["image"] for c in containers(resources) if not c["image"].startswith("redis:")}
    assert len(images) == 1 if example in SINGLE else len(images) >= 2
    for image in images:
        assert re.fullmatch(rf"registry\.example\.com/triptych/\w+:{VERSION}(-gpu)?(-8\.9)?", image)
        built = image.replace("registry.example.com", "$REGISTRY")
        text = commands_of(example)
        assert f"docker build -t {built} " in text
        # Pushed by its name, or in the loop over names.
        assert (
            f"docker push {built}\n" in text
            or image.rpartition("/")[2]
            in text.partition("\nfor image in ")[2].partition(";")[0].split()
        )


@needs_kubectl
def test_the_claim_is_large_enough(example: str, resources: list[Resource]) -> None:
    claims = of_kind(resources, "PersistentVolumeClaim")
    claim = claims["model"]["spec"]["resources"]["requests"]["storage"]
    if example in SINGLE:
        (data,) = (r["data"] for r in resources if r["kind"] == "ConfigMap")
    else:
        (download,) = pods(resources)["model-download"]["spec"]["containers"]
        data = {v["name"]: v.get("value") for v in download["env"]}
    model = data["MODEL"].partition("/")[2].removesuffix("-Instruct")
    row = re.search(rf"^\| {model} \| ([\d.]+) GB \| (\d+) Gi ", README, re.MULTILINE)
    assert row is not None and f"{row[2]}Gi" == claim
    assert not [place for resource in resources for place in missing_of(resource)]


@needs_kubectl
def test_pods_for_each_service_wait_for_the_download(
    example: str, resources: list[Resource]
) -> None:
    for name, deployment in of_kind(resources, "Deployment").items():
        waits = "initContainers" in deployment["spec"]["template"]["spec"]
        assert waits == (example in SPLIT and name != "redis")


def test_claims_and_cards_have_room_for_weights() -> None:
    rows = re.findall(r"^\| [\w.-]+ \| ([\d.]+) GB \| (\d+) Gi \| (\d+) GB", README, re.MULTILINE)
    assert len(rows) > 5
    for weights_gb, claim_gib, card_gb in rows:
        assert float(claim_gib) * 1.0737 > 1.2 * float(weights_gb)
        assert float(card_gb) * 0.9 > 1.5 * float(weights_gb)


@needs_kubectl
def test_the_commands_make_what_the_pods_read(example: str, resources: list[Resource]) -> None:
    needed = {name for name, _ in read_by(resources)} - {"triptych-hub"}
    text = commands_of(example)
    names = re.findall(r"secrets\.sh ([\w ]+) \|", text)
    made = {f"triptych-{name}" for name in " ".join(names).split()}
    made |= set(re.findall(r"create secret generic ([\w-]+)", text))
    assert needed <= made and len(needed) >= (1 if example in SINGLE else 2)
    steps = re.findall(r"^# (\d+)\.", text, re.MULTILINE)
    assert steps == [str(n) for n in range(1, 7 if example in SINGLE else 11)]


def test_what_the_commands_name_is_there() -> None:
    assert NAMES and all(f"`{name}`" in README for name in NAMES)
    paths = set(re.findall(r"(?<![\w/])(?:deploy|services|tests)/[\w./-]+", README))
    assert len(paths) > 4
    for path in paths:
        assert (ROOT / path).exists(), path
