"""Other projects' kinds are checked with their own schemas, strictly."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.unit.deploy.combinations import COMBINATIONS, combine
from tests.unit.deploy.kustomize import Resource, render
from tests.unit.deploy.schemas import FOREIGN, validate

CRDS = Path(__file__).parent / "crds"
VERSION = "1.37"
# By kind: the combination that has it, and mistakes, each a path and a value.
MISTAKES: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "ScaledObject": ("autoscaling", [
        ("spec/minReplicas", 1), ("spec/maxReplicaCount", "8"), ("spec/triggers/0/metadat", {}),
        ("spec/fallback/behavior", "currentReplicasIfFewer"),
        ("spec/triggers/0/metadata/threshold", 0.75),  # numbers are text there
        ("apiVersion", "keda.sh/v1"),
    ]),
    "PodMonitor": ("monitoring", [
        ("spec/podMetricsEndpoints/0/intervall", "1s"),
        ("spec/podMetricsEndpoints/0/interval", "15 s"),
        ("spec/podMetricsEndpoints/0/relabelings/0/action", "renam"),
    ]),
    "PrometheusRule": ("monitoring", [
        ("spec/groups/0/rules/0/for", "two minutes"), ("spec/groups/0/rules/0/severity", "high"),
    ]),
    "Certificate": ("mtls", [
        ("spec/usages", ["serve auth"]), ("spec/privateKey/algorithm", "DSA"),
        ("spec/dnsName", "x"),
    ]),
    "Issuer": ("mtls", [("spec/selfSigend", {}), ("spec/ca", {"secret": "x"})]),
    "HTTPRoute": ("http-route", [
        ("spec/rules/0/timeouts/request", "5 minutes"), ("spec/rules/0/backendRefs/0/port", 99999),
        ("spec/rules/0/matches/0/path/type", "Prefix"), ("spec/hostname", "x"),
    ]),
    "TriggerAuthentication": ("", [
        ("spec/secretTargetRef/0/secret", "x"), ("spec/secretTargetRef/0", {"name": "x"}),
    ]),
}  # fmt: skip
AUTHENTICATION = {
    "apiVersion": "keda.sh/v1alpha1", "kind": "TriggerAuthentication", "metadata": {"name": "x"},
    "spec": {"secretTargetRef": [{"parameter": "bearerToken", "name": "s", "key": "token"}]},
}  # fmt: skip


def changed(resource: Resource, path: str, value: object) -> Resource:
    found: Any = copy.deepcopy(resource)
    *parents, last = path.split("/")
    node = found
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[int(last) if last.isdigit() else last] = value
    return found


@pytest.mark.parametrize("kind", sorted(FOREIGN))
def test_mistakes_are_refused(kind: str, tmp_path: Path) -> None:
    combination, mistakes = MISTAKES[kind]
    if combination:
        rendered = render(combine(*COMBINATIONS[combination], directory=tmp_path / "own"))
        resource = next(r for r in rendered if r["kind"] == kind)
    else:
        resource = AUTHENTICATION
    validate(resource, VERSION)
    assert mistakes
    for path, value in mistakes:
        with pytest.raises(jsonschema.ValidationError):
            validate(changed(resource, path, value), VERSION)


def test_each_kind_that_is_used_has_a_schema_with_its_source(tmp_path: Path) -> None:
    used: set[str] = set()
    for name, names in COMBINATIONS.items():
        rendered = render(combine(*names, directory=tmp_path / name))
        used |= {r["kind"] for r in rendered if r["kind"] in FOREIGN}
    assert used | {"TriggerAuthentication"} == FOREIGN
    for path in CRDS.iterdir():
        found = json.loads(path.read_text())
        assert re.fullmatch(r"[\w-]+/[\w-]+, [\w./-]+\.yaml, commit [0-9a-f]{40}", found["source"])
        assert found["licence"] == "Apache-2.0"


def test_a_kind_without_a_schema_is_no_silent_pass() -> None:
    with pytest.raises(LookupError, match=r"example\.com/v1 Widget"):
        validate({"apiVersion": "example.com/v1", "kind": "Widget"}, VERSION)
