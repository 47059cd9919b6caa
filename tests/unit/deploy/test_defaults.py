"""A second apply changes nothing: what an API server would fill in is written out where it counts.

Within a list or a map that is replaced as a whole (atomic), a value that the server adds is a
difference from the manifest: each apply takes it away again, and a server-side apply conflicts with
whoever set it. So are keys of lists that are merged by them, and empty lists, which the server
drops. `tests/cluster/test_trials.py` asks a real API server.
"""

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources as files
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.combinations import COMBINATIONS, combine
from tests.unit.deploy.kustomize import Resource, render

SCHEMAS = files.files("kubernetes_validate") / "kubernetes-json-schema"
# What the server fills in, by type.
DEFAULTS = {
    "io.k8s.api.networking.v1.NetworkPolicyPort": {"protocol"},
    "io.k8s.api.core.v1.ResourceFieldSelector": {"divisor"},
    "io.k8s.api.core.v1.ObjectFieldSelector": {"apiVersion"},
    "io.k8s.api.resource.v1.ExactDeviceRequest": {"allocationMode", "count"},
}
CUSTOM_GROUPS = {
    "keda.sh", "monitoring.coreos.com", "cert-manager.io", "gateway.networking.k8s.io",
}  # fmt: skip
# Of custom resources, whose lists are atomic: by the field that holds the list.
CUSTOM_DEFAULTS = {
    "parentRefs": {"group", "kind"},
    "backendRefs": {"group", "kind", "weight"},
}


@cache
def definitions() -> dict[str, Any]:
    path = SCHEMAS / "v1.37.0-local" / "_definitions.json"
    found = json.loads(path.read_text())
    return found.get("$defs") or found["definitions"]


def resolved(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A schema and its type's name; empty without one."""
    reference = schema.get("$ref") or next(
        (part["$ref"] for part in schema.get("allOf", ()) if "$ref" in part), ""
    )
    name = reference.rpartition("/")[2]
    return name, definitions()[name] | schema if name else schema


def missing(node: Any, schema: dict[str, Any], path: str, atomic: bool = False) -> Iterator[str]:
    name, schema = resolved(schema)
    if isinstance(node, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        atomic |= schema.get("x-kubernetes-list-type", "atomic") == "atomic"
        if not node:
            yield f"{path} is empty"
        for number, item in enumerate(node):
            where = f"{path}/{number}"
            yield from (f"{where}/{key}" for key in keys if key not in item)
            yield from missing(item, schema.get("items", {}), where, atomic)
    elif isinstance(node, dict):
        atomic |= schema.get("x-kubernetes-map-type") == "atomic"
        if atomic:
            yield from (f"{path}/{f}" for f in DEFAULTS.get(name, set()) - node.keys())
        for key, value in node.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties") or {})
            yield from missing(
                value, inner if isinstance(inner, dict) else {}, f"{path}/{key}", atomic
            )


def missing_of(resource: Resource) -> list[str]:
    """Places in a resource that an API server would fill in."""
    version, kind = resource["apiVersion"], resource["kind"]
    group, _, version = version.rpartition("/")
    core = {"": "core"} | {g: g for g in ("apps", "batch", "policy", "autoscaling")}
    short = core.get(group) or group.removesuffix(".k8s.io")
    name = f"io.k8s.api.{short}.{version}.{kind}"
    found = list(missing(resource, {"$ref": f"#/{name}"} if name in definitions() else {}, kind))
    if name not in definitions():
        assert group in CUSTOM_GROUPS, name
        found += [
            f"{kind}/{field}/{key}"
            for field, keys in CUSTOM_DEFAULTS.items()
            for item in _items(resource, field)
            for key in keys - item.keys()
        ]
    return found


def _items(node: Any, field: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield from node.get(field, ())
        for value in node.values():
            yield from _items(value, field)
    elif isinstance(node, list):
        for item in node:
            yield from _items(item, field)


@pytest.mark.parametrize("name", ["local", "text", "gpu", *COMBINATIONS])
def test_nothing_is_left_to_the_server_that_an_apply_would_take_away(
    name: str, tmp_path: Path
) -> None:
    names = COMBINATIONS.get(name, (name,))
    for resource in render(combine(*names, directory=tmp_path / "own")):
        assert not missing_of(resource)


def test_what_is_left_out_is_noticed(tmp_path: Path) -> None:
    resources = {
        (r["kind"], r["metadata"]["name"]): r
        for r in render(combine("gpu", "dra", "http-route", directory=tmp_path / "own"))
    }
    policy = resources["NetworkPolicy", "decoder"]
    del policy["spec"]["ingress"][0]["ports"][0]["protocol"]
    assert missing_of(policy) == ["NetworkPolicy/spec/ingress/0/ports/0/protocol"]
    decoder = resources["Deployment", "decoder"]
    (container,) = decoder["spec"]["template"]["spec"]["containers"]
    del container["env"][0]["valueFrom"]["resourceFieldRef"]["divisor"]
    del container["ports"][0]["protocol"]
    container["envFrom"] = []
    assert len(missing_of(decoder)) == 3
    claim = resources["ResourceClaimTemplate", "gpu"]
    del claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"]
    assert len(missing_of(claim)) == 1
    route = resources["HTTPRoute", "gateway"]
    del route["spec"]["rules"][0]["backendRefs"][0]["weight"]
    assert missing_of(route) == ["HTTPRoute/backendRefs/weight"]
