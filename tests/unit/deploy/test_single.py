"""The overlay `single`: one pod with the one-container image; pod and image agree."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.encode import SHAPES
from benchmarks.text_shapes import TEXT_SHAPES
from services.common.families import read_spec
from tests.ports import free_port
from tests.unit.deploy.combinations import K8S
from tests.unit.deploy.kustomize import Resource, render
from tests.unit.deploy.schemas import validate
from triptych.cli import build_parser
from triptych.layout import choose, share_of_encoding
from triptych.options import DEMONSTRATION_MODEL, ServeOptions
from triptych.plan import Links, plan_stack

ROOT = K8S.parents[1]
VERSIONS = ("1.34", "1.37")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
FINAL_STAGE = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
PLACES = ("overlays/single", "examples/qwen3-vl-2b-single", "examples/qwen3-vl-8b-single")


@pytest.fixture(scope="module", params=PLACES)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return render(K8S / request.param)


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name))
    return found


def pod_of(resources: list[Resource]) -> dict[str, Any]:
    return named(resources, "Deployment", "triptych")["spec"]["template"]["spec"]


def container_of(resources: list[Resource]) -> dict[str, Any]:
    (container,) = pod_of(resources)["containers"]
    return container


def environment_of(resources: list[Resource]) -> dict[str, str]:
    """Variables of the image, then those of the pod."""
    (lines,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", FINAL_STAGE, re.MULTILINE)
    found = dict(re.findall(r"([A-Z]\w+)=(\S+)", lines))
    (source,) = container_of(resources)["envFrom"]
    return found | named(resources, "ConfigMap", source["configMapRef"]["name"])["data"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str, resources: list[Resource]) -> None:
    for resource in resources:
        validate(resource, version)
    counts = [resource["kind"] for resource in resources]
    assert counts.count("Deployment") == counts.count("Service") == 1


def test_the_pod_is_that_of_the_image(resources: list[Resource]) -> None:
    pod, container = pod_of(resources), container_of(resources)
    assert re.search(r"^USER (\d+):(\d+)$", FINAL_STAGE, re.MULTILINE).groups() == (  # type: ignore[union-attr]
        str(pod["securityContext"]["runAsUser"]), str(pod["securityContext"]["runAsGroup"]),
    )  # fmt: skip
    variables = environment_of(resources)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == int(variables["GATEWAY_PORT"])
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", FINAL_STAGE, re.MULTILINE)
    entry = json.loads(words)
    assert ports["metrics"] == int(entry[entry.index("--metrics-port") + 1])
    exposed = re.search(r"^EXPOSE (.*)$", FINAL_STAGE, re.MULTILINE)
    assert exposed is not None and set(map(int, exposed[1].split())) == set(ports.values())
    assert "command" not in container  # the entry point stays


def test_serve_takes_the_arguments_and_the_variables(resources: list[Resource]) -> None:
    variables = environment_of(resources)
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
        for word in container_of(resources)["args"]
    ]
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", FINAL_STAGE, re.MULTILINE)
    options = build_parser().parse_args([*json.loads(words)[1:], *arguments])
    assert str(options.model) == variables["MODEL"] and options.revision == variables["REVISION"]
    # Within the container the gateways take the layout, and so the cards, that `serve` chooses.
    assert options.layout == "auto" and options.encoders is None and options.decoders is None
    # The plan checks each variable with the service that reads it.
    served = ServeOptions(model=DEMONSTRATION_MODEL, metrics_host=options.metrics_host)
    spec = read_spec(DEMONSTRATION_MODEL)
    environment = variables | {"GATEWAY_PORT": str(free_port())}
    plan = plan_stack(served, spec, None, environment, 4, Links(sockets=Path("/tmp/links")))
    assert plan.notes == []  # nothing that the manifest sets is overridden
    timeout_s = float(variables["GATEWAY_REQUEST_TIMEOUT_S"])
    for kind in ("GATEWAY", "ENCODER", "DECODER"):
        assert float(variables[f"{kind}_SHUTDOWN_GRACE_S"]) >= timeout_s
    assert plan.grace_s >= timeout_s


def test_there_is_time_to_drain_and_to_download(resources: list[Resource]) -> None:
    pod, container = pod_of(resources), container_of(resources)
    grace_s = float(environment_of(resources)["GATEWAY_SHUTDOWN_GRACE_S"])
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > grace_s + sleep_s
    startup = container["startupProbe"]
    most_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert most_s >= 3600
    deployment = named(resources, "Deployment", "triptych")["spec"]
    assert deployment["progressDeadlineSeconds"] > most_s
    assert deployment["strategy"] == {"type": "Recreate"} and deployment["replicas"] == 1


def test_downloads_go_to_a_claim_of_one_node(resources: list[Resource]) -> None:
    claim = named(resources, "PersistentVolumeClaim", "model")["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    (volume,) = (v for v in pod_of(resources)["volumes"] if v["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "model"}
    mounts = {m["name"]: m for m in container_of(resources)["volumeMounts"]}
    home = environment_of(resources)["HF_HOME"]
    assert home.startswith(f"{mounts['model']['mountPath']}/") and not mounts["model"].get(
        "readOnly"
    )
    assert pod_of(resources)["securityContext"]["fsGroup"] == 10001
    assert {v["name"] for v in pod_of(resources)["volumes"]} == mounts.keys()


def test_keys_are_needed_and_come_from_a_mounted_file(resources: list[Resource]) -> None:
    (volume,) = (v for v in pod_of(resources)["volumes"] if v["name"] == "keys")
    (mount,) = (m for m in container_of(resources)["volumeMounts"] if m["name"] == "keys")
    assert volume["secret"]["optional"] is False and "subPath" not in mount
    (item,) = volume["secret"]["items"]
    expected = f"file:{mount['mountPath']}/{item['path']}"
    assert environment_of(resources)["GATEWAY_API_KEYS"] == expected


def test_it_goes_to_gpus_that_its_kernels_are_for(resources: list[Resource]) -> None:
    affinity = pod_of(resources)["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    tagged = re.fullmatch(r".*:\d+\.\d+\.\d+-gpu(?:-([\d.]+a?))?", container_of(resources)["image"])
    assert tagged is not None
    default = re.search(r"^ARG CUDA_ARCH=(\S+)", DOCKERFILE, re.MULTILINE)
    assert default is not None
    architecture = tagged[1] or default[1]
    assert expression["values"] == [architecture.partition(".")[0]]
    limits, requests = (container_of(resources)["resources"][k] for k in ("limits", "requests"))
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"]
    assert limits["memory"] == requests["memory"]


def test_one_gpu_fits_a_node_of_four_cpus_and_sixteen_gib() -> None:
    """GKE, which keeps most for itself, leaves 3.92 CPUs and 13.3 GiB, less its own pods."""
    requests = container_of(render(K8S / "overlays/single"))["resources"]["requests"]
    assert int(requests["cpu"]) <= 3 and int(requests["memory"].removesuffix("Gi")) <= 12
    assert requests["nvidia.com/gpu"] == "1"


def test_the_network_is_that_of_the_other_forms(resources: list[Resource]) -> None:
    others = render(K8S / "overlays/gpu")
    for kind, name in (("Namespace", "triptych"), ("NetworkPolicy", "default-deny")):
        assert named(resources, kind, name) == named(others, kind, name)
    names, internet = named(resources, "NetworkPolicy", "triptych")["spec"]["egress"]
    assert names == named(others, "NetworkPolicy", "dns")["spec"]["egress"][0]
    gateway = named(others, "NetworkPolicy", "gateway")["spec"]
    assert internet in gateway["egress"]  # image URLs; the hub is among them
    opened = named(resources, "NetworkPolicy", "triptych")["spec"]["ingress"]
    theirs = json.dumps(gateway["ingress"])
    assert opened == json.loads(theirs.replace("9103", "9100"))
    service = named(resources, "Service", "gateway")["spec"]
    assert service["ports"] == named(others, "Service", "gateway")["spec"]["ports"]


def test_the_8b_on_two_cards_has_the_layout_that_its_example_names() -> None:
    spec = read_spec(DEMONSTRATION_MODEL)
    eight = replace(
        spec, text=TEXT_SHAPES["8b"], vision=replace(spec.vision_part, tower=SHAPES["8b"])
    )
    path: Path = K8S / "examples/qwen3-vl-8b-single"
    cards = int(container_of(render(path))["resources"]["limits"]["nvidia.com/gpu"])
    layout, _ = choose(share_of_encoding(eight), cards)
    assert cards == 2 and str(layout) == "both"
    assert f"chooses the\n# layout `{layout}`" in (path / "kustomization.yaml").read_text()
