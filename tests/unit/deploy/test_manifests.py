"""The manifests are valid, agree with each other, and agree with the code."""

import json
import re
import shutil
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from services.common.settings import ServiceSettings
from services.decoder.settings import DecoderSettings
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from tests.unit.deploy.combinations import VERSION
from tests.unit.deploy.kustomize import Resource, by_kubectl, by_name, render
from tests.unit.deploy.schemas import validate
from triptych.plan import GRPC_SERVICES

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "deploy" / "k8s"
README = (K8S / "README.md").read_text(encoding="utf-8")
VISION = ("vision", "overlays/local", "overlays/gpu", "overlays/gpu-shared-kernels")
TEXT = ("base", "overlays/text")
VARIANTS = (*VISION, *TEXT)
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "decoder": DecoderSettings,
}
# (caller, callee, port)
CALLS = {
    ("gateway", "encoder", 50051),
    ("gateway", "decoder", 50052),
    ("decoder", "encoder", 50051),
    ("encoder", "redis", 6379),
    ("decoder", "redis", 6379),
}
KUBERNETES_VERSION = "1.34"


@pytest.fixture(scope="module", params=VARIANTS)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return render(K8S / request.param)


@pytest.fixture(scope="module", params=VISION)
def vision(request: pytest.FixtureRequest) -> list[Resource]:
    return render(K8S / request.param)


@pytest.fixture(scope="module", params=TEXT)
def text(request: pytest.FixtureRequest) -> list[Resource]:
    return render(K8S / request.param)


def services_in(resources: list[Resource]) -> dict[str, type[ServiceSettings]]:
    """The services that are deployed, with their settings."""
    return {name: s for name, s in SETTINGS.items() if name in of_kind(resources, "Deployment")}


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def pods(resources: list[Resource]) -> dict[str, dict[str, Any]]:
    return {
        name: deployment["spec"]["template"]
        for name, deployment in of_kind(resources, "Deployment").items()
    }


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def container_ports(pod: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}


def environment(resources: list[Resource], pod: dict[str, Any]) -> dict[str, str]:
    """What the container will see; a secret's value stands as its reference, a resource of the
    container as what is requested.
    """
    container = container_of(pod)
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= of_kind(resources, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    for variable in container.get("env", ()):
        if field := variable.get("valueFrom", {}).get("resourceFieldRef"):
            kind, _, resource = field["resource"].partition(".")
            amount = container["resources"][kind][resource]
            if amount.endswith("m"):  # rounded up, as Kubernetes does
                amount = str(-(-int(amount[:-1]) // 1000))
            found[variable["name"]] = amount
            continue
        found[variable["name"]] = variable.get("value", json.dumps(variable.get("valueFrom")))
    return found


def own_settings(name: str, variables: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k.startswith(name.upper() + "_")}


def test_every_resource_is_valid(resources: list[Resource]) -> None:
    assert len(resources) > 5
    for resource in resources:
        validate(resource, KUBERNETES_VERSION)


def test_names_are_unique(resources: list[Resource]) -> None:
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl where there is")
@pytest.mark.parametrize("variant", VARIANTS)
def test_our_rendering_is_that_of_kubectl(variant: str) -> None:
    assert by_name(render(K8S / variant)) == by_name(by_kubectl(K8S / variant))


def test_everything_lives_in_one_namespace_under_the_strictest_policy(
    resources: list[Resource],
) -> None:
    (namespace,) = of_kind(resources, "Namespace").values()
    labels = namespace["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"
        assert re.fullmatch(r"v1\.\d+", labels[f"pod-security.kubernetes.io/{mode}-version"])
    others = [r["metadata"]["namespace"] for r in resources if r["kind"] != "Namespace"]
    assert set(others) == {namespace["metadata"]["name"]}


def test_selectors_select_exactly_their_own_pods(resources: list[Resource]) -> None:
    deployments, services = of_kind(resources, "Deployment"), of_kind(resources, "Service")
    assert deployments.keys() == services.keys()
    for name, deployment in deployments.items():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        for selector in (
            deployment["spec"]["selector"]["matchLabels"],
            services[name]["spec"]["selector"],
            *(
                constraint["labelSelector"]["matchLabels"]
                for constraint in deployment["spec"]["template"]["spec"].get(
                    "topologySpreadConstraints", ()
                )
            ),
        ):
            assert selector.items() <= labels.items()
            matching = [n for n, p in pods(resources).items()
                        if selector.items() <= p["metadata"]["labels"].items()]  # fmt: skip
            assert matching == [name]


def test_pods_are_spread_over_zones_and_nodes_by_roll_out(resources: list[Resource]) -> None:
    for name in services_in(resources):
        found = pods(resources)[name]["spec"]["topologySpreadConstraints"]
        keys = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert [constraint["topologyKey"] for constraint in found] == keys
        for constraint in found:
            assert constraint["matchLabelKeys"] == ["pod-template-hash"]
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


def test_every_pod_is_part_of_triptych(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "triptych"


def test_a_slow_start_is_no_failed_roll_out(resources: list[Resource]) -> None:
    deployments = of_kind(resources, "Deployment")
    for name in services_in(resources):
        probe = container_of(pods(resources)[name])["startupProbe"]
        start_s = probe["periodSeconds"] * probe["failureThreshold"]
        spec = deployments[name]["spec"]
        assert spec.get("progressDeadlineSeconds", 600) > start_s + spec["minReadySeconds"]


def test_engines_use_as_many_cpus_as_they_request(resources: list[Resource]) -> None:
    for name in GRPC_SERVICES.keys() & pods(resources).keys():
        pod = pods(resources)[name]
        variables = environment(resources, pod)
        requested = container_of(pod)["resources"]["requests"]["cpu"]
        if not requested.endswith("m"):
            assert variables["OMP_NUM_THREADS"] == requested


def test_names_are_also_asked_of_a_cache_on_the_node(resources: list[Resource]) -> None:
    (rule,) = of_kind(resources, "NetworkPolicy")["dns"]["spec"]["egress"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]
    assert {(port["port"], port["protocol"]) for port in rule["ports"]} == {
        (53, "UDP"), (53, "TCP"),
    }  # fmt: skip


def test_service_ports_exist_in_the_containers(resources: list[Resource]) -> None:
    for name, service in of_kind(resources, "Service").items():
        ports = container_ports(pods(resources)[name])
        assert all(len(port) <= 15 for port in ports)
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            assert len(port["name"]) <= 15


def test_a_vision_model_has_every_service(vision: list[Resource]) -> None:
    assert pods(vision).keys() == {"gateway", "encoder", "decoder", "redis"}


def test_a_text_model_has_neither_encoder_nor_redis(text: list[Resource]) -> None:
    assert pods(text).keys() == {"gateway", "decoder"}
    found = json.dumps(text).lower()
    assert "redis" not in found
    assert "encoder" not in found.replace("decoder", "")


def test_grpc_services_are_headless_and_keep_their_port(resources: list[Resource]) -> None:
    for name in GRPC_SERVICES.keys() & pods(resources).keys():
        service = of_kind(resources, "Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        ports = container_ports(pods(resources)[name])
        # A headless name resolves to pods: no proxy translates the port.
        assert all(port["port"] == ports[port["targetPort"]] for port in service["ports"])


def test_ports_are_those_of_the_settings(resources: list[Resource]) -> None:
    for name, settings in services_in(resources).items():
        pod = pods(resources)[name]
        ports = container_ports(pod)
        variables = environment(resources, pod)
        for field, port_name in (("port", "http" if name == "gateway" else "grpc"),
                                 ("metrics_port", "metrics"),
                                 ("health_port", "health")):  # fmt: skip
            if port_name not in ports:
                continue
            if field == "port" and name != "gateway":
                address = variables[f"{name.upper()}_ADDRESS"]
                assert address == f"0.0.0.0:{ports[port_name]}"
                default = int(settings.model_fields["address"].default.rpartition(":")[2])
            else:
                assert variables[f"{name.upper()}_{field.upper()}"] == str(ports[port_name])
                default = settings.model_fields[field].default
            if field != "health_port":  # none by default
                assert default == ports[port_name], f"{name}: default {field}"


def test_probes_ask_the_right_questions(resources: list[Resource]) -> None:
    for name, pod in pods(resources).items():
        container = container_of(pod)
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        assert probes[1] != probes[2]
        for probe in probes:
            (target,) = (probe[k] for k in ("httpGet", "grpc", "tcpSocket") if k in probe)
            port = target["port"]
            ports = container_ports(pod)
            assert port in ports or port in ports.values()
        if service := GRPC_SERVICES.get(name):
            # The kubelet has no credentials: a port that asks for none.
            assert {p["grpc"]["port"] for p in probes} == {container_ports(pod)["health"]}
            assert [p["grpc"].get("service") for p in probes] == [service, service, None]
        if name == "gateway":
            paths = [p["httpGet"]["path"] for p in probes]
            assert paths == ["/health", "/ready", "/health"]


def test_every_variable_is_a_known_setting(resources: list[Resource]) -> None:
    for name, settings in services_in(resources).items():
        variables = own_settings(name, environment(resources, pods(resources)[name]))
        found = settings.from_environment(variables)
        assert len(found.model_fields_set) == len(variables) > 0


def test_variables_in_the_config_map_belong_to_a_service(resources: list[Resource]) -> None:
    """Its own map: a changed value restarts that service alone."""
    maps = {name.split("-")[0]: m["data"] for name, m in of_kind(resources, "ConfigMap").items()}
    assert maps.keys() == services_in(resources).keys()
    for name, data in maps.items():
        assert data.keys() <= {f"{name.upper()}_{f.upper()}" for f in SETTINGS[name].model_fields}
        (source,) = container_of(pods(resources)[name])["envFrom"]
        assert source["configMapRef"]["name"].startswith(f"{name}-")


def test_addresses_name_the_headless_services(resources: list[Resource]) -> None:
    variables = environment(resources, pods(resources)["gateway"])
    for name in GRPC_SERVICES.keys() & pods(resources).keys():
        service = of_kind(resources, "Service")[name]["spec"]
        address = variables[f"GATEWAY_{name.upper()}_ADDRESSES"]
        assert address == f"dns:{name}:{service['ports'][0]['port']}"


def test_no_service_links_collide_with_settings(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        assert pod["spec"]["enableServiceLinks"] is False


def test_redis_is_bounded_in_memory_and_behind_a_password(vision: list[Resource]) -> None:
    pod = pods(vision)["redis"]
    args = container_of(pod)["args"]
    options = dict(zip(args[::2], args[1::2], strict=True))
    assert options["--save"] == ""
    assert options["--appendonly"] == "no"
    # Entries have a time to live; the index of clients' files has none and stays.
    assert options["--maxmemory-policy"] == "volatile-lru"
    assert bytes_of(options["--maxmemory"]) < bytes_of(
        container_of(pod)["resources"]["limits"]["memory"]
    )
    assert options["--aclfile"].startswith(container_of(pod)["volumeMounts"][0]["mountPath"])


def test_redis_clients_read_their_own_password_and_the_seal_keys_from_files(
    vision: list[Resource],
) -> None:
    for name in ("encoder", "decoder"):
        pod = pods(vision)[name]
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "redis")
        (mount,) = (m for m in container_of(pod)["volumeMounts"] if m["name"] == "redis")
        assert mount["readOnly"] and "subPath" not in mount  # it could not change
        paths = {i["key"]: f"{mount['mountPath']}/{i['path']}" for i in volume["secret"]["items"]}
        variables = environment(vision, pod)
        assert variables[f"{name.upper()}_REDIS_URL"] == f"redis://{name}@redis"
        assert paths == {  # neither users nor the other's password
            f"{name}-password": f"{variables[f'{name.upper()}_REDIS_DIRECTORY']}/password",
            "seal-keys": f"{variables[f'{name.upper()}_REDIS_DIRECTORY']}/seal-keys",
        }


def test_redis_has_no_known_remote_code_execution(vision: list[Resource]) -> None:
    """Older versions do, for any client that may send commands: CVE-2025-49844, CVE-2026-23479."""
    image = container_of(pods(vision)["redis"])["image"]
    version = re.fullmatch(r"redis:(\d+)\.(\d+)\.(\d+)-bookworm@sha256:[0-9a-f]{64}", image)
    assert version is not None
    assert tuple(map(int, version.groups())) >= (8, 2, 10)


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi|gb|mb)", text).groups()  # type: ignore[union-attr]
    return int(number) << (30 if unit[0] in "Gg" else 20)


def test_memory_and_gpu_are_requested_as_they_are_limited(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        resource = container_of(pod)["resources"]
        assert resource["requests"]["memory"] == resource["limits"]["memory"]
        assert resource["requests"]["cpu"]
        gpu = "nvidia.com/gpu"
        assert resource["requests"].get(gpu) == resource["limits"].get(gpu)


def test_the_gpu_overlay_gives_a_gpu_to_the_engines_only() -> None:
    found = {
        name: container_of(pod)["resources"]["limits"].get("nvidia.com/gpu")
        for name, pod in pods(render(K8S / "overlays/gpu")).items()
    }
    assert found == {"gateway": None, "encoder": "1", "decoder": "1", "redis": None}
    text = pods(render(K8S / "overlays/text"))
    assert {
        name: container_of(pod)["resources"]["limits"].get("nvidia.com/gpu")
        for name, pod in text.items()
    } == {"gateway": None, "decoder": "1"}


@pytest.mark.parametrize("overlay", ["gpu", "gpu-shared-kernels", "text"])
def test_gpu_overlays_ask_for_a_token(overlay: str) -> None:
    resources = render(K8S / "overlays" / overlay)
    for name, pod in pods(resources).items():
        container = container_of(pod)
        if name != "redis":
            path = environment(resources, pod)[f"{name.upper()}_PEER_TOKEN_FILE"]
            assert path.rpartition("/")[0] in {m["mountPath"] for m in container["volumeMounts"]}


@pytest.mark.parametrize("overlay", ["gpu", "gpu-shared-kernels", "text"])
def test_gpu_overlays_need_keys_from_a_mounted_file(overlay: str) -> None:
    resources = render(K8S / "overlays" / overlay)
    pod = pods(resources)["gateway"]
    variables = environment(resources, pod)
    (mount,) = (m for m in container_of(pod)["volumeMounts"] if m["name"] == "keys")
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "keys")
    assert volume["secret"]["optional"] is False
    (item,) = volume["secret"]["items"]
    assert variables["GATEWAY_API_KEYS"] == f"file:{mount['mountPath']}/{item['path']}"
    assert "subPath" not in mount  # a changed secret would not be seen


@pytest.mark.parametrize("overlay", ["gpu", "gpu-shared-kernels", "text"])
def test_engines_go_to_gpus_that_their_kernels_are_for(overlay: str) -> None:
    found = pods(render(K8S / "overlays" / overlay))
    dockerfile = (ROOT / "services" / "decoder" / "Dockerfile").read_text()
    architecture = re.search(r"^ARG CUDA_ARCH=(\d+)\.", dockerfile, re.MULTILINE)
    assert architecture is not None
    for name in GRPC_SERVICES.keys() & found.keys():
        affinity = found[name]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (expression,) = term["matchExpressions"]
        assert expression["key"] == "nvidia.com/gpu.compute.major"
        assert expression["values"] == [architecture[1]]


def test_engines_share_compiled_kernels_in_tritons_directory() -> None:
    resources = render(K8S / "overlays/gpu-shared-kernels")
    assert of_kind(resources, "PersistentVolumeClaim").keys() == {"model", "kernels"}
    for name, pod in pods(resources).items():
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        mounts = {m["name"]: m["mountPath"] for m in container_of(pod)["volumeMounts"]}
        shared = name in ("encoder", "decoder")
        assert (claims.get("kernels") == "kernels") == shared
        if shared:
            home = mounts["cache"]  # the image's user has it as its home
            dockerfile = (ROOT / "services" / name / "Dockerfile").read_text()
            assert "--create-home triptych" in dockerfile and home == "/home/triptych"
            assert mounts["kernels"] == f"{home}/.triton"
            # The volume is the group's, which the process is a member of.
            assert pod["spec"]["securityContext"]["fsGroup"] == 10001


def test_pods_are_restricted(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        inner = container_of(pod)["securityContext"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["capabilities"] == {"drop": ["ALL"]}
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_service_accounts_exist_and_mount_no_token(resources: list[Resource]) -> None:
    accounts = of_kind(resources, "ServiceAccount")
    assert {p["spec"]["serviceAccountName"] for p in pods(resources).values()} == set(accounts)
    assert all(a["automountServiceAccountToken"] is False for a in accounts.values())


def test_images_are_pinned(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        image = container_of(pod)["image"]
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", image)


def test_there_is_time_to_drain(resources: list[Resource]) -> None:
    gateway = environment(resources, pods(resources)["gateway"])
    longest_s = float(gateway["GATEWAY_REQUEST_TIMEOUT_S"])
    for name in services_in(resources):
        pod = pods(resources)[name]
        sleep_s = container_of(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = float(environment(resources, pod)[f"{name.upper()}_SHUTDOWN_GRACE_S"])
        assert grace_s >= longest_s
        assert pod["spec"]["terminationGracePeriodSeconds"] > sleep_s + grace_s


def test_names_keep_pods_that_terminate(resources: list[Resource]) -> None:
    for name in services_in(resources):
        spec = of_kind(resources, "Service")[name]["spec"]
        assert spec.get("publishNotReadyAddresses", False) == (name != "gateway")


def test_mounts_have_volumes_and_claims_exist(resources: list[Resource]) -> None:
    claims = of_kind(resources, "PersistentVolumeClaim")
    for name, pod in pods(resources).items():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        mounts = {m["name"]: m["mountPath"] for m in container_of(pod).get("volumeMounts", ())}
        assert mounts.keys() == volumes.keys()
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or claim["claimName"] in claims
            if volume["name"] == "model":
                model = environment(resources, pod)[f"{name.upper()}_MODEL"]
                assert claim and mounts["model"] == model


def test_network_policies_are_the_call_graph(resources: list[Resource]) -> None:
    policies = of_kind(resources, "NetworkPolicy")
    deny = policies.pop("default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    policies.pop("dns")
    label = "app.kubernetes.io/name"

    def edges(direction: str, side: str) -> set[tuple[str, str, int]]:
        return {
            (name, peer["podSelector"]["matchLabels"][label], port["port"])
            for name, policy in policies.items()
            for rule in policy["spec"].get(direction, ())
            for peer in rule.get(side, ())
            if "podSelector" in peer
            for port in rule["ports"]
        }

    names = pods(resources).keys()
    calls = {call for call in CALLS if {call[0], call[1]} <= names}
    assert edges("egress", "to") == calls
    assert {(a, b, port) for b, a, port in edges("ingress", "from")} == calls
    for name, policy in policies.items():
        assert policy["spec"]["podSelector"]["matchLabels"] == {
            label: name, "app.kubernetes.io/instance": "triptych",
        }  # fmt: skip
        for rule in policy["spec"].get("ingress", ()):
            allowed = {port["port"] for port in rule["ports"]}
            assert allowed <= set(container_ports(pods(resources)[name]).values())


def internet_of(resources: list[Resource]) -> dict[tuple[str, str], list[str]]:
    """What is left out of blocks of addresses that pods may call, by policy and block; the node's
    own cache of names is none.
    """
    return {
        (name, peer["ipBlock"]["cidr"]): peer["ipBlock"]["except"]
        for name, policy in of_kind(resources, "NetworkPolicy").items()
        for rule in policy["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer and name != "dns"
    }


def test_a_text_model_reaches_no_internet(text: list[Resource]) -> None:
    assert not internet_of(text)


def test_only_the_gateway_reaches_the_internet_and_no_private_range(
    vision: list[Resource],
) -> None:
    blocks = internet_of(vision)
    assert blocks.keys() == {("gateway", "0.0.0.0/0"), ("gateway", "::/0")}
    for (_, block), excepted in blocks.items():
        networks = [ip_network(cidr) for cidr in excepted]
        # An API server takes an IPv4-mapped range for one of IPv4, which is no part of ::/0.
        assert all(network.version == ip_network(block).version for network in networks)
        assert "::ffff:" not in str(excepted)
        for text in (
            "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "127.0.0.1", "100.64.0.1",
            "::1", "::", "fd00::1", "fe80::1", "ff02::1", "64:ff9b::a00:1",
            "2002:a00:1::1", "2001::1", "fec0::1", "::10.0.0.1",
        ):  # fmt: skip
            address = ip_address(text)
            if address.version == ip_network(block).version:
                assert any(address in network for network in networks), text


@pytest.mark.parametrize("name", SETTINGS)
def test_dockerfiles_set_known_variables_and_an_unprivileged_user(name: str) -> None:
    text = (ROOT / "services" / name / "Dockerfile").read_text()
    variables = dict(re.findall(rf"({name.upper()}_[A-Z_]+)=(\S+)", text))
    settings = SETTINGS[name]
    fields = {f"{name.upper()}_{field.upper()}": field for field in settings.model_fields}
    assert set(variables) <= set(fields)
    if name == "gateway":
        port = variables["GATEWAY_PORT"]
        assert port == str(settings.model_fields["port"].default)
    else:
        port = variables[f"{name.upper()}_ADDRESS"].removeprefix("0.0.0.0:")
        assert settings.model_fields["address"].default == f"127.0.0.1:{port}"
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)
    assert exposed is not None
    ports = {port} | {value for key, value in variables.items() if key.endswith("PORT")}
    assert set(exposed[1].split()) == ports
    final_stage = text[text.rindex("\nFROM ") :]
    # An editable installation points to the code: without it, the environment alone is nothing.
    assert "-e '.[" in text
    assert re.search(r"^COPY --from=\w+ /venv /venv\nCOPY --from=\w+ /app /app$", final_stage, re.M)
    user = re.search(r"^USER (\d+):(\d+)$", final_stage, re.MULTILINE)
    assert user is not None
    pod = pods(render(K8S / "vision"))[name]
    assert user[1] == str(pod["spec"]["securityContext"]["runAsUser"])
    assert f'"services.{name}"' in text
    assert ":latest" not in text


def test_only_the_local_overlay_is_open_to_everybody(resources: list[Resource]) -> None:
    pod = pods(resources)["gateway"]
    # Without the secret of keys, which is optional, the ConfigMap's value holds.
    config = {
        name: value
        for source in container_of(pod)["envFrom"]
        for name, value in of_kind(resources, "ConfigMap")[source["configMapRef"]["name"]][
            "data"
        ].items()
    }
    gateway = GatewaySettings.from_environment(
        own_settings("gateway", environment(resources, pod))
        | {"GATEWAY_API_KEYS": config.get("GATEWAY_API_KEYS", "")}
    )
    on_gpu = "nvidia.com/gpu" in json.dumps(resources)
    is_local = f"triptych/encoder:{VERSION}-cpu" in json.dumps(resources)
    assert gateway.is_open == is_local
    assert (gateway.keys_file is not None) == on_gpu
