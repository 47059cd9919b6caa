"""The Redis of tenants' limits, and the number of gateways by which they are divided without it."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.combinations import COMBINATIONS, combine
from tests.unit.deploy.kustomize import Resource, render


def rendered(name: str, directory: Path) -> list[Resource]:
    return render(combine(*COMBINATIONS[name], directory=directory / "own"))


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name))
    return found


def settings(resources: list[Resource]) -> dict[str, str]:
    (found,) = (r for r in resources if r["kind"] == "ConfigMap" and "GATEWAY_HOST" in r["data"])
    return found["data"]


@pytest.mark.parametrize("name", ["priority", "tenant-limits", "autoscaling", "autoscaling-text"])
def test_limits_are_divided_by_as_many_gateways_as_there_may_be(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    spec = named(resources, "Deployment", "gateway")["spec"]
    if "replicas" in spec:
        most = spec["replicas"]
    else:
        most = named(resources, "HorizontalPodAutoscaler", "gateway")["spec"]["maxReplicas"]
    assert settings(resources)["GATEWAY_REPLICAS"] == str(most)


@pytest.mark.parametrize("name", ["tenant-limits", "tenant-limits-text"])
def test_gateways_alone_reach_the_redis_of_limits(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    deployment = named(resources, "Deployment", "limits")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    (server,) = deployment["template"]["spec"]["containers"]
    assert server["args"][server["args"].index("--maxmemory-policy") + 1] == "noeviction"
    service = named(resources, "Service", "limits")["spec"]
    assert service["selector"].items() <= labels.items()
    (port,) = service["ports"]
    gateway = named(resources, "Deployment", "gateway")["spec"]["template"]
    (url,) = (
        variable["valueFrom"]["secretKeyRef"]
        for variable in gateway["spec"]["containers"][0]["env"]
        if variable["name"] == "GATEWAY_REDIS_URL"
    )
    assert url == {"name": "triptych-limits", "key": "gateway-url"}

    def edge(policy: str, direction: str, side: str) -> tuple[Any, Any, Any]:
        spec = named(resources, "NetworkPolicy", policy)["spec"]
        (rule,) = spec[direction]
        (peer,) = rule[side]
        return spec["podSelector"], peer["podSelector"], rule["ports"]

    here, there, ports = edge("limits", "ingress", "from")
    assert edge("gateway-limits", "egress", "to") == (there, here, ports)
    assert here["matchLabels"] == service["selector"]
    assert ports == [{"port": port["port"], "protocol": "TCP"}]
    assert there["matchLabels"].items() <= gateway["metadata"]["labels"].items()
