"""The part of kustomize that our overlays use, so that a machine without kubectl can render them.

Supported: resources, components, namespace, labels, configMapGenerator (literals; create and
merge), images, replicas, patches (JSON 6902 with a target by kind and name). Anything else is an
error, so that no part of a kustomization is ignored. If kubectl is installed, a test compares the
result with `kubectl kustomize`.
"""

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = {
    "apiVersion", "kind", "resources", "namespace", "labels", "configMapGenerator", "images",
    "replicas", "patches", "components",
}  # fmt: skip
_CLUSTER_WIDE = {"Namespace"}
# The hash alphabet that kustomize uses to avoid words.
_HASH_LETTERS = str.maketrans("013ae", "ghkmt")


def render(directory: Path) -> list[Resource]:
    """The resources of a kustomization, with generated names as kustomize makes them."""
    resources = _compose(directory)
    hashed = {
        r["metadata"]["name"]: f"{r['metadata']['name']}-{_hash(r)}"
        for r in resources
        if r.get("kind") == "ConfigMap"
    }
    for resource in resources:
        if resource["kind"] == "ConfigMap":
            resource["metadata"]["name"] = hashed[resource["metadata"]["name"]]
        _rename_references(resource, hashed)
    return resources


def _compose(directory: Path, base: list[Resource] | None = None) -> list[Resource]:
    """The resources of a kustomization; a component adds to, and changes, those of `base`."""
    spec = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := set(spec) - _KNOWN:
        raise NotImplementedError(f"{directory}: {', '.join(sorted(unknown))}")
    resources: list[Resource] = base or []
    for name in spec.get("resources", ()):
        path = directory / name
        if path.is_dir():
            resources += _compose(path)
        else:
            resources += [d for d in yaml.safe_load_all(path.read_text()) if d]
    for name in spec.get("components", ()):
        _compose(directory / name, resources)
    for generator in spec.get("configMapGenerator", ()):
        _generate(resources, generator)
    for patch in spec.get("patches", ()):
        _patch(resources, patch)
    for replica in spec.get("replicas", ()):
        for resource in resources:
            if (resource["kind"], resource["metadata"]["name"]) == ("Deployment", replica["name"]):
                resource["spec"]["replicas"] = replica["count"]
    for image in spec.get("images", ()):
        for container in _containers(resources):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    for resource in resources:
        metadata = resource["metadata"]
        if "namespace" in spec and resource["kind"] not in _CLUSTER_WIDE:
            metadata["namespace"] = spec["namespace"]
        for label in spec.get("labels", ()):
            if set(label) != {"pairs"}:
                raise NotImplementedError(f"{directory}: labels with {set(label)}")
            metadata["labels"] = metadata.get("labels", {}) | label["pairs"]
    return resources


def _generate(resources: list[Resource], generator: dict[str, Any]) -> None:
    if unknown := set(generator) - {"name", "namespace", "behavior", "literals"}:
        raise NotImplementedError(f"configMapGenerator with {unknown}")
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    if generator.get("behavior", "create") == "merge":
        (found,) = (
            r
            for r in resources
            if r["kind"] == "ConfigMap" and r["metadata"]["name"] == generator["name"]
        )
        found["data"] |= data
        return
    metadata = {"name": generator["name"]}
    resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _patch(resources: list[Resource], patch: dict[str, Any]) -> None:
    kind, name = patch["target"]["kind"], patch["target"]["name"]
    targets = [
        r
        for r in resources
        if r["kind"] == kind and re.fullmatch(name, r["metadata"]["name"]) is not None
    ]
    if not targets:
        raise LookupError(f"no {kind} {name} to patch")
    for operation in yaml.safe_load(patch["patch"]):
        for target in targets:
            _apply(target, copy.deepcopy(operation))


def _apply(document: Any, operation: dict[str, Any]) -> None:
    *parents, last = (
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"][1:].split("/")
    )
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    match operation["op"], document:
        case "add", list() if last == "-":
            document.append(operation["value"])
        case "add", dict():
            document[last] = operation["value"]
        case "replace", list():
            document[int(last)] = operation["value"]
        case "replace", dict():
            if last not in document:
                raise LookupError(f"nothing to replace at {operation['path']}")
            document[last] = operation["value"]
        case _:
            raise NotImplementedError(f"{operation['op']} at {operation['path']}")


def _containers(resources: list[Resource]) -> list[dict[str, Any]]:
    return [
        container
        for resource in resources
        if resource["kind"] == "Deployment"
        for container in resource["spec"]["template"]["spec"]["containers"]
    ]


def _rename_references(resource: Resource, names: dict[str, str]) -> None:
    for container in _containers([resource]):
        for source in container.get("envFrom", ()):
            if reference := source.get("configMapRef"):
                reference["name"] = names[reference["name"]]


def _hash(config_map: Resource) -> str:
    content = {
        "data": config_map["data"],
        "kind": "ConfigMap",
        "name": "",  # the hash is taken before the name is known
    }
    encoded = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(encoded.encode()).hexdigest()[:10].translate(_HASH_LETTERS)
