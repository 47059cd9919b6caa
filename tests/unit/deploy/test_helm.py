"""The Helm chart renders what kustomize renders for the same choices, object by object.

helm itself renders the chart, and kubectl the kustomizations. Whole objects are compared. What has
no meaning for a cluster is made equal before: the order of some lists, the hash in names of
ConfigMaps, and the chart's annotation with a hash of the settings, which takes the place of that
hash. The namespace is not part of the chart.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.ensure_helm import find_helm
from tests.unit.deploy.combinations import K8S
from tests.unit.deploy.helm_choices import CHOICES, Choice
from tests.unit.deploy.kustomize import LOADER, Resource, by_kubectl
from tests.unit.deploy.schemas import validate
from tests.unit.deploy.test_defaults import missing_of

ROOT = K8S.parents[1]
CHART = ROOT / "deploy" / "helm" / "triptych"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
VERSIONS = ("1.34", "1.37")
HELM = find_helm()
pytestmark = [
    pytest.mark.skipif(HELM is None, reason="helm renders the chart (scripts/ensure_helm.py)"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders kustomizations"),
]
# Lists whose order has no meaning, by name.
_UNORDERED = {
    "env", "volumes", "volumeMounts", "ports", "egress", "ingress", "to", "from", "values",
    "tolerations", "items", "matchExpressions",
}  # fmt: skip
_HASH = re.compile(r"(.+)-[bcdfghkmt2456789]{10}")
INSTANCE = "app.kubernetes.io/instance"
Key = tuple[str, str]


# PodDisruptionBudgets are in no overlay; the examples have them.
_WITH_BUDGETS = ("qwen3-vl-2b-split", "qwen3-8b-split", "everything", "autoscaling-text", "blue")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run(
        [HELM, *arguments], env=os.environ | {"GOGC": "off"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def template(choice: Choice, directory: Path) -> list[Resource]:
    values = directory / "values.yaml"
    values.write_text(yaml.safe_dump(dict(choice.values)))
    files = [] if choice.file is None else ["-f", str(EXAMPLES / f"{choice.file}.yaml")]
    done = helm(
        "template", choice.release, str(CHART), "-n", choice.namespace, *files, "-f", str(values)
    )
    assert not done.returncode, done.stderr
    return [document for document in yaml.load_all(done.stdout, LOADER) if document]


def kustomize(choice: Choice, directory: Path) -> list[Resource]:
    """Renders the kustomization of a choice, without its namespace."""

    def written(folder: Path, resource: Path, components: tuple[str, ...], **more: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(resource, folder.resolve())],
            "components": [
                os.path.relpath(K8S / "components" / name, folder.resolve()) for name in components
            ],
            **more,
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return folder

    app = directory / "app"
    if choice.release == "triptych":
        # One level above the components, whose settings come after those of their own level.
        written(app, K8S / choice.resource, choice.components)
        built = written(directory / "top", app, (), **choice.more)
    else:  # as deploy/k8s/README.md says: names and queries follow one level above
        written(
            app, K8S / choice.resource, choice.components,
            namespace=choice.namespace, nameSuffix=f"-{choice.release}",
            labels=[{"pairs": {INSTANCE: choice.release}, "includeSelectors": True}],
        )  # fmt: skip
        built = written(directory / "top", app, ("follow",))
    return [resource for resource in by_kubectl(built) if resource["kind"] != "Namespace"]


def canonical(resources: list[Resource]) -> dict[Key, Resource]:
    """Objects by kind and name, without what has no meaning for a cluster."""
    hashed = {
        name: found[1]
        for resource in resources
        if resource["kind"] == "ConfigMap"
        and (found := _HASH.fullmatch(name := resource["metadata"]["name"]))
    }

    def made(node: Any, name: str = "") -> Any:
        if isinstance(node, dict):
            found = {key: made(value, key) for key, value in node.items()}
            if name == "configMapRef" or (name == "metadata" and "name" in found):
                found["name"] = hashed.get(found["name"], found["name"])
            if name == "metadata" and "annotations" in found:
                found["annotations"].pop("checksum/settings", None)
                if not found["annotations"]:
                    del found["annotations"]
            return found
        if isinstance(node, list):
            items = [made(item) for item in node]
            if name in _UNORDERED:
                items.sort(key=lambda item: json.dumps(item, sort_keys=True))
            return items
        return node

    found: dict[Key, Resource] = {}
    for resource in resources:
        own = made(resource)
        key = (own["kind"], own["metadata"]["name"])
        assert key not in found, key
        found[key] = own
    return found


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yields the places where two canonical objects differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            inner = f"{path}/{name}"
            yield from differences(ours.get(name), theirs.get(name), inner)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{path}/{number}")
    elif ours != theirs:
        yield f"{path}: {ours!r} of helm, {theirs!r} of kustomize"


@pytest.mark.parametrize("name", CHOICES)
def test_helm_and_kustomize_render_the_same_objects(name: str, tmp_path: Path) -> None:
    choice = CHOICES[name]
    ours = canonical(template(choice, tmp_path))
    theirs = canonical(kustomize(choice, tmp_path))
    assert ours.keys() == theirs.keys()
    for key, resource in theirs.items():
        assert not list(differences(ours[key], resource, "/".join(key)))
    assert any(kind == "PodDisruptionBudget" for kind, _ in ours) == (name in _WITH_BUDGETS)
    for resource in ours.values():
        for version in VERSIONS:
            validate(resource, version)


@pytest.mark.parametrize("name", CHOICES)
def test_a_server_fills_in_nothing(name: str, tmp_path: Path) -> None:
    for resource in template(CHOICES[name], tmp_path):
        assert not missing_of(resource)


def test_a_difference_is_noticed(tmp_path: Path) -> None:
    """Each of these is one value in one object; the comparison has to see it."""
    choice = CHOICES["gpu"]
    theirs = canonical(kustomize(choice, tmp_path))
    for values in (
        {"gateway": {"replicas": 3}}, {"decoder": {"settings": {"DECODER_STEP_MS": "20"}}},
        {"gpu": {"computeMajor": ["8"]}}, {"networkPolicy": {"enabled": False}},
        {"redis": {"maxMemory": "2gb"}}, {"imagePullSecrets": [{"name": "pull"}]},
        {"storage": {"existingClaim": "mine"}},
    ):  # fmt: skip
        other = Choice(choice.resource, dict(choice.values) | values)
        assert canonical(template(other, tmp_path)) != theirs


def test_a_claim_that_is_there_is_used_and_none_is_made(tmp_path: Path) -> None:
    for form in ("single", "split"):
        values = {"form": form, "storage": {"existingClaim": "weights"}}
        resources = template(Choice("", values), tmp_path)
        assert "PersistentVolumeClaim" not in {r["kind"] for r in resources}
        claims = set(re.findall(r'"claimName": "([^"]+)"', json.dumps(resources)))
        assert claims == {"weights"}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"gatway": {}}, "gatway"),
        ({"form": "cell"}, "form"),
        ({"single": {"gpu": 2}}, "gpu"),
        ({"decoder": {"settings": {"DECODER_STEP_MS": 20}}}, "DECODER_STEP_MS"),
        ({"images": {"gateway": {"digest": "latest"}}}, "digest"),
        ({"autoscaling": {"prometheus": "prometheus:9090"}}, "prometheus"),
        ({"model": {"name": ""}}, "model.name is empty"),
        ({"form": "split", "adapters": {"served": {"sql": "ORG/SQL"}}}, "adapters.served.sql"),
        ({"adapters": {"served": {"a b": "/adapters/sql"}}}, "a b"),
    ],
)
def test_a_mistake_in_values_is_named(values: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = helm("template", "triptych", str(CHART), "-f", str(path))
    assert done.returncode and word in done.stderr


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    """An open value would let misspelt names pass."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.load((CHART / "values.yaml").read_text(), LOADER)

    def walk(node: Any, value: Any, path: str) -> None:
        if "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        if not isinstance(value, dict) or "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        optional = {"global", "replicas", "sequences", "gpus"}
        assert value.keys() <= node["properties"].keys(), path
        assert node["properties"].keys() - value.keys() <= optional, path
        for name, inner in value.items():
            walk(node["properties"][name], inner, f"{path}.{name}")

    walk(schema, values, "")


def test_the_chart_is_sound_and_of_the_projects_version(tmp_path: Path) -> None:
    linted = helm("lint", "--strict", str(CHART))
    assert not linted.returncode, linted.stdout
    chart = yaml.load((CHART / "Chart.yaml").read_text(), LOADER)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
    # A package carries the files that are links here.
    packed = helm("package", str(CHART), "-d", str(tmp_path))
    assert not packed.returncode, packed.stderr
    (archive,) = tmp_path.glob("triptych-*.tgz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    linked = [path for path in (CHART / "files").iterdir() if path.is_symlink()]
    assert len(linked) == len(list((CHART / "files").iterdir())) > 4
    for path in linked:
        copy = tmp_path / "unpacked" / "triptych" / "files" / path.name
        assert not copy.is_symlink() and copy.read_bytes() == path.read_bytes()


def test_each_example_is_compared() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.yaml")}
    assert names == {choice.file for choice in CHOICES.values()} - {None}
    readme = (CHART.parent / "README.md").read_text()
    assert all(f"`{name}.yaml`" in readme for name in names)


@pytest.mark.parametrize("flag", ["--set", "--set-string"])
def test_a_generation_of_cards_may_be_a_number(flag: str) -> None:
    done = helm("template", str(CHART), flag, "gpu.computeMajor={8,9}")
    assert 'values: ["8","9"]' in done.stdout, done.stderr
