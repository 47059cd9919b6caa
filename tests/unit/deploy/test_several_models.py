"""The example of several models: each installation's routes, names and policies fit the others'."""

import shutil
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.gateway.settings import GatewaySettings
from tests.unit.deploy.combinations import K8S
from tests.unit.deploy.kustomize import Resource, by_kubectl, by_name, render
from tests.unit.deploy.schemas import validate
from tests.unit.deploy.test_components import KUBERNETES_VERSION

EXAMPLE = K8S / "examples" / "several-models"
MODELS = ("vision", "text", "search")
SHARED_HOST = "models.example.com"


@pytest.fixture(scope="module")
def installations() -> dict[str, list[Resource]]:
    return {name: render(EXAMPLE / name) for name in MODELS}


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def settings(resources: list[Resource]) -> GatewaySettings:
    (data,) = (
        r["data"] for r in resources if r["kind"] == "ConfigMap" and "GATEWAY_HOST" in r["data"]
    )
    given = {name: value for name, value in data.items() if name.startswith("GATEWAY_")}
    return GatewaySettings.from_environment(given)


def namespace(resources: list[Resource]) -> str:
    (found,) = of_kind(resources, "Namespace")
    return found


def rules_of(resources: list[Resource], host: str) -> list[dict[str, Any]]:
    routes = of_kind(resources, "HTTPRoute").values()
    return [rule for r in routes if host in r["spec"]["hostnames"] for rule in r["spec"]["rules"]]


def test_the_example_is_all_models() -> None:
    assert {path.parent.name for path in EXAMPLE.glob("*/kustomization.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_resources_are_valid_and_live_in_a_namespace_of_the_model(
    name: str, installations: dict[str, list[Resource]]
) -> None:
    resources = installations[name]
    own = namespace(resources)
    assert own == f"triptych-{name}"
    for resource in resources:
        if resource["kind"] not in ("Namespace", "PriorityClass"):
            assert resource["metadata"]["namespace"] == own
        validate(resource, KUBERNETES_VERSION)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl where there is")
@pytest.mark.parametrize("name", MODELS)
def test_our_rendering_is_that_of_kubectl(
    name: str, installations: dict[str, list[Resource]]
) -> None:
    assert by_name(installations[name]) == by_name(by_kubectl(EXAMPLE / name))


def test_requests_reach_the_gateway_of_their_model_by_host_and_by_header(
    installations: dict[str, list[Resource]],
) -> None:
    names = {name: settings(found).served_model_name for name, found in installations.items()}
    assert len(set(names.values())) == len(MODELS)
    for name, resources in installations.items():
        model = names[name]
        (by_host,) = rules_of(resources, f"{model}.{SHARED_HOST}")
        by_header = rules_of(resources, SHARED_HOST)[0]
        (match,) = by_host["matches"]
        assert match == {"path": {"type": "PathPrefix", "value": "/v1"}}
        (match,) = by_header["matches"]
        assert match["headers"] == [{"name": "X-Gateway-Model-Name", "value": model}]
        timeout_s = settings(resources).request_timeout_s
        for rule in (by_host, by_header):
            (backend,) = rule["backendRefs"]
            assert (backend["name"], backend["port"]) == ("gateway", 80)
            for given in rule["timeouts"].values():
                assert float(given.removesuffix("s")) > timeout_s
        parents = {p["name"] for r in of_kind(resources, "HTTPRoute").values()
                   for p in r["spec"]["parentRefs"]}  # fmt: skip
        assert parents == {"public"}


def test_the_list_of_models_has_one_route_under_the_shared_address(
    installations: dict[str, list[Resource]],
) -> None:
    rules = [rule for found in installations.values() for rule in rules_of(found, SHARED_HOST)]
    without_header = [
        [match["path"] for match in rule["matches"]]
        for rule in rules
        if any("headers" not in match for match in rule["matches"])
    ]
    assert without_header == [
        [
            {"type": "Exact", "value": "/v1/models"},
            {"type": "PathPrefix", "value": "/v1/models/"},
        ]
    ]


def test_each_gateway_asks_and_reaches_all_others(
    installations: dict[str, list[Resource]],
) -> None:
    namespaces = {namespace(found) for found in installations.values()}
    for resources in installations.values():
        others = {urlsplit(url).hostname for url in settings(resources).others}
        expected = namespaces - {namespace(resources)}
        assert others == {f"gateway.{other}" for other in expected}
        service = of_kind(resources, "Service")["gateway"]["spec"]
        assert [port["port"] for port in service["ports"]] == [80]
        policy = of_kind(resources, "NetworkPolicy")["gateway-models"]["spec"]
        own = {"app.kubernetes.io/name": "gateway"}
        assert policy["podSelector"]["matchLabels"] == own
        assert own.items() <= service["selector"].items()
        (rule,) = policy["egress"]
        assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]
        reached = {
            peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for peer in rule["to"]
            if peer["podSelector"]["matchLabels"] == own
        }
        assert reached == expected
