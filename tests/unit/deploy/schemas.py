"""Schemas of every kind that the manifests use: Kubernetes' own, and those of other projects.

Kubernetes' are of the package kubernetes-validate. Those of KEDA, prometheus-operator, cert-manager
and the Gateway API are in `crds/`, whole but for their descriptions, with the repository, the path
and the commit that they are from. Rules in CEL (`x-kubernetes-validations`) are not evaluated: an
API server does (`tests/cluster`).

    python -m tests.unit.deploy.schemas PATH_OF_CLONES    # reads them anew, at each clone's HEAD
"""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils as kubernetes_validate
import yaml

from tests.unit.deploy.kustomize import LOADER, Resource

# Each validation would read the definitions of all kinds, and list the versions, again.
for _name in ("schema_contents", "all_versions"):
    setattr(kubernetes_validate, _name, functools.cache(getattr(kubernetes_validate, _name)))

_CRDS = Path(__file__).parent / "crds"
_PROMETHEUS = "example/prometheus-operator-crd/monitoring.coreos.com_"
# By repository; each is licensed under Apache-2.0.
_SOURCES = {
    "kedacore/keda": [
        "config/crd/bases/keda.sh_scaledobjects.yaml",
        "config/crd/bases/keda.sh_triggerauthentications.yaml",
    ],
    "prometheus-operator/prometheus-operator": [
        f"{_PROMETHEUS}podmonitors.yaml", f"{_PROMETHEUS}prometheusrules.yaml",
    ],
    "cert-manager/cert-manager": [
        "deploy/crds/cert-manager.io_certificates.yaml",
        "deploy/crds/cert-manager.io_issuers.yaml",
    ],
    "kubernetes-sigs/gateway-api": [
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"
    ],
}  # fmt: skip


def validate(resource: Resource, version: str) -> None:
    """Checks a resource strictly: a field that the schema does not know is an error.

    Args:
        version: of Kubernetes, for its own kinds.

    Raises:
        jsonschema.ValidationError: of a custom kind.
        kubernetes_validate.ValidationError: of a kind of Kubernetes.
        LookupError: a kind that nobody knows.
    """
    if resource["kind"] in FOREIGN:
        _validator(resource["kind"]).validate(resource)
        return
    try:
        kubernetes_validate.validate(resource, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        raise LookupError(f"no schema of {resource['apiVersion']} {resource['kind']}") from None


FOREIGN = frozenset(path.stem for path in _CRDS.glob("*.json"))


@functools.cache
def _validator(kind: str) -> Any:
    found = json.loads((_CRDS / f"{kind}.json").read_text())
    schema = _strict(found["schema"])
    schema["properties"] |= {
        "apiVersion": {"const": found["apiVersion"]}, "kind": {"const": kind},
    }  # fmt: skip
    schema["required"] = [*schema.get("required", ()), "apiVersion", "kind", "metadata"]
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """As an API server prunes: what is not said is not there."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(value) for name, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        found["additionalProperties"] = False
    return found


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    # A property may be called so; its value is a schema.
    return {
        name: _without_descriptions(value)
        for name, value in node.items()
        if name != "description" or not isinstance(value, str)
    }


def _read(clone: Path, repository: str, path: str) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(clone), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    spec = yaml.load(git("show", f"HEAD:{path}"), LOADER)["spec"]
    (version,) = (v for v in spec["versions"] if v["storage"])
    content = {
        "source": f"{repository}, {path}, commit {git('rev-parse', 'HEAD')}",
        "licence": "Apache-2.0",
        "apiVersion": f"{spec['group']}/{version['name']}",
        "schema": _without_descriptions(version["schema"]["openAPIV3Schema"]),
    }
    kind = spec["names"]["kind"]
    (_CRDS / f"{kind}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    """Writes `crds/` from clones, OWNER+NAME in one directory."""
    _CRDS.mkdir(exist_ok=True)
    for repository, paths in _SOURCES.items():
        for path in paths:
            _read(Path(sys.argv[1]) / repository.replace("/", "+"), repository, path)


if __name__ == "__main__":
    main()
