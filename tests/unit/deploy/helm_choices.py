"""Values of the Helm chart, and for each the kustomization that says the same."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class Choice:
    """Values of the chart and the kustomization that says the same.

    Attributes:
        resource: kustomization below deploy/k8s.
        values: values of the chart, after those of `file`.
        file: example of the chart. None without one.
        components: components that are added to the kustomization.
        more: further entries of the kustomization.
        release: name of the release; another than triptych is also the suffix of names.
        namespace: namespace of all objects.
    """

    resource: str
    values: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    components: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    release: str = "triptych"
    namespace: str = "triptych"


def patch(kind: str, name: str, *operations: dict[str, Any]) -> dict[str, Any]:
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}


def add(path: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def replace(path: str, value: object) -> dict[str, Any]:
    return {"op": "replace", "path": path, "value": value}


def literals(name: str, *settings: str) -> dict[str, Any]:
    return {
        "name": name, "namespace": "triptych", "behavior": "merge", "literals": list(settings),
    }  # fmt: skip


POD = "/spec/template/spec"
CONTAINER = f"{POD}/containers/0"
AFFINITY = f"{POD}/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"
VALUES_OF_LABEL = f"{AFFINITY}/nodeSelectorTerms/0/matchExpressions/0/values"
FILLED = {"download": False}  # the claim is filled by hand, as in the overlays
PLAIN = {"form": "split", "disruption": {"enabled": False}}
DIGEST = f"sha256:{'ab' * 32}"
LABEL = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
SINGLE_VALUES = {
    "model": {"name": "ORG/NAME", "revision": "0123abc", "servedName": "mine"},
    "storage": {"size": "120Gi", "className": "fast", "accessModes": ["ReadWriteOncePod"]},
    "images": {"registry": "registry.example.com/team", "triptych": {"digest": DIGEST}},
    "imagePullSecrets": [{"name": "pull"}],
    "gpu": {
        "resource": "nvidia.com/mig-3g.40gb", "computeMajor": [], "tolerations": [],
        "nodeSelector": LABEL,
    },
    "single": {
        "gpus": 4, "args": ["--tensor-parallel", "2"], "settings": {"DECODER_STEP_MS": "20"},
        "resources": {"requests": {"cpu": "16", "memory": "96Gi"}, "limits": {"memory": "96Gi"}},
        "nodeSelector": {"pool": "big"},
    },
    "keys": {"secret": "own-keys"},
}  # fmt: skip
SINGLE_PATCHES = [
    patch(
        "Deployment", "triptych",
        {"op": "remove", "path": f"{POD}/affinity"}, {"op": "remove", "path": f"{POD}/tolerations"},
        add(f"{POD}/nodeSelector", LABEL | {"pool": "big"}),
        add(f"{POD}/imagePullSecrets", [{"name": "pull"}]),
        add(f"{CONTAINER}/args/-", "--tensor-parallel"), add(f"{CONTAINER}/args/-", "2"),
        replace(f"{CONTAINER}/resources", {
            "requests": {"cpu": "16", "memory": "96Gi", "ephemeral-storage": "1Gi",
                         "nvidia.com/mig-3g.40gb": "4"},
            "limits": {"memory": "96Gi", "ephemeral-storage": "8Gi", "nvidia.com/mig-3g.40gb": "4"},
        }),
        replace(f"{POD}/volumes/4/secret/secretName", "own-keys"),
    ),
    patch(
        "PersistentVolumeClaim", "model",
        replace("/spec/resources/requests/storage", "120Gi"), add("/spec/storageClassName", "fast"),
        replace("/spec/accessModes", ["ReadWriteOncePod"]),
    ),
]  # fmt: skip
SPLIT_VALUES = PLAIN | {
    "model": {"name": "ORG/NAME", "revision": "0123abc", "servedName": "mine"},
    "storage": {"size": "90Gi", "className": "shared"},
    "images": {"registry": "registry.example.com"},
    "imagePullSecrets": [{"name": "pull"}],
    "gpu": {"computeMajor": ["8", "9"]},
    "gateway": {
        "replicas": 5, "nodeSelector": {"pool": "web"},
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    },
    "encoder": {"replicas": 2, "settings": {"ENCODER_CACHE_BYTES": "1073741824"}},
    "decoder": {"replicas": 3, "settings": {"DECODER_STEP_MS": "20"}},
    "redis": {
        "maxMemory": "8gb", "nodeSelector": {"pool": "memory"},
        "resources": {"requests": {"memory": "10Gi"}, "limits": {"memory": "10Gi"}},
    },
    "keys": {"secret": "own-keys"},
    "token": {"secret": "own-token"},
}  # fmt: skip
PULL = add(f"{POD}/imagePullSecrets", [{"name": "pull"}])
REDIS_RESOURCES = {
    "requests": {"cpu": "500m", "memory": "10Gi", "ephemeral-storage": "64Mi"},
    "limits": {"memory": "10Gi", "ephemeral-storage": "256Mi"},
}
SPLIT_PATCHES = [
    patch("Deployment", "(gateway|encoder|decoder|redis)", PULL),
    patch("Job", "model-download", PULL,
          replace(f"{CONTAINER}/env/0/value", "ORG/NAME"),
          replace(f"{CONTAINER}/env/1/value", "0123abc")),
    patch("Deployment", "(encoder|decoder)", replace(VALUES_OF_LABEL, ["8", "9"])),
    patch("Deployment", "gateway", add(f"{POD}/nodeSelector", {"pool": "web"}),
          replace(f"{CONTAINER}/resources", {
              "requests": {"cpu": "2", "memory": "2Gi", "ephemeral-storage": "256Mi"},
              "limits": {"memory": "2Gi", "ephemeral-storage": "1Gi"},
          })),
    patch("Deployment", "redis", add(f"{POD}/nodeSelector", {"pool": "memory"}),
          replace(f"{CONTAINER}/args/3", "8gb"),
          replace(f"{CONTAINER}/resources", REDIS_RESOURCES)),
    *({"target": {"kind": "Deployment", "name": name}, "patch": yaml.safe_dump({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"template": {"spec": {"volumes": volumes}}},
    })} for name, volumes in {
        "gateway": [{"name": "keys", "secret": {"secretName": "own-keys"}},
                    {"name": "token", "secret": {"secretName": "own-token"}}],
        "encoder": [{"name": "token", "secret": {"secretName": "own-token"}}],
        "decoder": [{"name": "token", "secret": {"secretName": "own-token"}}],
    }.items()),
    patch("PersistentVolumeClaim", "model",
          replace("/spec/resources/requests/storage", "90Gi"),
          add("/spec/storageClassName", "shared")),
]  # fmt: skip
REGISTRY = [
    {"name": f"triptych/{name}", "newName": f"registry.example.com/triptych/{name}"}
    for name in ("gateway", "encoder", "decoder")
]
SCALED = {
    "enabled": True, "gateway": {"min": 3, "max": 30}, "encoder": {"min": 1, "max": 8},
    "decoder": {"min": 2, "max": 16, "sequences": 40},
}  # fmt: skip
SCALED_PATCHES = [
    patch("HorizontalPodAutoscaler", "gateway",
          replace("/spec/minReplicas", 3), replace("/spec/maxReplicas", 30)),
    patch("ScaledObject", "decoder",
          replace("/spec/minReplicaCount", 2), replace("/spec/maxReplicaCount", 16),
          replace("/spec/triggers/1/metadata/threshold", "40")),
]  # fmt: skip
# The component has one for encoders also where there are none.
NO_BUDGET_OF_ENCODERS = {
    "target": {"kind": "PodDisruptionBudget", "name": "encoder"},
    "patch": '{"$patch": "delete", "kind": "PodDisruptionBudget", "apiVersion": "policy/v1",'
    ' "metadata": {"name": "encoder"}}',
}
EVERYTHING = ("model-job", "autoscaling", "disruption", "monitoring", "http-route")
EVERYTHING_VALUES = {
    "form": "split", "autoscaling": {"enabled": True}, "monitoring": {"enabled": True},
    "route": {"enabled": True}, "model": {"servedName": "qwen3-vl"},
}  # fmt: skip
ADAPTERS = {"served": {"sql": "/adapters/sql", "gui": "/adapters/gui"}, "max": 8}
CHOICES = {
    "single": Choice("overlays/single"),
    "single-adapters": Choice(
        "overlays/single",
        {"adapters": {
            "served": {"sql": "ORG/SQL", "gui": "/adapters/gui"}, "max": 4, "existingClaim": "mine",
        }},
        more={"patches": [patch(
            "Deployment", "triptych",
            *(add(f"{CONTAINER}/args/-", word) for word in (
                "--adapter", "gui=/adapters/gui", "sql=ORG/SQL", "--max-adapters", "4",
            )),
            add(f"{POD}/volumes/-", {
                "name": "adapters",
                "persistentVolumeClaim": {"claimName": "mine", "readOnly": True},
            }),
            add(f"{CONTAINER}/volumeMounts/-", {
                "name": "adapters", "mountPath": "/adapters", "readOnly": True,
            }),
        )]},
    ),
    "split-adapters": Choice(
        "overlays/gpu",
        PLAIN | {
            "model": FILLED | {"servedName": "qwen3-vl"},
            "adapters": ADAPTERS | {"existingClaim": "adapters"},
        },
        components=("adapters",),
        more={"configMapGenerator": [
            literals(name, f"{name.upper()}_ADAPTERS=gui=/adapters/gui,sql=/adapters/sql")
            for name in ("encoder", "decoder")
        ]},
    ),
    "single-monitoring": Choice(
        "overlays/single", {"monitoring": {"enabled": True}, "route": {"enabled": True}},
        components=("monitoring", "http-route"),
    ),
    "single-values": Choice(
        "overlays/single", SINGLE_VALUES,
        more={
            "patches": SINGLE_PATCHES,
            "images": [{
                "name": "triptych/triptych", "digest": DIGEST,
                "newName": "registry.example.com/team/triptych/triptych",
            }],
            "configMapGenerator": [literals(
                "triptych", "MODEL=ORG/NAME", "REVISION=0123abc", "DECODER_STEP_MS=20",
                "GATEWAY_SERVED_MODEL_NAME=mine",
            )],
        },
    ),
    "qwen3-vl-2b-single": Choice("examples/qwen3-vl-2b-single", file="qwen3-vl-2b-single"),
    "qwen3-vl-8b-single": Choice("examples/qwen3-vl-8b-single", file="qwen3-vl-8b-single"),
    "demonstration": Choice("overlays/local", file="demonstration"),
    "gpu": Choice("overlays/gpu", PLAIN | {"model": FILLED | {"servedName": "qwen3-vl"}}),
    "text": Choice(
        "overlays/text", PLAIN | {"model": FILLED | {"servedName": "qwen3", "images": False}}
    ),
    "qwen3-vl-2b-split": Choice("examples/qwen3-vl-2b-gpu", file="qwen3-vl-2b-split"),
    "qwen3-8b-split": Choice(
        "examples/qwen3-8b-gpu", file="qwen3-8b-split", more={"patches": [NO_BUDGET_OF_ENCODERS]}
    ),
    "split-values": Choice(
        "overlays/gpu", SPLIT_VALUES, components=("model-job",),
        more={
            "patches": SPLIT_PATCHES, "images": REGISTRY,
            "replicas": [
                {"name": "gateway", "count": 5}, {"name": "encoder", "count": 2},
                {"name": "decoder", "count": 3},
            ],
            "configMapGenerator": [
                literals("gateway", "GATEWAY_SERVED_MODEL_NAME=mine", "GATEWAY_REPLICAS=5"),
                literals("encoder", "ENCODER_CACHE_BYTES=1073741824"),
                literals("decoder", "DECODER_STEP_MS=20"),
            ],
        },
    ),
    "tensor-parallel": Choice(
        "overlays/gpu",
        PLAIN | {
            "model": FILLED | {"servedName": "qwen3-vl"},
            "decoder": {"gpus": 2, "resources": {
                "requests": {"cpu": "16", "memory": "96Gi"}, "limits": {"memory": "96Gi"},
            }},
        },
        components=("tensor-parallel",),
    ),
    "everything": Choice("overlays/gpu", EVERYTHING_VALUES, components=EVERYTHING),
    "autoscaling-text": Choice(
        "overlays/text",
        {
            "form": "split", "autoscaling": SCALED,
            "model": FILLED | {"servedName": "qwen3", "images": False},
        },
        components=("autoscaling/text", "disruption"),
        more={
            "patches": [*SCALED_PATCHES, NO_BUDGET_OF_ENCODERS],
            "configMapGenerator": [literals("gateway", "GATEWAY_REPLICAS=30")],
        },
    ),
    "blue": Choice(
        "overlays/gpu", EVERYTHING_VALUES, components=EVERYTHING, release="blue", namespace="prod",
    ),
}  # fmt: skip
