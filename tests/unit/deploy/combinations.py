"""Overlays with components, as users combine them; tests here and against a cluster render them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.release import project_version

K8S = Path(__file__).resolve().parents[3] / "deploy" / "k8s"
VERSION = project_version(K8S.parents[1])  # that of all tags: test_release.py
_MOST = ("autoscaling", "disruption", "monitoring", "http-route", "ingress", "mtls")
# What can be combined: overlay and components.
COMBINATIONS = {
    "adapters": ("gpu", "adapters"),
    "adapters-text": ("text", "adapters"),
    "adapters-cell": ("gpu", "cell", "adapters"),
    "autoscaling": ("gpu", "autoscaling"),
    "autoscaling-local": ("local", "autoscaling"),
    "autoscaling-gateway": ("text", "autoscaling/gateway"),
    "autoscaling-hpa": ("gpu", "autoscaling/hpa"),
    "autoscaling-hpa-text": ("text", "autoscaling/hpa/text"),
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
    "tensor-parallel": ("gpu", "tensor-parallel", "autoscaling"),
    "tensor-parallel-text": ("text", "tensor-parallel"),
    "tensor-parallel-dra": ("gpu", "tensor-parallel", "dra", "tensor-parallel/dra"),
    "tenant-limits": ("gpu", "tenant-limits"),
    "tenant-limits-tls": (
        "gpu", "tenant-limits", "tenant-limits/tls", "mtls/cert-manager",
        "tenant-limits/tls/cert-manager",
    ),
    "tenant-limits-text": ("text", "tenant-limits", "autoscaling/text"),
    "limits-alert": ("text", "monitoring", "tenant-limits", "monitoring/limits"),
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
    "token-cell": ("gpu", "cell"),
    "mtls-and-token": ("local", "mtls", "token"),
    "traces": ("gpu", "traces"),
    "traces-text": ("text", "traces/text"),
    "traces-cell": ("gpu", "cell", "traces"),
    "openshift-dns": ("gpu", "model-job", "openshift-dns"),
    "openshift-dns-text": ("text", "openshift-dns"),
    "user-namespaces": ("gpu", "user-namespaces"),
    "redis-tls": ("gpu", "redis-tls", "mtls/cert-manager", "redis-tls/cert-manager"),
    "redis-tls-cell": ("gpu", "cell", "redis-tls/cell"),
    "single": ("single", "monitoring", "http-route", "openshift-dns"),
    "single-ingress": ("single", "ingress", "user-namespaces", "priority"),
    "everything": (
        "gpu", "dra", "model-image", "autoscaling", "disruption", "no-spare-gpu", "priority",
        "monitoring", "http-route", "ingress", "mtls",
    ),
}  # fmt: skip

# Overlay, components, namespace, instance. kubectl renders them: `kustomize.py` replaces nothing.
INSTALLATIONS = {
    "another-namespace": ("gpu", (*_MOST, "dra", "priority"), "prod", "triptych"),
    "blue": ("gpu", (*_MOST, "dra", "model-job", "mtls/cert-manager"), "triptych", "blue"),
    "blue-local": ("local", ("token",), "triptych", "blue"),
    "blue-cell": (
        "gpu", ("cell", "autoscaling/cell", "disruption", "monitoring"), "prod", "blue",
    ),
    "bearer": ("gpu", ("autoscaling", "autoscaling/bearer"), "prod", "blue"),
    "hpa": ("gpu", ("autoscaling/hpa",), "prod", "blue"),
    "limits": (
        "text", ("tenant-limits", "tenant-limits/tls", "monitoring", "monitoring/limits"),
        "prod", "blue",
    ),
    "text": ("text", ("autoscaling/text", "monitoring", "http-route"), "prod", "green"),
}  # fmt: skip


def combine(overlay: str, *components: str, directory: Path) -> Path:
    """A kustomization as a user would write it."""
    return _written(directory, [K8S / "overlays" / overlay], components)


def installed(name: str, directory: Path) -> Path:
    """An installation of its own namespace and name, as a user would write it: two levels."""
    overlay, components, namespace, instance = INSTALLATIONS[name]
    app = _written(
        directory / "app",
        [K8S / "overlays" / overlay],
        components,
        namespace=namespace,
        nameSuffix="" if instance == "triptych" else f"-{instance}",
        labels=[{"pairs": {"app.kubernetes.io/instance": instance}, "includeSelectors": True}],
    )
    follow = "follow/text" if overlay == "text" else "follow"
    return _written(directory, [app], [follow])


def _written(
    directory: Path, resources: Sequence[Path], components: Sequence[str], **more: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)

    def path(target: Path) -> str:
        return os.path.relpath(target, directory.resolve())

    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [path(resource) for resource in resources],
        "components": [path(K8S / "components" / name) for name in components],
        **more,
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return directory
