"""Another namespace, and two installations in one cluster: everything follows."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.combinations import INSTALLATIONS, K8S, combine, installed
from tests.unit.deploy.kustomize import Resource, by_kubectl, render
from tests.unit.deploy.schemas import validate
from tests.unit.deploy.test_components import (
    KUBERNETES_VERSION,
    of_kind,
    pods,
    test_no_policy_asks_pods_of_other_namespaces_for_labels_of_ours,
)

__all__ = ["test_no_policy_asks_pods_of_other_namespaces_for_labels_of_ours"]  # here, too
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders them")
CLUSTER_WIDE = {"Namespace", "PriorityClass"}
_SELECTOR = re.compile(r"\btriptych_(?:gateway|encoder|decoder)_\w+\{([^}]*)\}")


@pytest.fixture(scope="module", params=INSTALLATIONS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def resources(name: str, tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    directory = installed(name, tmp_path_factory.mktemp("own") / "own")
    return by_kubectl(directory)


def strings(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [text for value in inner for text in strings(value)]


def test_every_object_is_valid_and_has_the_namespace_and_the_suffix(
    name: str, resources: list[Resource]
) -> None:
    _, _, namespace, instance = INSTALLATIONS[name]
    suffix = "" if instance == "triptych" else f"-{instance}"
    for resource in resources:
        kind, metadata = resource["kind"], resource["metadata"]
        assert metadata.get("namespace") == (None if kind in CLUSTER_WIDE else namespace)
        if kind == "Namespace":
            assert metadata["name"] == namespace
        else:
            pattern = rf".*{suffix}(-[a-z0-9]{{10}})?"
            assert re.fullmatch(pattern, metadata["name"]), metadata["name"]
        validate(resource, KUBERNETES_VERSION)


def test_queries_and_rules_ask_for_this_installation(name: str, resources: list[Resource]) -> None:
    _, _, namespace, instance = INSTALLATIONS[name]
    ours = f'namespace="{namespace}",installation="{instance}"'
    queries = [
        text
        for kind in ("ScaledObject", "PrometheusRule")
        for resource in of_kind(resources, kind).values()
        for text in strings(resource["spec"])
        if "{" in text and "$" not in text
    ]
    selectors = [found for query in queries for found in _SELECTOR.findall(query)]
    asks = of_kind(resources, "ScaledObject") | of_kind(resources, "PrometheusRule")
    assert bool(selectors) == bool(asks)
    for scaler in of_kind(resources, "HorizontalPodAutoscaler").values():
        for metric in scaler["spec"]["metrics"]:
            if external := metric.get("external"):
                selector = external["metric"]["selector"]
                assert selector == {"matchLabels": {"installation": instance}}
    assert all(found == ours or found.startswith(f"{ours},") for found in selectors)
    for query in queries:
        assert len(re.findall('namespace="', query)) == query.count(f'namespace="{namespace}"')
        assert query.count('"') % 2 == 0


def test_names_in_fields_are_those_of_objects(name: str, resources: list[Resource]) -> None:
    services = of_kind(resources, "Service").keys()
    deployments = of_kind(resources, "Deployment").keys()
    data = {k: v for m in of_kind(resources, "ConfigMap").values() for k, v in m["data"].items()}
    addresses = [v for k, v in data.items() if k.endswith("_ADDRESSES")]
    assert addresses
    for address in addresses:
        found = re.fullmatch(r"dns:([a-z-]+):\d+", address)
        assert found is not None and found[1] in services
    for url in (v for k, v in data.items() if k.endswith("REDIS_URL")):
        found = re.fullmatch(r"redis://\w+@([a-z-]+)", url)
        assert found is not None and found[1] in services
    for pod in pods(resources).values():
        for variable in pod["spec"]["containers"][0].get("env", ()):
            assert not variable["name"].endswith("_HOST") or variable["value"] in services
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        for scaler in of_kind(resources, kind).values():
            assert scaler["spec"]["scaleTargetRef"]["name"] in deployments
            for trigger in scaler["spec"].get("triggers", ()):
                asked = trigger.get("authenticationRef", {}).get("name")
                assert asked is None or asked in of_kind(resources, "TriggerAuthentication")
    for route in of_kind(resources, "HTTPRoute").values():
        for rule in route["spec"]["rules"]:
            assert all(backend["name"] in services for backend in rule["backendRefs"])
    for ingress in of_kind(resources, "Ingress").values():
        for path in ingress["spec"]["rules"][0]["http"]["paths"]:
            assert path["backend"]["service"]["name"] in services
    claims = of_kind(resources, "PersistentVolumeClaim").keys()
    templates = of_kind(resources, "ResourceClaimTemplate").keys()
    accounts = of_kind(resources, "ServiceAccount").keys()
    for pod in pods(resources).values():
        assert pod["spec"]["serviceAccountName"] in accounts
        for claim in pod["spec"].get("resourceClaims", ()):
            assert claim["resourceClaimTemplateName"] in templates
        for volume in pod["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in claims
        for container in pod["spec"]["containers"]:
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in of_kind(resources, "ConfigMap")
    issuers = of_kind(resources, "Issuer")
    for certificate in of_kind(resources, "Certificate").values():
        assert certificate["spec"]["issuerRef"]["name"] in issuers


def selectors_of(resources: list[Resource]) -> list[dict[str, str]]:
    """Each selector that chooses pods, but not of the policies that are for a whole namespace."""
    found: list[dict[str, str]] = []
    for resource in resources:
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Service":
                found.append(spec["selector"])
            case "Deployment" | "PodDisruptionBudget" | "PodMonitor":
                found.append(spec["selector"]["matchLabels"])
            case "NetworkPolicy" if "matchLabels" in spec["podSelector"]:
                rules = [(rule, "from") for rule in spec.get("ingress", ())]
                rules += [(rule, "to") for rule in spec.get("egress", ())]
                peers = [peer for rule, side in rules for peer in rule.get(side, ())]
                found.append(spec["podSelector"]["matchLabels"])
                found += [
                    peer["podSelector"]["matchLabels"]
                    for peer in peers
                    if "podSelector" in peer and "namespaceSelector" not in peer
                ]
            case _:
                pass
    return found


def test_two_in_one_namespace_share_no_pod_and_no_name(
    name: str, resources: list[Resource]
) -> None:
    if INSTALLATIONS[name][3] == "triptych":
        pytest.skip("the name of the other one")
    other = render(K8S / "overlays" / INSTALLATIONS[name][0])
    for ours, theirs in ((resources, other), (other, resources)):
        selectors = selectors_of(ours)
        assert len(selectors) > 5
        for pod in pods(theirs).values():
            labels = pod["metadata"]["labels"].items()
            assert not [s for s in selectors if s.items() <= labels]
        for selector in selectors:
            own = [p["metadata"]["labels"].items() for p in pods(ours).values()]
            # Cells leave the rules for encoders without pods.
            is_left = selector.get("app.kubernetes.io/name") == "encoder" and name == "blue-cell"
            assert is_left or any(selector.items() <= labels for labels in own)
    keys = [{(r["kind"], r["metadata"]["name"]) for r in rs} for rs in (resources, other)]
    assert {kind for kind, _ in keys[0] & keys[1]} <= {"Namespace"}


def test_prometheus_is_named_once_and_may_ask_for_a_token(tmp_path: Path) -> None:
    directory = combine("gpu", *(f"autoscaling{p}" for p in ("", "/prometheus", "/bearer")),
                        directory=tmp_path / "own")  # fmt: skip
    path = directory / "kustomization.yaml"
    address = "https://prometheus.example.com"
    given = {
        "name": "prometheus",
        "literals": [f"address={address}"],
        "options": {"annotations": {"config.kubernetes.io/local-config": "true"}},
    }
    content = yaml.safe_load(path.read_text()) | {"configMapGenerator": [given]}
    path.write_text(yaml.safe_dump(content))
    resources = by_kubectl(directory)
    assert not [name for name in of_kind(resources, "ConfigMap") if "prometheus" in name]
    (authentication,) = of_kind(resources, "TriggerAuthentication")
    scalers = of_kind(resources, "ScaledObject").values()
    triggers = [trigger for scaler in scalers for trigger in scaler["spec"]["triggers"]]
    assert len(triggers) == 5
    for trigger in triggers:
        assert trigger["metadata"]["serverAddress"] == address
        assert trigger["metadata"]["authModes"] == "bearer"
        assert trigger["authenticationRef"] == {"name": authentication}
