"""The Redis of tenants' limits, and the number of gateways by which they are divided without it."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

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


def url_of(resources: list[Resource]) -> str:
    """Of Redis, as the kubelet expands it: a variable is known to those after it."""
    known: dict[str, str] = {}
    (container,) = named(resources, "Deployment", "gateway")["spec"]["template"]["spec"][
        "containers"
    ]
    for variable in container["env"]:
        known[variable["name"]] = re.sub(
            r"\$\((\w+)\)", lambda found: known[found[1]], variable["value"]
        )
    return known["GATEWAY_REDIS_URL"]


def mounted(resources: list[Resource], name: str) -> tuple[str, dict[str, str]]:
    """A gateway's secret volume: the secret, and files by key."""
    pod = named(resources, "Deployment", "gateway")["spec"]["template"]["spec"]
    (volume,) = (v["secret"] for v in pod["volumes"] if v["name"] == name)
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == name)
    assert mount["readOnly"] and "subPath" not in mount  # it could not change
    if name == "limits":
        path = settings(resources)["GATEWAY_REDIS_PASSWORD_FILE"]
        assert path == f"{mount['mountPath']}/password"
    return volume["secretName"], {item["key"]: item["path"] for item in volume["items"]}


@pytest.mark.parametrize(
    "name",
    ["priority", "tenant-limits", "token", "autoscaling", "autoscaling-text", "autoscaling-local"],
)
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
    assert url_of(resources) == "redis://gateway@limits"
    assert mounted(resources, "limits") == ("triptych-limits", {"gateway-password": "password"})

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


def test_the_redis_of_limits_may_speak_tls(tmp_path: Path) -> None:
    resources = rendered("tenant-limits-tls", tmp_path)
    (server,) = named(resources, "Deployment", "limits")["spec"]["template"]["spec"]["containers"]
    arguments = dict(zip(server["args"][::2], server["args"][1::2], strict=True))
    assert (arguments["--port"], arguments["--tls-port"]) == ("0", "6379")
    url = urlsplit(url_of(resources))
    assert (url.scheme, url.username, url.hostname) == ("rediss", "gateway", "limits")
    assert parse_qs(url.query) == {"ssl_ca_certs": ["/etc/triptych-limits-tls/ca.crt"]}
    assert mounted(resources, "limits-ca") == ("triptych-limits-tls", {"ca.crt": "ca.crt"})
    assert mounted(resources, "limits")[0] == "triptych-limits"
    assert "SSL_CERT_FILE" not in settings(resources)  # it would hold for image URLs, too
    certificate = named(resources, "Certificate", "triptych-limits")["spec"]
    assert certificate["dnsNames"] == ["limits"]
    assert certificate["secretName"] == "triptych-limits-tls"
