"""The components, each on the overlays that it is for: valid, and what they promise."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.decoder.__main__ import DECODER
from services.encoder.__main__ import ENCODER
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from tests.cases import THOROUGH
from tests.unit.deploy.combinations import COMBINATIONS, K8S, combine
from tests.unit.deploy.kustomize import Resource, by_kubectl, by_name, render
from tests.unit.deploy.schemas import validate
from triptych.devices import place

pytestmark = pytest.mark.thorough

KUBERNETES_VERSION = "1.37"
# With replacements: test_installations.py
BY_KUBECTL = {"autoscaling/bearer", "autoscaling/prometheus"}


def covering() -> list[str]:
    """Of the combinations with most components, those that have together each overlay and each
    component; all of them in `make nightly`.
    """
    seen, found = set[str](), list[str]()
    for name in sorted(COMBINATIONS, key=lambda name: -len(COMBINATIONS[name])):
        if THOROUGH or set(COMBINATIONS[name]) - seen:
            found.append(name)
            seen |= set(COMBINATIONS[name])
    return found


@pytest.fixture(scope="module", params=covering())
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return combine(*COMBINATIONS[request.param], directory=tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def resources(directory: Path) -> list[Resource]:
    return render(directory)


def rendered(name: str, directory: Path) -> list[Resource]:
    return render(combine(*COMBINATIONS[name], directory=directory / "own"))


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def settings_of(resources: list[Resource]) -> dict[str, str]:
    """Of all services; their names have prefixes."""
    maps = of_kind(resources, "ConfigMap").values()
    return {name: value for m in maps for name, value in m["data"].items() if name.isupper()}


def pods(resources: list[Resource]) -> dict[str, dict[str, Any]]:
    return {
        name: found["spec"]["template"]
        for kind in ("Deployment", "Job")
        for name, found in of_kind(resources, kind).items()
    }


def queries_of(scaler: Resource) -> dict[str, str]:
    return {t["name"]: t["metadata"]["query"] for t in scaler["spec"]["triggers"]}


def test_each_component_is_in_a_combination() -> None:
    found = {
        str(path.parent.relative_to(K8S / "components"))
        for path in (K8S / "components").rglob("kustomization.yaml")
    }
    combined = {name for _, *names in COMBINATIONS.values() for name in names}
    # `gpu` is in the overlays, `follow` in the installations, `server` in both of `redis-tls`.
    assert found == combined | {"gpu", "follow", "follow/text", "redis-tls/server"} | BY_KUBECTL


@functools.cache  # most are in many combinations
def _validate(resource: str) -> None:
    validate(json.loads(resource), KUBERNETES_VERSION)


def test_every_resource_is_valid(resources: list[Resource]) -> None:
    for resource in resources:
        _validate(json.dumps(resource, sort_keys=True))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl where there is")
def test_our_rendering_is_that_of_kubectl(directory: Path, resources: list[Resource]) -> None:
    assert by_name(resources) == by_name(by_kubectl(directory))


def test_names_are_unique_and_everything_is_part_of_triptych(resources: list[Resource]) -> None:
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(names) == len(set(names))
    for resource in resources:
        if resource["kind"] not in ("Namespace", "PriorityClass"):
            assert resource["metadata"]["namespace"] == "triptych"
        if resource["kind"] not in ("PersistentVolumeClaim", "PriorityClass", "ConfigMap"):
            labels = resource["metadata"]["labels"]
            assert labels.get("app.kubernetes.io/part-of") == "triptych" or (
                resource["kind"] == "Namespace"
            )


def test_pods_are_restricted_and_have_accounts(resources: list[Resource]) -> None:
    accounts = of_kind(resources, "ServiceAccount")
    assert {pod["spec"]["serviceAccountName"] for pod in pods(resources).values()} == set(accounts)
    for pod in pods(resources).values():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


# Autoscaling.


def test_an_apply_sets_no_replicas_that_an_autoscaler_owns(resources: list[Resource]) -> None:
    deployments = of_kind(resources, "Deployment")
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        for scaler in of_kind(resources, kind).values():
            target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
            assert "replicas" not in target["spec"]


def test_each_service_is_scaled_by_its_own_load(tmp_path: Path) -> None:
    found = of_kind(rendered("autoscaling", tmp_path), "ScaledObject")
    assert found.keys() == {"encoder", "decoder"}
    for name, scaler in found.items():
        assert all(f"{name}_" in query for query in queries_of(scaler).values())
    cells = rendered("cell-autoscaling", tmp_path)
    ours = of_kind(cells, "ScaledObject")
    assert ours.keys() == {"decoder"}
    queries = queries_of(found["encoder"]) | queries_of(found["decoder"])
    assert queries_of(ours["decoder"]) == queries
    thresholds = {
        trigger["name"]: trigger["metadata"]["threshold"]
        for scaler in found.values()
        for trigger in scaler["spec"]["triggers"]
    }
    for trigger in ours["decoder"]["spec"]["triggers"]:
        differs = trigger["metadata"]["threshold"] != thresholds[trigger["name"]]
        assert differs == (trigger["name"] == "decoder-rows")


def test_scalers_ask_for_sums_per_pod_and_never_shrink_without_metrics(
    resources: list[Resource],
) -> None:
    for scaler in of_kind(resources, "ScaledObject").values():
        spec = scaler["spec"]
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"]
        assert spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= 300
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus" and trigger["metricType"] == "AverageValue"
            metadata = trigger["metadata"]
            # Without series the query fails and the count is held: neither PromQL nor KEDA makes
            # a zero of silence.
            assert re.fullmatch(r"avg\([^ ]+\) \* count\(.+\)", metadata["query"])
            assert "vector(" not in metadata["query"] and " or " not in metadata["query"]
            assert metadata["ignoreNullValues"] == "false"
            assert 'namespace="triptych",installation="triptych"' in metadata["query"]
            assert float(metadata["threshold"]) > 0


@pytest.mark.parametrize("name", ["autoscaling-hpa", "autoscaling-hpa-text"])
def test_an_hpa_without_keda_decides_as_keda_does(name: str, tmp_path: Path) -> None:
    theirs = of_kind(rendered(name.replace("-hpa", ""), tmp_path / "keda"), "ScaledObject")
    scalers = of_kind(rendered(name, tmp_path / "hpa"), "HorizontalPodAutoscaler")
    path = K8S / "components/autoscaling/hpa/adapter-rules.yaml"
    rules = {r["name"]["as"]: r for r in yaml.safe_load(path.read_text())["rules"]["external"]}
    assert scalers.keys() == theirs.keys() | {"gateway"}
    for service, scaled in theirs.items():
        ours, spec = scalers[service]["spec"], scaled["spec"]
        assert ours["behavior"] == spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        bounds = (spec["minReplicaCount"], spec["maxReplicaCount"])
        assert (ours["minReplicas"], ours["maxReplicas"]) == bounds
        found: dict[str, float] = {}
        for metric in (m["external"] for m in ours["metrics"]):
            assert metric["metric"]["selector"] == {"matchLabels": {"installation": "triptych"}}
            target = metric["target"]
            assert target["type"] == "AverageValue"
            value = target["averageValue"]
            rule = rules[metric["metric"]["name"]]
            series = rule["seriesQuery"].partition("{")[0]
            query = rule["metricsQuery"].replace("<<.Series>>", series)
            matchers = 'namespace="triptych",installation="triptych"'
            found[query.replace("<<.LabelMatchers>>", matchers)] = (
                float(value[:-1]) / 1000 if value.endswith("m") else float(value)
            )
        assert found == {
            t["metadata"]["query"]: float(t["metadata"]["threshold"]) for t in spec["triggers"]
        }


# Disruption.


def test_a_budget_never_blocks_a_drain(resources: list[Resource]) -> None:
    for budget in of_kind(resources, "PodDisruptionBudget").values():
        spec = budget["spec"]
        assert spec["maxUnavailable"] == 1 and "minAvailable" not in spec
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_pod_has_one_budget_at_most(resources: list[Resource]) -> None:
    """The eviction of a pod with two is refused."""
    budgets = of_kind(resources, "PodDisruptionBudget").values()
    for pod in pods(resources).values():
        labels = pod["metadata"]["labels"].items()
        matching = [b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= labels]
        assert len(matching) <= 1


def test_each_service_has_a_budget(tmp_path: Path) -> None:
    resources = rendered("disruption", tmp_path)
    assert of_kind(resources, "PodDisruptionBudget").keys() == {"gateway", "encoder", "decoder"}


def test_a_roll_out_without_a_spare_gpu_needs_none(tmp_path: Path) -> None:
    deployments = of_kind(rendered("no-spare-gpu", tmp_path), "Deployment")
    for name in ("encoder", "decoder"):
        update = deployments[name]["spec"]["strategy"]["rollingUpdate"]
        assert update == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployments["gateway"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


# Models and GPUs.


@pytest.mark.parametrize("name", ["model-image", "model-image-text"])
def test_a_model_image_takes_the_place_of_the_claim(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    assert not of_kind(resources, "PersistentVolumeClaim")
    for service, pod in pods(resources).items():
        if service == "redis":
            continue
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "model")
        assert volume.keys() == {"name", "image"}
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", volume["image"]["reference"])


def test_the_download_fills_the_claim_and_alone_reaches_the_hub(tmp_path: Path) -> None:
    resources = rendered("model-job", tmp_path)
    pod = pods(resources)["model-download"]
    (container,) = pod["spec"]["containers"]
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "model")
    assert volume["persistentVolumeClaim"]["claimName"] in of_kind(
        resources, "PersistentVolumeClaim"
    )
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    (script,) = container["args"]
    assert f"--local-dir {mounts['model']} " in script
    mark = f"{mounts['model']}/.complete"
    assert script.strip().splitlines()[-1] == f"touch {mark}"  # and `-e` ends it before
    for service in ("gateway", "encoder", "decoder"):
        waiting = pods(resources)[service]["spec"]
        (first,) = waiting["initContainers"]
        assert f"[ -f {mark} ]" in first["command"][-1]
        assert first["volumeMounts"][0]["mountPath"] == mounts["model"]
    assert pod["spec"]["securityContext"]["fsGroup"] == 10001
    policy = of_kind(resources, "NetworkPolicy")["model-download"]["spec"]
    labels = pod["metadata"]["labels"].items()
    assert policy["podSelector"]["matchLabels"].items() <= labels and "ingress" not in policy
    gateway = of_kind(resources, "NetworkPolicy")["gateway"]["spec"]["egress"]
    (internet,) = (rule for rule in gateway if "ipBlock" in rule["to"][0])
    names, hub = policy["egress"]
    assert hub == {"to": internet["to"], "ports": [{"port": 443, "protocol": "TCP"}]}
    assert names == of_kind(resources, "NetworkPolicy")["dns"]["spec"]["egress"][0]
    others = [p["metadata"]["labels"].items() for n, p in pods(resources).items()
              if n != "model-download"]  # fmt: skip
    for resource in of_kind(resources, "Service").values():
        assert not resource["spec"]["selector"].items() <= labels
    assert not any(policy["podSelector"]["matchLabels"].items() <= other for other in others)


@pytest.mark.parametrize("name", ["dra", "dra-text", "cell"])
def test_claims_take_the_place_of_counted_gpus(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    templates = of_kind(resources, "ResourceClaimTemplate")
    for service, pod in pods(resources).items():
        assert "affinity" not in pod["spec"]  # the claim names the generation
        claims = {c["name"]: c for c in pod["spec"].get("resourceClaims", ())}
        assert bool(claims) == (service in ("encoder", "decoder"))
        for claim in claims.values():
            assert claim["resourceClaimTemplateName"] in templates
        for container in pod["spec"]["containers"]:
            found = container["resources"]
            assert "nvidia.com/gpu" not in found["requests"] | found["limits"]
            assert {c["name"] for c in found.get("claims", ())} == set(claims)


# Services that know each other.


@pytest.mark.parametrize("name", ["mtls", "mtls-text", "mtls-cell"])
def test_each_service_has_its_certificate(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    settings = settings_of(resources)
    found: dict[str, str] = {}
    for pod in pods(resources).values():
        secrets = {
            v["name"]: v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v
        }
        for container in pod["spec"]["containers"]:
            key = f"{container['name'].upper()}_PEER_TLS_DIRECTORY"
            for mount in container["volumeMounts"]:
                if mount["mountPath"] == settings.get(key):
                    found[container["name"]] = secrets[mount["name"]]
                    assert mount["readOnly"] and "subPath" not in mount  # it could not change
    services = {"gateway", "decoder"} | ({"encoder"} if name != "mtls-text" else set())
    assert found == {service: f"triptych-{service}-tls" for service in services}


def test_the_example_certificates_have_the_names_that_services_expect(tmp_path: Path) -> None:
    resources = rendered("mtls", tmp_path)
    issuers = of_kind(resources, "Issuer")
    for certificate in of_kind(resources, "Certificate").values():
        spec = certificate["spec"]
        assert spec["issuerRef"]["name"] in issuers
        if spec.get("isCA"):
            assert issuers["triptych"]["spec"]["ca"]["secretName"] == spec["secretName"]
            continue
        (name,) = spec["dnsNames"]
        assert spec["secretName"] == f"triptych-{name}-tls"
        assert set(spec["usages"]) == {"server auth", "client auth"}
        assert name in {ENCODER.name, DECODER.name, "gateway"}
    assert set(ENCODER.callers) == {"gateway", "decoder"} and DECODER.callers == ("gateway",)


@pytest.mark.parametrize("name", ["token", "token-text", "token-cell"])
def test_each_service_has_the_token(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    settings = settings_of(resources)
    found: set[str] = set()
    for pod in pods(resources).values():
        for container in pod["spec"]["containers"]:
            key = f"{container['name'].upper()}_PEER_TOKEN_FILE"
            for mount in container["volumeMounts"]:
                if mount["name"] == "token":
                    assert settings[key] == f"{mount['mountPath']}/token"
                    found.add(container["name"])
    assert found == {"gateway", "decoder"} | ({"encoder"} if name != "token-text" else set())


@pytest.mark.parametrize("name", ["redis-tls", "redis-tls-cell"])
def test_redis_shows_its_certificate_to_clients_that_know_the_authority(
    name: str, tmp_path: Path
) -> None:
    resources = rendered(name, tmp_path)
    settings = settings_of(resources)
    found = pods(resources)
    (server,) = found["redis"]["spec"]["containers"]
    arguments = dict(zip(server["args"][::2], server["args"][1::2], strict=True))
    assert (arguments["--port"], arguments["--tls-port"]) == ("0", "6379")
    mounts = {m["name"]: m["mountPath"] for m in server["volumeMounts"]}
    for option in ("--tls-cert-file", "--tls-key-file"):
        assert arguments[option].startswith(f"{mounts['tls']}/")
    clients = {c["name"]: c for n in ("encoder", "decoder") if n in found
               for c in found[n]["spec"]["containers"]}  # fmt: skip
    assert clients.keys() == {"encoder", "decoder"}
    for service, container in clients.items():
        assert settings[f"{service.upper()}_REDIS_URL"] == f"rediss://{service}@redis"
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "redis-ca")
        assert settings["SSL_CERT_FILE"] == f"{mount['mountPath']}/ca.crt"


def test_every_pod_has_a_user_namespace(tmp_path: Path) -> None:
    found = pods(rendered("user-namespaces", tmp_path))
    assert found and all(pod["spec"]["hostUsers"] is False for pod in found.values())


# Several GPUs for one model.


@pytest.mark.parametrize("name", ["tensor-parallel", "tensor-parallel-text", "tensor-parallel-dra"])
def test_a_decoder_has_a_gpu_for_each_rank(name: str, tmp_path: Path) -> None:
    """And for each the CPUs and the memory of a decoder of one."""
    resources = rendered(name, tmp_path)
    ranks = int(settings_of(resources)["DECODER_TENSOR_PARALLEL"])
    found = pods(resources)
    (container,) = found["decoder"]["spec"]["containers"]
    (usual,) = pods(render(K8S / "overlays/gpu"))["decoder"]["spec"]["containers"]
    requests, one = container["resources"]["requests"], usual["resources"]["requests"]
    assert int(requests["cpu"]) == ranks * int(one["cpu"])
    assert int(requests["memory"][:-2]) == ranks * int(one["memory"][:-2])
    gpus, claims = requests.get("nvidia.com/gpu"), of_kind(resources, "ResourceClaimTemplate")
    if gpus is None:
        (claim,) = found["decoder"]["spec"]["resourceClaims"]
        (request,) = claims[claim["resourceClaimTemplateName"]]["spec"]["spec"]["devices"][
            "requests"
        ]
        gpus = request["exactly"]["count"]
    assert int(gpus) == ranks > 1
    volumes = {each["name"]: each for each in found["decoder"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


# Cells.


def test_a_cell_has_the_encoder_of_the_gpu_overlay(tmp_path: Path) -> None:
    resources = rendered("cell", tmp_path)
    pod = pods(resources)["decoder"]["spec"]
    containers = {c["name"]: c for c in pod["containers"]}
    usual = pods(render(K8S / "overlays/gpu"))
    (encoder,) = usual["encoder"]["spec"]["containers"]
    ours = dict(containers["encoder"])
    assert {p["name"]: p["containerPort"] for p in ours.pop("ports")} == {
        f"encoder-{p['name']}": p["containerPort"] for p in encoder.pop("ports")
    }
    assert (
        ours.pop("resources")["requests"] | {"nvidia.com/gpu": "1"}
        == (encoder.pop("resources")["requests"])
    )
    assert ours.pop("envFrom")[0]["configMapRef"]["name"].startswith("encoder-")
    del encoder["envFrom"]  # with another hash: the values differ
    for container in (ours, encoder):
        for mount in container["volumeMounts"]:
            mount["name"] = mount["name"].removesuffix("-encoder")
        container["volumeMounts"].sort(key=lambda mount: mount["name"])
    assert ours == encoder
    assert pod["shareProcessNamespace"] is True
    assert (
        pod["terminationGracePeriodSeconds"]
        >= (usual["encoder"]["spec"]["terminationGracePeriodSeconds"])
    )
    names = [port["name"] for c in pod["containers"] for port in c["ports"]]
    assert len(names) == len(set(names))


def test_a_cell_divides_its_gpu_as_serve_does(tmp_path: Path) -> None:
    settings = settings_of(rendered("cell", tmp_path))
    encoders, decoders = place("auto", "auto", encoders=1, decoders=1, gpus=1, cpus=8)
    assert float(settings["ENCODER_MEMORY_FRACTION"]) == encoders[0].memory_fraction
    assert float(settings["DECODER_MEMORY_FRACTION"]) == decoders[0].memory_fraction


def test_cells_are_called_as_encoders_and_as_decoders(tmp_path: Path) -> None:
    resources = rendered("cell", tmp_path)
    assert of_kind(resources, "Deployment").keys() == {"gateway", "decoder", "redis"}
    services, cell = of_kind(resources, "Service"), pods(resources)["decoder"]
    ports = {p["name"]: p["containerPort"] for c in cell["spec"]["containers"] for p in c["ports"]}
    address = EncoderSettings.model_fields["address"].default
    assert address == f"127.0.0.1:{ports['encoder-grpc']}"
    for name in ("encoder", "decoder"):
        spec = services[name]["spec"]
        assert spec["selector"].items() <= cell["metadata"]["labels"].items()
        assert all(port["port"] == ports[port["targetPort"]] for port in spec["ports"])
    policies = of_kind(resources, "NetworkPolicy")
    assert "encoder" not in policies
    label = "app.kubernetes.io/name"

    def peers(policy: str, direction: str, side: str) -> set[tuple[str, int]]:
        return {
            (peer["podSelector"]["matchLabels"][label], port["port"])
            for rule in policies[policy]["spec"][direction]
            for peer in rule.get(side, ())
            if "podSelector" in peer
            for port in rule["ports"]
        }

    calls = {("decoder", 50051), ("decoder", 50052)}
    assert calls <= peers("gateway", "egress", "to")
    assert ("decoder", 50051) in peers("decoder", "egress", "to")
    assert {("gateway", 50051), ("decoder", 50051), ("gateway", 50052)} <= peers(
        "decoder", "ingress", "from"
    )


# What pods reach.


@pytest.mark.parametrize("name", ["traces", "traces-text", "traces-cell"])
def test_every_service_reaches_the_collector_that_it_is_told(name: str, tmp_path: Path) -> None:
    resources = rendered(name, tmp_path)
    policy = of_kind(resources, "NetworkPolicy")["traces"]["spec"]
    (expression,) = policy["podSelector"]["matchExpressions"]
    (rule,) = policy["egress"]
    (peer,) = rule["to"]
    (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
    for pod in pods(resources).values():
        for container in pod["spec"]["containers"]:
            if container["name"] == "redis":
                continue
            (source,) = container["envFrom"]
            data = of_kind(resources, "ConfigMap")[source["configMapRef"]["name"]]["data"]
            found = re.fullmatch(
                r"http://[\w-]+\.([\w-]+):(\d+)", data["OTEL_EXPORTER_OTLP_ENDPOINT"]
            )
            assert found is not None and found[1] == namespace
            assert rule["ports"] == [{"port": int(found[2]), "protocol": "TCP"}]
            assert pod["metadata"]["labels"][expression["key"]] in expression["values"]


@pytest.mark.parametrize("name", ["openshift-dns", "openshift-dns-text"])
def test_openshifts_dns_is_reached_on_its_pods_port(name: str, tmp_path: Path) -> None:
    policies = of_kind(rendered(name, tmp_path), "NetworkPolicy")
    for policy in ("dns", *(["model-download"] if name == "openshift-dns" else [])):
        rule = policies[policy]["spec"]["egress"][0]
        ports = {(port["port"], port["protocol"]) for port in rule["ports"]}
        assert ports == {(number, kind) for number in (53, 5353) for kind in ("UDP", "TCP")}
        assert "openshift-dns" in json.dumps(rule["to"])


def test_no_policy_asks_pods_of_other_namespaces_for_labels_of_ours(
    resources: list[Resource],
) -> None:
    """kustomize adds the installation's label to selectors by labels. Pods of kube-dns have no such
    label: no name would be found where policies are enforced.
    """
    for policy in of_kind(resources, "NetworkPolicy").values():
        rules = [*policy["spec"].get("egress", ()), *policy["spec"].get("ingress", ())]
        for peer in (p for rule in rules for p in (*rule.get("to", ()), *rule.get("from", ()))):
            if "namespaceSelector" in peer:
                assert "app.kubernetes.io" not in json.dumps(peer)


# The public side.


@pytest.mark.parametrize("name", ["http-route", "ingress"])
def test_streams_outlast_no_proxy(name: str, tmp_path: Path) -> None:
    longest_s = GatewaySettings.model_fields["request_timeout_s"].default
    resources = rendered(name, tmp_path)
    if name == "http-route":
        (rule,) = of_kind(resources, "HTTPRoute")["gateway"]["spec"]["rules"]
        assert all(int(value.removesuffix("s")) > longest_s for value in rule["timeouts"].values())
        assert [m["path"]["value"] for m in rule["matches"]] == ["/v1"]  # not /metrics
        (port,) = (backend["port"] for backend in rule["backendRefs"])
    else:
        found = of_kind(resources, "Ingress")["gateway"]
        options = {k.rsplit("/")[-1]: v for k, v in found["metadata"]["annotations"].items()}
        assert int(options["proxy-read-timeout"]) > longest_s
        assert options["proxy-buffering"] == "off"
        (path,) = found["spec"]["rules"][0]["http"]["paths"]
        assert path["path"] == "/v1"
        port = path["backend"]["service"]["port"]["name"]
    (service,) = of_kind(resources, "Service")["gateway"]["spec"]["ports"]
    assert port in (service["port"], service["name"])
