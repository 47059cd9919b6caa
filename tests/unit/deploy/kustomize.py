"""The part of kustomize that our overlays use, so that a machine without kubectl can render them.

Supported: resources, components, namespace, labels, configMapGenerator (literals and files; create
and merge), images, replicas, patches (JSON 6902, or strategic merge with lists whose keys are known
here). Anything else is an error, so that no part of a kustomization is ignored. If kubectl is
installed, a test compares the result with `kubectl kustomize`.
"""

import copy
import functools
import hashlib
import json
import marshal
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

# The parser in C, where PyYAML has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Resource = dict[str, Any]

_KNOWN = {
    "apiVersion", "kind", "resources", "namespace", "labels", "configMapGenerator", "images",
    "replicas", "patches", "components",
}  # fmt: skip
_CLUSTER_WIDE = {"Namespace", "PriorityClass"}
_WITH_PODS = {"Deployment", "Job"}
# By what a strategic merge finds an item of a list; lists of other names are replaced.
_MERGE_KEYS = {
    "containers": "name", "env": "name", "volumes": "name", "claims": "name",
    "resourceClaims": "name", "ports": "containerPort", "volumeMounts": "mountPath",
}  # fmt: skip
# The hash alphabet that kustomize uses to avoid words.
_HASH_LETTERS = str.maketrans("013ae", "ghkmt")


@functools.cache
def _documents(text: str) -> list[bytes]:
    return [marshal.dumps(document) for document in yaml.load_all(text, LOADER) if document]


def documents(text: str) -> list[Any]:
    """Those of a YAML file, but for empty ones; each call's are its own. A text is read once: most
    are parts of many kustomizations.
    """
    return [marshal.loads(document) for document in _documents(text)]  # noqa: S302 - our own


def render(directory: Path) -> list[Resource]:
    """The resources of a kustomization, with generated names as kustomize makes them."""
    resources = _compose(directory)
    hashed = {
        r["metadata"]["name"]: f"{r['metadata']['name']}-{_hash(r)}"
        for r in resources
        if r.get("kind") == "ConfigMap" and not r.pop("unhashed", False)
    }
    for resource in resources:
        if resource["kind"] == "ConfigMap" and resource["metadata"]["name"] in hashed:
            resource["metadata"]["name"] = hashed[resource["metadata"]["name"]]
        _rename_references(resource, hashed)
    return resources


def by_kubectl(directory: Path) -> list[Resource]:
    """What kubectl renders; a process that lives so shortly need not collect its garbage."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        env={**os.environ, "GOGC": "off"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return list(yaml.load_all(done.stdout, LOADER))


def by_name(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    """For a comparison in which their order is nothing."""
    return {(r["kind"], r["metadata"]["name"]): r for r in resources}


def _compose(directory: Path, base: list[Resource] | None = None) -> list[Resource]:
    """The resources of a kustomization; a component adds to, and changes, those of `base`."""
    (spec,) = documents((directory / "kustomization.yaml").read_text())
    if unknown := set(spec) - _KNOWN:
        raise NotImplementedError(f"{directory}: {', '.join(sorted(unknown))}")
    resources: list[Resource] = base or []
    for name in spec.get("resources", ()):
        path = directory / name
        if path.is_dir():
            resources += _compose(path)
        else:
            resources += documents(path.read_text())
    for name in spec.get("components", ()):
        _compose(directory / name, resources)
    for generator in spec.get("configMapGenerator", ()):
        _generate(resources, generator, directory)
    for patch in spec.get("patches", ()):
        _patch(resources, patch, directory)
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
        if "namespace" in spec and resource["kind"] == "Namespace":
            metadata["name"] = spec["namespace"]
        for label in spec.get("labels", ()):
            if not set(label) <= {"pairs", "includeTemplates", "includeSelectors"}:
                raise NotImplementedError(f"{directory}: labels with {set(label)}")
            metadata["labels"] = metadata.get("labels", {}) | label["pairs"]
            selects = label.get("includeSelectors", False)
            if (selects or label.get("includeTemplates")) and resource["kind"] in _WITH_PODS:
                pod = resource["spec"]["template"]["metadata"]
                pod["labels"] = pod.get("labels", {}) | label["pairs"]
            if selects:
                for selector in _selectors(resource):
                    selector |= label["pairs"]
    return resources


def _selectors(resource: Resource) -> list[dict[str, str]]:
    """What kustomize takes for a selector by labels."""
    spec = resource.get("spec", {})
    match resource["kind"]:
        case "Service":
            return [spec["selector"]]
        case "Deployment":
            spread = spec["template"]["spec"].get("topologySpreadConstraints", ())
            found = [spec["selector"], *(constraint["labelSelector"] for constraint in spread)]
        case "PodDisruptionBudget":
            found = [spec["selector"]]
        case "NetworkPolicy":
            rules = [(rule, "from") for rule in spec.get("ingress", ())]
            rules += [(rule, "to") for rule in spec.get("egress", ())]
            peers = [peer for rule, side in rules for peer in rule.get(side, ())]
            found = [spec["podSelector"], *(p["podSelector"] for p in peers if "podSelector" in p)]
        case _:
            found = []
    return [selector["matchLabels"] for selector in found if "matchLabels" in selector]


def _generate(resources: list[Resource], generator: dict[str, Any], directory: Path) -> None:
    options = generator.get("options", {})
    known = {"name", "namespace", "behavior", "literals", "files", "options"}
    if unknown := (set(generator) - known) | (
        set(options) - {"labels", "annotations", "disableNameSuffixHash"}
    ):
        raise NotImplementedError(f"configMapGenerator with {unknown}")
    data = dict(literal.split("=", 1) for literal in generator.get("literals", ()))
    data |= {name: (directory / name).read_text() for name in generator.get("files", ())}
    if generator.get("behavior", "create") == "merge":
        (found,) = (
            r
            for r in resources
            if r["kind"] == "ConfigMap" and r["metadata"]["name"] == generator["name"]
        )
        found["data"] |= data
        return
    metadata = {"name": generator["name"]}
    metadata |= {name: options[name] for name in ("labels", "annotations") if name in options}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    if options.get("disableNameSuffixHash"):
        found["unhashed"] = True
    resources.append(found)


def _patch(resources: list[Resource], patch: dict[str, Any], directory: Path) -> None:
    (body,) = documents(patch.get("patch") or (directory / patch["path"]).read_text())
    if "target" in patch:
        kind, name = patch["target"]["kind"], patch["target"].get("name", ".*")
    else:
        kind, name = body["kind"], re.escape(body["metadata"]["name"])
    targets = [
        r
        for r in resources
        if r["kind"] == kind and re.fullmatch(name, r["metadata"]["name"]) is not None
    ]
    if not targets:
        raise LookupError(f"no {kind} {name} to patch")
    for target in targets:
        if isinstance(body, list):
            for operation in body:
                _apply(target, copy.deepcopy(operation))
        elif body.get("$patch") == "delete":
            resources.remove(target)
        else:
            _merge(target, {"spec": copy.deepcopy(body["spec"])})


def _merge(document: dict[str, Any], patch: dict[str, Any]) -> None:
    """Strategic merge, as far as our patches go."""
    for name, value in patch.items():
        if value is None:
            document.pop(name, None)
        elif isinstance(value, dict) and isinstance(document.get(name), dict):
            _merge(document[name], value)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            document[name] = _merged_list(document.get(name, []), value, _MERGE_KEYS[name])
        else:
            document[name] = value


def _merged_list(
    items: list[dict[str, Any]], patches: list[dict[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Patched and new items first, as kustomize has them."""
    others = {item[key]: item for item in items}
    first: list[dict[str, Any]] = []
    for patch in patches:
        item = others.pop(patch[key], {})
        if patch.get("$patch") != "delete":
            _merge(item, patch)
            first.append(item)
    return first + list(others.values())


def _apply(document: Any, operation: dict[str, Any]) -> None:
    *parents, last = (
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"][1:].split("/")
    )
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    match operation["op"], document:
        case "add", list() if last == "-":
            document.append(operation["value"])
        case "remove", dict():
            del document[last]
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
