"""Overlays with components, as users combine them; tests here and against a cluster render them."""

import os
from pathlib import Path

import yaml

K8S = Path(__file__).resolve().parents[3] / "deploy" / "k8s"
# What can be combined: overlay and components.
COMBINATIONS = {
    "autoscaling": ("gpu", "autoscaling"),
    "autoscaling-local": ("local", "autoscaling"),
    "autoscaling-text": ("text", "autoscaling/text"),
    "disruption": ("gpu", "disruption"),
    "disruption-text": ("text", "disruption"),
    "model-image": ("gpu", "model-image"),
    "model-image-text": ("text", "model-image"),
    "model-job": ("gpu", "model-job"),
    "dra": ("gpu", "dra"),
    "dra-text": ("text", "dra"),
    "no-spare-gpu": ("gpu", "no-spare-gpu"),
    "no-spare-gpu-text": ("text", "no-spare-gpu"),
    "priority": ("gpu-shared-kernels", "priority"),
    "monitoring": ("gpu", "monitoring"),
    "http-route": ("gpu", "http-route"),
    "ingress": ("text", "ingress"),
    "cell": ("gpu", "cell"),
    "cell-autoscaling": ("gpu", "cell", "autoscaling/cell", "disruption", "no-spare-gpu"),
    "mtls": ("gpu", "mtls", "mtls/cert-manager"),
    "mtls-text": ("text", "mtls/text"),
    "mtls-cell": ("gpu", "cell", "mtls/cell"),
    "token": ("local", "token"),
    "token-text": ("text", "token/text"),
    "token-cell": ("gpu", "cell", "token/cell"),
    "mtls-and-token": ("gpu", "mtls", "token"),
    "everything": (
        "gpu", "dra", "model-image", "autoscaling", "disruption", "no-spare-gpu", "priority",
        "monitoring", "http-route", "ingress", "mtls",
    ),
}  # fmt: skip


def combine(overlay: str, *components: str, directory: Path) -> Path:
    """A kustomization as a user would write it."""
    directory.mkdir(exist_ok=True)

    def path(name: str) -> str:
        return os.path.relpath(K8S / name, directory.resolve())

    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [path(f"overlays/{overlay}")],
        "components": [path(f"components/{name}") for name in components],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return directory
